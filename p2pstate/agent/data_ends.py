"""That the data of a rank has ended, for those that may wait for it in a step.

In: the word of a worker of this node, what other agents pass on. Out: the same to every worker of the round. Whoever
has a batch more ends its step, which cannot be done any more, at once; without this word it would wait in a collective
until the rank that has none has waited long enough for its vote (loop_end.py). A lost message costs that wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rendezvous.channel import Message
from rendezvous.node import Node

__all__ = ["KIND", "DataEnds"]

KIND = "data_ended"


class _HasRank(Protocol):
    @property
    def rank(self) -> int | None: ...


class DataEnds:
    def __init__(self, node: Node, tell_ranks: Callable[[Message], None]) -> None:
        self._node, self._tell_ranks = node, tell_ranks
        self.handlers: dict[str, Callable[..., None]] = {KIND: self._said}

    def _said(self, worker: _HasRank, epoch: int, step: int, num_batches: int, loop: int) -> None:
        body = [epoch, worker.rank, step, num_batches, loop]
        self._node.broadcast(KIND, body)
        self.heard(body)

    def heard(self, body: Any) -> None:
        """Raises TypeError or ValueError for what no agent of this version has sent."""
        epoch, rank, step, num_batches, loop = map(int, body)
        end = {"epoch": epoch, "rank": rank, "step": step, "num_batches": num_batches, "loop": loop}
        self._tell_ranks({"t": KIND, **end})
