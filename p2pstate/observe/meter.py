"""Every second of one rank's wall clock, in exactly one category.

In: calls of the training thread that say what begins now. Out: seconds by category, since the last time they were taken
and in all. Invariant: the seconds add up to the time that has passed, whatever is called in which order, for each
instant belongs to the one category that is current.

Categories: ``useful`` (steps that were committed and kept), ``data`` (waiting for a batch), ``protection`` and
``saving`` (what copies and durable saves stop training for), ``repeated`` (steps that were discarded or done again),
``recovery.PHASE``, ``startup`` and ``shutdown`` (before and after the loop), ``phase.NAME`` (announced by the user),
``waiting`` (for a node, when there is no spare), ``other`` (the code between steps).

A step's time is *pending* until it is known what became of it. Of a discarded step, what exceeds a usual step is the
time in which the fault was not seen yet (``recovery.detect``); of the first step after a recovery, what exceeds a usual
one belongs to it (``recovery.first_step``).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["METER", "Meter"]

PENDING = "pending"


class Meter:
    """Used from the training thread only. ``clock`` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.restart("startup")

    def restart(self, category: str, earlier: Mapping[str, float] | None = None, *, age_s: float = 0.0) -> None:
        """Begin anew, in ``category``, ``age_s`` ago. ``earlier``: seconds of this rank's earlier processes, for
        :meth:`totals`."""
        self._category = category
        self._since = self._clock() - age_s
        self._held = False
        self._first_step = False
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._taken: defaultdict[str, float] = defaultdict(float, earlier or {})

    # -- what begins now

    def enter(self, category: str) -> str:
        """From now on it is ``category``; returns what it was. Nothing changes while the meter is held."""
        before = self._category
        if not self._held:
            self._book()
            self._category = category
        return before

    @contextmanager
    def inside(self, category: str) -> Iterator[None]:
        before = self.enter(category)
        try:
            yield
        finally:
            self.enter(before)

    def hold(self, category: str) -> None:
        """Everything is ``category`` until :meth:`release`: a newcomer's start is part of the run's recovery."""
        self.enter(category)
        self._held = True

    def release(self) -> None:
        self._held = False

    # -- steps

    def step_begins(self) -> None:
        self.enter(PENDING)

    def step_ends(self) -> None:
        """The block is left; what became of the step is told by one of the next three, or it goes on in another."""
        self.enter("other")

    def committed(self, usual_s: float, *, repeated: bool) -> None:
        """The pending time was a step. ``usual_s``: how long steps take; 0: not known yet."""
        self._book()
        if self._first_step and usual_s:
            self._move(PENDING, "recovery.first_step", self._seconds[PENDING] - usual_s)
        self._first_step = False
        self._move(PENDING, "repeated" if repeated else "useful")

    def discarded(self, usual_s: float, since_error_s: float) -> None:
        """The pending time was in vain. ``since_error_s``: how long ago this rank saw an error."""
        self._book()
        self._move(PENDING, "recovery.abort", since_error_s)
        if usual_s:
            self._move(PENDING, "recovery.detect", self._seconds[PENDING] - usual_s)
        self._move(PENDING, "repeated")

    def recovered(self) -> None:
        """The next step that is committed is the first one after a recovery."""
        self._first_step = True

    def move(self, source: str, target: str, seconds: float) -> None:
        """Some of what was booked since the last :meth:`take` is something else, as is known only now."""
        self._book()
        self._move(source, target, seconds)

    # -- what has passed

    def take(self, *, all_of_it: bool = False) -> dict[str, float]:
        """Seconds since the last time, without those of a step whose outcome is open (``all_of_it``: it is in vain)."""
        self._book()
        if all_of_it:
            self._move(PENDING, "repeated")
        pending = self._seconds.pop(PENDING, 0.0)
        taken = {category: seconds for category, seconds in self._seconds.items() if seconds > 0}
        for category, seconds in taken.items():
            self._taken[category] += seconds
        self._seconds.clear()
        if pending:
            self._seconds[PENDING] = pending
        return taken

    def report(self, *, all_of_it: bool = False) -> dict[str, Any]:
        """:meth:`take` as a record: until when, in seconds since 1970, and the seconds by category."""
        taken = self.take(all_of_it=all_of_it)
        return {"until": time.time(), "seconds": {name: round(seconds, 6) for name, seconds in taken.items()}}

    def totals(self) -> dict[str, float]:
        """Seconds by category, up to now."""
        self._book()
        totals = dict(self._taken)
        for category, seconds in self._seconds.items():
            if seconds > 0:
                totals[category] = totals.get(category, 0.0) + seconds
        return totals

    def _book(self) -> None:
        now = self._clock()
        self._seconds[self._category] += now - self._since
        self._since = now

    def _move(self, source: str, target: str, seconds: float | None = None) -> None:
        available = self._seconds[source]
        amount = available if seconds is None else min(max(seconds, 0.0), available)
        self._seconds[source] -= amount
        self._seconds[target] += amount


METER = Meter()  # of this process
