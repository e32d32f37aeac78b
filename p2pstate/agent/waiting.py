"""How long a node waits while no view can be decided, and the end of its patience.

In: reasons to wait, views. Out: one call when it has waited for too long; seconds waited, for the meter.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rendezvous.node import Node, Timer

__all__ = ["Waiting"]


class Waiting:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._timer: Timer | None = None
        self._since = 0.0
        self._seconds = 0.0  # of waits that are over, and were not taken yet
        self._reason = ""

    @property
    def active(self) -> bool:
        return self._timer is not None

    @property
    def reason(self) -> str:
        """Why; empty when nothing is waited for."""
        return self._reason if self.active else ""

    def begin(self, reason: str, patience_s: float, give_up: Callable[[str], None]) -> None:
        """Wait, or go on waiting for another reason; ``give_up`` is called with the newest one."""
        self._reason = reason
        if self._timer is None:
            self._since = time.monotonic()
            self._timer = self._node.call_later(patience_s, lambda: give_up(self._reason))

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._seconds += time.monotonic() - self._since

    def take_seconds(self) -> float:
        """How long was waited since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
