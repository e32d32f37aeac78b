"""Where the copies of a round are, and what they do not protect from, told once each while it lasts.

In: rounds, and how many copies the workers ask for. Out: the nodes that keep each rank's copies, ``weakness`` events
(see placement.weaknesses).
"""

from __future__ import annotations

from collections.abc import Callable

from p2pstate.agent.events import EventLog
from p2pstate.placement import partners, weaknesses
from p2pstate.types import RoundInfo

__all__ = ["Weaknesses"]


class Weaknesses:
    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._copies, self._lean = 1, False  # until a worker has made its Replicator
        self._info: RoundInfo | None = None
        self._keepers: list[list[str]] = []  # by rank
        self.told: list[str] = []
        self.handlers: dict[str, Callable[..., None]] = {
            "copies": lambda worker, copies, lean: self.on_copies(copies, lean),
        }

    def keepers_of(self, rank: int | None) -> list[str]:
        """The other nodes that are to keep copies of a rank's state in the newest round."""
        return self._keepers[rank] if rank is not None and rank < len(self._keepers) else []

    def on_round(self, info: RoundInfo) -> None:
        self._info = info
        self._tell()

    def on_copies(self, copies: int, lean: bool) -> None:
        self._copies, self._lean = copies, lean
        self._tell()

    def _tell(self) -> None:
        if self._info is None:
            return
        nodes = [worker.node for worker in self._info.workers]
        pairing = partners(nodes, self._copies, self._info.labels)
        self._keepers = [[nodes[keeper] for keeper in keepers] for keepers in pairing]
        found = weaknesses(nodes, self._copies, self._info.labels, lean=self._lean)
        for text in found:
            if text not in self.told:
                self._events.emit("weakness", text, text=text)
        self.told = found
