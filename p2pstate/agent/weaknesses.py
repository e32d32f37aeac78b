"""What the copies on the nodes of a round do not protect from, told once each while it lasts.

In: rounds, and how many copies the workers ask for. Out: ``weakness`` events (see placement.weaknesses).
"""

from __future__ import annotations

from p2pstate.agent.events import EventLog
from p2pstate.placement import weaknesses
from p2pstate.types import RoundInfo

__all__ = ["Weaknesses"]


class Weaknesses:
    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._copies, self._lean = 1, False  # until a worker has made its Replicator
        self._info: RoundInfo | None = None
        self.told: list[str] = []

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
        found = weaknesses(nodes, self._copies, self._info.labels, lean=self._lean)
        for text in found:
            if text not in self.told:
                self._events.emit("weakness", text, text=text)
        self.told = found
