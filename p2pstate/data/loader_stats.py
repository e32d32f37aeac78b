"""How long the trainer waits for its batches, and why.

In: one call per delivered batch. Out: totals and the newest values, and a sentence when the trainer waits too much.
Invariants: pure arithmetic on values and times that are passed in; memory is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LoaderStats", "Meter", "diagnose"]

WINDOW = 50  # batches that a judgement is made of
STARVED_ABOVE = 0.1  # of the time spent waiting
TELL_AGAIN_AFTER_S = 600.0


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Totals of a loader since it was made, and its newest values.

    ``fetch_seconds``: time the trainer waited for batches. ``recent_wait``: the fraction of the time of the newest
    batches that was spent waiting. ``queue_depth``: batches that were ready when the newest one was asked for.
    ``cache_hits``, ``cache_misses``: chunks of files found in or fetched into a cache (``CachedFiles``).
    ``fetched_bytes``: bytes that came from the source of a cache; ``bytes_per_s``: per second of the loader's life.
    """

    num_batches: int = 0
    num_redelivered: int = 0
    fetch_seconds: float = 0.0
    last_fetch_seconds: float = 0.0
    recent_wait: float = 0.0
    queue_depth: int = 0
    num_workers: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    fetched_bytes: int = 0
    bytes_per_s: float = 0.0


class Meter:
    """Of one loader. Times come from one monotonic clock."""

    def __init__(self, now: float, num_workers: int) -> None:
        self._began, self._num_workers = now, num_workers
        self._num_batches = self._num_redelivered = 0
        self._fetch_s = self._last_fetch_s = 0.0
        self._num_ready = 0
        self._counters: dict[int, dict[str, float]] = {}  # of each worker's process, and of those before it
        self._before: dict[str, float] = {}
        self._window: deque[tuple[float, float, int]] = deque(maxlen=WINDOW)  # (when it came, waited, ready)
        self._told_at: float | None = None

    def delivered(self, now: float, waited_s: float, num_ready: int, *, again: bool = False) -> None:
        """A batch came at ``now``, after ``waited_s``; ``num_ready`` were there when it was asked for."""
        self._num_batches += 1
        self._num_redelivered += again
        self._fetch_s += waited_s
        self._last_fetch_s, self._num_ready = waited_s, num_ready
        self._window.append((now, waited_s, num_ready))

    def counted(self, worker: int, counters: Mapping[str, float]) -> None:
        """What a worker's process has counted since it began; a replacement begins again at nothing."""
        known = self._counters.get(worker, {})
        if any(counters.get(name, 0.0) < amount for name, amount in known.items()):
            for name, amount in known.items():
                self._before[name] = self._before.get(name, 0.0) + amount
        self._counters[worker] = dict(counters)

    def stats(self, now: float) -> LoaderStats:
        fetched = int(self._total("fetched_bytes"))
        return LoaderStats(
            num_batches=self._num_batches,
            num_redelivered=self._num_redelivered,
            fetch_seconds=self._fetch_s,
            last_fetch_seconds=self._last_fetch_s,
            recent_wait=self._recent_wait(),
            queue_depth=self._num_ready,
            num_workers=self._num_workers,
            cache_hits=int(self._total("cache_hits")),
            cache_misses=int(self._total("cache_misses")),
            fetched_bytes=fetched,
            bytes_per_s=fetched / (now - self._began) if now > self._began else 0.0,
        )

    def warning(self, now: float) -> str | None:
        """A sentence if the trainer has been waiting too much, not more often than every ten minutes."""
        if len(self._window) < WINDOW or (self._told_at is not None and now - self._told_at < TELL_AGAIN_AFTER_S):
            return None
        sentence = diagnose(self.stats(now), (self._window[-1][0] - self._window[0][0]) / (WINDOW - 1))
        if sentence is not None:
            self._told_at = now
        return sentence

    def _recent_wait(self) -> float:
        if len(self._window) < 2:
            return 0.0
        seconds = self._window[-1][0] - self._window[0][0]
        waited = sum(entry[1] for entry in self._window) - self._window[0][1]
        return min(1.0, waited / seconds) if seconds > 0 else 0.0

    def _total(self, name: str) -> float:
        return self._before.get(name, 0.0) + sum(each.get(name, 0.0) for each in self._counters.values())


def diagnose(stats: LoaderStats, step_s: float) -> str | None:
    """Why training waits for its data, and what to do; None if it does not. ``step_s``: from batch to batch."""
    if stats.recent_wait <= STARVED_ABOVE:
        return None
    says = (
        f"training waits for its data {stats.recent_wait:.0%} of the time ({stats.recent_wait * step_s:.3g} s of each "
        f"{step_s:.3g} s from batch to batch): "
    )
    chunks = stats.cache_hits + stats.cache_misses
    if chunks and stats.cache_misses > 0.1 * chunks:
        return says + (
            f"{stats.cache_misses} of {chunks} chunks were not in the cache yet and came at "
            f"{stats.bytes_per_s / 1e6:.3g} MB/s. The first epoch fills the cache; if this lasts, the cache is smaller "
            "than the data, or the source too slow: give it more space, more threads or larger chunks"
        )
    if stats.num_workers == 0:
        return says + "batches are made in the trainer's process. Give the loader num_workers=2 or more"
    busy_s = stats.num_workers * step_s
    return says + (
        f"{stats.num_workers} loader workers together make a batch in {step_s:.3g} s, so one takes about "
        f"{busy_s:.3g} s. More of them help if there are idle cores, else less work per sample; storage that is slow "
        "shows as idle workers"
    )
