"""What protection costs and what it achieves, as numbers of this process.

In: one call per capture, wait and arrival. Out: a bounded history and running totals, for benchmarks and status pages.
Times are seconds, sizes bytes; the newest ``HISTORY`` values of each series are kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["ProtectionStats"]

HISTORY = 4096


def _series() -> deque[float]:
    return deque(maxlen=HISTORY)


@dataclass(slots=True)
class ProtectionStats:
    """``exposed`` times are spent on the training thread: the copy into the own slot, and waiting at the gate.

    ``protected_s``: from the beginning of a capture until the own and the buddy's copy were complete. ``saved_s``: from
    the beginning of the capture until the version was a complete checkpoint on disk. ``every``: steps from one version
    to the next, as of now.
    """

    every: int = 1
    num_captured: int = 0
    num_skipped: int = 0
    num_shipped_bytes: int = 0
    num_own_bytes: int = 0  # of the newest version: what only this rank has
    num_shared_bytes: int = 0  # of the newest version: this rank's piece of what several ranks have
    num_saved: int = 0
    num_saves_failed: int = 0
    num_saves_late: int = 0  # the next one was due before the end, and left out
    capture_s: deque[float] = field(default_factory=_series)
    wait_s: deque[float] = field(default_factory=_series)
    protected_s: deque[float] = field(default_factory=_series)
    saved_s: deque[float] = field(default_factory=_series)
