"""What collectives returned to each rank before its training loop, kept for the processes that take the rank later.

In: the journals of this node's workers (groups/journal.py), those of other nodes where this one is spare. Out: the
journal of a rank. Opaque bytes, never looked into.

Invariants: everything here runs on the node's thread; a journal goes to every spare node of the view, once.
Known limit: a rank whose journal does not fit in is started without: all workers start again together if it needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rendezvous.node import Node
from rendezvous.plain import bytes_from, count_from, list_from
from rendezvous.types import MemberKey, View

__all__ = ["Journals"]

MAX_BYTES = 64 << 20  # of all ranks
MAX_RANK = 1 << 20
MAX_ONE_BYTES = 6 << 20  # of one rank: what a worker keeps is less


class Journals:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._of_rank: dict[int, bytes] = {}
        self._mine: set[int] = set()  # ranks whose journal this node sends to others
        self._spares: tuple[MemberKey, ...] = ()

    def of(self, rank: int) -> bytes:
        """Empty: nothing is known."""
        return self._of_rank.get(rank, b"")

    def on_view(self, view: View, mine: Iterable[int]) -> None:
        """``mine``: the ranks of this node."""
        self._mine = set(mine)
        before, self._spares = self._spares, tuple(member.key for member in view.spares)
        for spare in self._spares:
            if spare not in before:
                for rank in sorted(self._mine & self._of_rank.keys()):
                    self._send(spare, rank)

    def from_worker(self, rank: int | None, packed: object) -> None:
        """ValueError for what no worker sends."""
        number = count_from(rank, "a rank", MAX_RANK)
        self._keep(number, bytes_from(packed, "a journal", MAX_ONE_BYTES))
        for spare in self._spares:
            self._send(spare, number)

    def heard(self, body: Any) -> None:
        """Another node's word to a spare one. ValueError for nonsense."""
        rank, packed = list_from(body, "a journal", 2)
        number = count_from(rank, "a rank", MAX_RANK)
        if number not in self._mine:
            self._keep(number, bytes_from(packed, "a journal", MAX_ONE_BYTES))

    def _keep(self, rank: int, packed: bytes) -> None:
        others = sum(len(each) for number, each in self._of_rank.items() if number != rank)
        if others + len(packed) <= MAX_BYTES:
            self._of_rank[rank] = packed
        else:
            self._of_rank.pop(rank, None)  # what was there is of an earlier start

    def _send(self, spare: MemberKey, rank: int) -> None:
        if spare != self._node.key and rank in self._of_rank:
            self._node.send(spare, "journal", [rank, self._of_rank[rank]])
