"""Leaves that several ranks hold alike, compared by digests: whether they are at the start, and still are later.

In: what one rank collected, the round's store. Out: the same, with leaves that turned out not to be alike marked as
this rank's own (they are shipped then); :class:`Difference` values that say which ranks differ.

How leaves are distributed says who should hold them alike; nothing keeps a model from being initialised or stepped
differently. So the first ``NUM_CONFIRMATIONS`` states of a run are compared, leaf by leaf. What is found later is taken
for corruption, and told with the ranks that differ from most; what becomes of it is decided elsewhere.

Invariants: of each set of ranks the lowest decides, so all its members come to the same result; nothing is waited for
before everything that others wait for was said.
Known limits: of two ranks nobody can tell which one is right. What is not alike costs its bytes on the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import msgpack
import torch
import xxhash
from torch._C._distributed_c10d import Store

from p2pstate.live_body import flat_bytes, live_memory_of
from p2pstate.state import Collected, Leaf

__all__ = ["NUM_CONFIRMATIONS", "Difference", "Replicas", "differences"]

NUM_CONFIRMATIONS = 3  # the initial state, and the first two steps: optimizers make their state in the first

Members = tuple[int, ...]
Digests = Mapping[str, bytes]  # of each leaf by name; empty where a rank does not have it


@dataclass(frozen=True, slots=True)
class Difference:
    """Leaves that ``members`` should hold alike. ``ranks`` hold other bytes than most; all members where there is no
    majority."""

    members: Members
    ranks: Members
    leaves: tuple[str, ...]

    @property
    def majority(self) -> bool:
        return self.ranks != self.members

    def __str__(self) -> str:
        more = f" (and {len(self.leaves) - 1} more)" if len(self.leaves) > 1 else ""
        who = ", ".join(map(str, self.ranks))
        others = len(self.members) - len(self.ranks)
        if self.majority:
            whose = f"of rank{'s' * (len(self.ranks) > 1)} {who} {'differ' if len(self.ranks) > 1 else 'differs'}"
            return f"{self.leaves[0]}{more} {whose} from that of the other {others}"
        return f"{self.leaves[0]}{more} differs between ranks {who}, without a majority"


def differences(members: Members, said: Mapping[int, Digests]) -> list[Difference]:
    """Pure. ``said``: of every member the digests of the leaves that all should hold alike."""
    names = sorted({name for digests in said.values() for name in digests})
    found: dict[Members, list[str]] = {}
    for name in names:
        its = {rank: said[rank].get(name, b"") for rank in members}
        (most, count), *_ = Counter(its.values()).most_common(1)
        if count == len(members):
            continue
        ranks = tuple(rank for rank in members if its[rank] != most) if count > len(members) / 2 else members
        found.setdefault(ranks, []).append(name)
    return [Difference(members, ranks, tuple(leaves)) for ranks, leaves in found.items()]


class Replicas:
    """One rank's part. ``every``: compare every so many steps after the beginning; 0: never."""

    def __init__(self, rank: int, every: int) -> None:
        self._rank = rank
        self._every = every
        self._num_left = NUM_CONFIRMATIONS
        self._alone: set[tuple[Members, str]] = set()
        self._applied: tuple[list[Leaf], list[Leaf]] | None = None  # to the leaves seen last

    @property
    def confirming(self) -> bool:
        """What differs now was never alike."""
        return self._num_left > 0

    def reconfirm(self) -> None:
        """Ranks have trained apart since: compare the next state, and ship what differs."""
        self._num_left = max(self._num_left, 1)

    def is_due(self, step: int) -> bool:
        return self.confirming or (self._every > 0 and step % self._every == 0)

    def pack(self) -> list[Any]:
        """What a rank that joins has to know."""
        return [self._num_left, [[list(members), name] for members, name in sorted(self._alone)]]

    def adopt(self, told: Iterable[Sequence[Any]]) -> None:
        """``told``: what the ranks that were there before say; nothing when all are new."""
        told = list(told)
        if told:
            self._num_left = max(num_left for num_left, _ in told)
            self._alone = {(tuple(members), name) for _, alone in told for members, name in alone}
            self._applied = None

    def applied(self, collected: Collected) -> Collected:
        """With the leaves that are not alike marked as this rank's own."""
        if not self._alone:
            return collected
        if self._applied is None or self._applied[0] is not collected.leaves:
            own = (self._rank,)
            leaves = [
                replace(leaf, holders=own) if (leaf.holders, leaf.name) in self._alone else leaf
                for leaf in collected.leaves
            ]
            self._applied = collected.leaves, leaves
        return replace(collected, leaves=self._applied[1])

    def compare(self, collected: Collected, store: Store, timeout_s: float) -> list[Difference]:
        """Of all sets that this rank is in. All ranks call this at the same step; raises what the store raises."""
        alike: dict[Members, list[Leaf]] = {}
        for leaf in self.applied(collected).leaves:
            if len(leaf.holders) > 1:
                alike.setdefault(leaf.holders, []).append(leaf)
        mine = {
            members: {
                leaf.name: xxhash.xxh3_128_digest(live_memory_of(flat_bytes(leaf.tensor).cpu())) for leaf in leaves
            }
            for members, leaves in sorted(alike.items())
        }
        found = self._exchange(mine, store, timedelta(seconds=timeout_s))
        if self.confirming:
            self._num_left -= 1
            self._alone |= {(each.members, name) for each in found for name in each.leaves}
            self._applied = None
        return found

    def _exchange(self, mine: Mapping[Members, Digests], store: Store, timeout: timedelta) -> list[Difference]:
        """First one digest of each set, then, where these differ, those of all its leaves."""
        wholes = {members: xxhash.xxh3_128_digest(msgpack.packb(sorted(its.items()))) for members, its in mine.items()}
        for members, whole in wholes.items():
            store.set(_key("whole", members, self._rank), whole.hex())
        differing = []
        for members in self._led(mine):
            said = {bytes(value) for value in _all(store, "whole", members, timeout).values()}
            store.set(_key("alike", members), str(int(len(said) == 1)))
        for members in mine:
            if bytes(_one(store, _key("alike", members), timeout)) != b"1":
                differing.append(members)
                store.set(_key("leaves", members, self._rank), msgpack.packb(dict(mine[members])))
        for members in self._led(differing):
            read = {rank: msgpack.unpackb(raw) for rank, raw in _all(store, "leaves", members, timeout).items()}
            result = [[each.ranks, each.leaves] for each in differences(members, read)]
            store.set(_key("result", members), msgpack.packb(result))
        return [
            Difference(members, tuple(ranks), tuple(leaves))
            for members in differing
            for ranks, leaves in msgpack.unpackb(_one(store, _key("result", members), timeout))
        ]

    def _led(self, sets: Iterable[Members]) -> list[Members]:
        return [members for members in sets if members[0] == self._rank]


def _key(what: str, members: Members, rank: int | None = None) -> str:
    name = xxhash.xxh3_64_hexdigest(repr(members).encode())
    return f"{what}/{name}" if rank is None else f"{what}/{name}/{rank}"


def _one(store: Store, key: str, timeout: timedelta) -> bytes:
    store.wait([key], timeout)
    return bytes(store.get(key))


def _all(store: Store, what: str, members: Members, timeout: timedelta) -> dict[int, bytes]:
    keys = {rank: _key(what, members, rank) for rank in members}
    store.wait(list(keys.values()), timeout)
    return {rank: bytes(store.get(key)) for rank, key in keys.items()}


def _digest_of(tensor: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(live_memory_of(flat_bytes(tensor).cpu()))
