"""All groups of this process, and how they are connected for a round.

In: the creation of groups (by torch, through the backend ``p2p``), and rounds. Out: every group connected to its peers
of the same round, together with two groups of our own: *gate* (the votes) and *replication* (bulk state).

Invariants: groups are identified by (members, ordinal among groups of the same members), not by creation order alone,
and connected in the order of these keys, so that ranks which belong to different sets of groups cannot wait for each
other in a circle. A cut (an abort, the first error) frees every thread that is blocked in any of them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from p2pstate.groups.group import P2PGroup
from p2pstate.groups.inner import Inner, build_inner
from p2pstate.groups.sockets import Connections
from p2pstate.groups.status import STATUS, Status
from p2pstate.groups.waiting import ABANDON_AFTER_S

__all__ = ["REGISTRY", "Registry"]

OWN_TIMEOUT = timedelta(minutes=30)
GATE, REPLICATION = "gate", "replication"


class Registry:
    def __init__(self, status: Status) -> None:
        self._status = status
        self._groups: list[P2PGroup] = []
        self._ordinals: Counter[tuple[int, ...]] = Counter()
        self._lock = threading.Lock()
        self._building: list[Connections] = []
        self._cut_epoch = 0
        self.gate: Inner | None = None
        self.replication: Inner | None = None
        # Set by the worker: the store of a round, this process's rank and address, and the world.
        self.make_store: Callable[[int], Store] | None = None
        self.host = ""
        self.rank = 0
        self.world_size = 0

    @property
    def groups(self) -> Sequence[P2PGroup]:
        return self._groups

    def create(self, members: Sequence[int], rank: int, timeout: timedelta) -> P2PGroup:
        """A new group; connected at once unless this process is alone (solo) or has seen an error."""
        ranks = tuple(members) or tuple(range(self.world_size))
        ordinal = self._ordinals[ranks]
        self._ordinals[ranks] += 1
        digest = hashlib.blake2b(repr(ranks).encode(), digest_size=6).hexdigest()
        key = f"{len(ranks):06d}-{digest}-{ordinal:04d}"
        group = P2PGroup(key, ranks, rank, timeout, self._status)
        self._groups.append(group)
        if not self._status.echoing:
            try:
                group.attach(self._build(key, group.members, self._status.epoch, timeout))
            except Exception as error:
                self._status.fail(error)
        self._status.raise_if_loud()
        return group

    def build(self, epoch: int, *, own_only: bool = False) -> dict[str, Inner]:
        """Connections of round ``epoch`` for our own two groups and (unless ``own_only``) for every group there is.

        Nothing is in use before :meth:`attach`, so a thread that is left behind here changes nothing. Raises what the
        store or gloo raises when the round ends or a member does not come.
        """
        world = tuple(range(self.world_size))
        built: dict[str, Inner] = {}
        try:
            for key in (GATE, REPLICATION):
                built[key] = self._build(key, world, epoch, OWN_TIMEOUT)
            for group in [] if own_only else sorted(self._groups, key=lambda group: group.key):
                built[group.key] = self._build(group.key, group.members, epoch, group.timeout)
        except BaseException:
            for inner in built.values():
                inner.release()
            raise
        return built

    def attach(self, built: dict[str, Inner]) -> None:
        """Use these connections. Collectives go on echoing until ``STATUS.connect``."""
        self.gate, self.replication = built[GATE], built[REPLICATION]
        for group in self._groups:
            if group.key in built:
                group.attach(built[group.key])

    def cut(self, epoch: int, *, replication: bool = True) -> None:
        """Free everything that waits on connections of round ``epoch`` or an older one. Safe from any thread."""
        with self._lock:
            self._cut_epoch = max(self._cut_epoch, epoch)
            building = list(self._building)
        for connections in building:
            connections.cut()
        inners = [group.inner for group in self._groups] + [self.gate]
        for inner in [*inners, self.replication] if replication else inners:
            if inner is not None and inner.epoch <= epoch:
                inner.cut()

    def release(self) -> None:
        """Let go of all connections (the groups stay).

        Waits a little until gloo's threads have ended, so that none of them can still write into a tensor of the model.
        One that could not be freed receives nothing any more: its connections are cut.
        """
        gone = [group.detach() for group in self._groups]
        gone += [inner.release() for inner in (self.gate, self.replication) if inner is not None]
        self.gate = self.replication = None
        deadline = time.monotonic() + ABANDON_AFTER_S
        for event in gone:
            if event is not None:
                event.wait(max(0.0, deadline - time.monotonic()))

    def _build(self, key: str, members: tuple[int, ...], epoch: int, timeout: timedelta) -> Inner:
        assert self.make_store is not None
        store = PrefixStore(f"groups/{key}", self.make_store(epoch))
        # Members may come minutes apart (one still reads its data); gloo's own patience while connecting is short.
        store.set(f"here/{self.rank}", "")
        store.wait([f"here/{rank}" for rank in members], timeout)
        mine: list[Connections] = []

        def on_built(connections: Connections) -> None:
            mine.append(connections)
            with self._lock:
                self._building.append(connections)
                if self._cut_epoch >= epoch:
                    connections.cut()

        try:
            return build_inner(store, members.index(self.rank), len(members), self.host, epoch, timeout, on_built)
        finally:
            with self._lock:
                for connections in mine:
                    self._building.remove(connections)


REGISTRY = Registry(STATUS)
