"""What workers ask of their agent: the round's store, memory for slots, what the vault holds.

In: requests that carry a number. Out: one reply each, with the same number, sometimes with a descriptor. See
worker/link.py for the other end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from p2pstate.types import Part
from p2pstate.vault import Vault, VaultFull
from rendezvous.channel import Message
from rendezvous.node import Node
from rendezvous.store_line import store_reply_message
from rendezvous.types import StoreReply

__all__ = ["Requests"]


class _HasRank(Protocol):
    @property
    def rank(self) -> int | None: ...


Asker = TypeVar("Asker", bound=_HasRank)


class Requests(Generic[Asker]):
    def __init__(
        self,
        node: Node,
        tell: Callable[[Asker, Message, tuple[int, ...]], None],
        vault: Vault,
        lineage: Mapping[int, list[int]],
    ) -> None:
        """``tell`` sends to a worker. ``lineage``: round -> the version it resumed, as far as this agent knows."""
        self._node = node
        self._tell = tell
        self._vault = vault
        self._lineage = lineage
        self._needs_round = 0
        self._needed: dict[int | None, set[Part]] = {}  # of each rank that has said so in that round
        self.handlers: dict[str, Callable[..., None]] = {
            "store": self._store,
            "allocate": self._allocate,
            "open": self._open,
            "inventory": self._inventory,
            "needs": self._needs,
            "room": self._room,
        }

    def _reply(self, worker: Asker, number: int, fd: int | None = None, **fields: Any) -> None:
        self._tell(worker, {"t": "reply", "id": number, **fields}, () if fd is None else (fd,))

    def _store(self, worker: Asker, id: int, epoch: int, op: str, args: list[Any], deadline_s: float) -> None:
        def reply(answer: StoreReply) -> None:
            self._tell(worker, store_reply_message(id, answer), ())

        self._node.store_request(epoch, op, args, deadline_s, reply)

    def _allocate(self, worker: Asker, id: int, part: list[Any], index: int, num_bytes: int) -> None:
        wanted = Part.unpack(part)
        if worker.rank in self._needed:
            self._needed[worker.rank].add(wanted)
        try:
            _, fd = self._vault.allocate(wanted, index, num_bytes)
        except VaultFull as error:
            self._reply(worker, id, error=str(error))
        else:
            self._reply(worker, id, fd)

    def _open(self, worker: Asker, id: int, slot: int) -> None:
        self._reply(worker, id, self._vault.open(slot))

    def _needs(self, worker: Asker, epoch: int, num_local: int, parts: list[list[Any]]) -> None:
        """Everything is protected in ``parts``, as far as this worker writes it. Once all on the node have said which
        parts theirs are, the others (of former wards) are let go."""
        if epoch > self._needs_round:
            self._needs_round = epoch
            self._needed.clear()
        self._needed[worker.rank] = {Part.unpack(part) for part in parts}
        if len(self._needed) == num_local:
            self._vault.retain(set().union(*self._needed.values()))

    def _room(self, worker: Asker, id: int) -> None:
        bound = self._vault.room()
        self._reply(worker, id, left_bytes=bound.left_bytes, what=bound.what)

    def _inventory(self, worker: Asker, id: int) -> None:
        records = [record.pack() for record in self._vault.records()]
        lineage = [[epoch, version] for epoch, version in self._lineage.items()]
        self._reply(worker, id, records=records, lineage=lineage)
