"""Which ranks the others wait for, over windows of steps. Pure.

In: step events, with what each rank's meter measured and how long it waited for other ranks in it. Out: of each window
the slowest and the fastest rank by the time of their own (everything between two commits but waiting for others),
stragglers, and ranks that are starved of data.

Nobody is ended for being slow; that is hang.py's business, which looks at ranks that do nothing at all.
Known limit: waiting is seen from the newest beginning of a collective, or of a wait for one, to its end; work that a
rank does meanwhile counts as waiting. On cards, where collectives are only queued, it is what the gate's vote takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["WINDOW_STEPS", "Load", "Skew", "SkewHistory", "Windows", "judge"]

Event = Mapping[str, Any]

WINDOW_STEPS = 20
NUM_KEPT = 3  # windows, while a run lives
NUM_OPEN = 64  # windows of which more steps may come, when a run is read
MAX_POINTS = 1024  # of a picture
MAX_FINDINGS = 50
NOT_A_STEP = ("recovery", "repeated", "startup", "waiting", "shutdown", "phase")
STRAGGLES = 1.5  # times the time of a usual rank, and
NOTICEABLE = 0.1  # this part of a step, and
LEAST_S = 0.01
STARVES = 0.1  # of a step is waiting for data


@dataclass(frozen=True, slots=True)
class Load:
    """One rank in one window. Sums; ``own_s``: without waiting for others, ``fetch_s`` of it for data. Steps that a
    restart from disk brought again count twice."""

    num_steps: int = 0
    wall_s: float = 0.0
    own_s: float = 0.0
    fetch_s: float = 0.0
    last_step: int = 0

    def plus(self, step: int, wall_s: float, waited_s: float, fetch_s: float) -> Load:
        own_s, last_step = self.own_s + max(0.0, wall_s - waited_s), max(self.last_step, step)
        return Load(self.num_steps + 1, self.wall_s + wall_s, own_s, self.fetch_s + fetch_s, last_step)


@dataclass(frozen=True, slots=True)
class Skew:
    """Seconds are means per step. ``stragglers``, ``starved``: by rank, why."""

    first_step: int
    last_step: int
    slowest: int
    slowest_s: float
    fastest: int
    fastest_s: float
    stragglers: Mapping[int, str]
    starved: Mapping[int, str]


class Windows:
    """Fed event by event. ``keep``: how many windows are remembered, those that steps came for last."""

    def __init__(self, keep: int = NUM_KEPT) -> None:
        self._keep = keep
        self.loads: dict[int, dict[int, Load]] = {}  # by the window's first step, by rank

    def add(self, event: Event) -> Skew | None:
        """Returns what there is to say of the window that is forgotten for it."""
        seconds = event.get("clock", {}).get("seconds", {})
        if event["event"] != "step" or "useful" not in seconds or "waited_s" not in event:
            return None
        first = (event["step"] - 1) // WINDOW_STEPS * WINDOW_STEPS + 1
        window = self.loads[first] = self.loads.pop(first, {})
        wall_s = sum(part for name, part in seconds.items() if name.partition(".")[0] not in NOT_A_STEP)
        known = window.get(event["rank"], Load())
        window[event["rank"]] = known.plus(
            event["step"], wall_s, float(event["waited_s"]), float(seconds.get("data", 0.0))
        )
        if len(self.loads) <= self._keep:
            return None
        oldest = next(iter(self.loads))
        return judge(oldest, self.loads.pop(oldest))


class SkewHistory:
    """Of a whole run, however long: ``points`` of a picture, of neighbours the extremes where there are too many, and
    the first ``findings``. Fed event by event. A window whose steps come again much later is looked at twice."""

    def __init__(self) -> None:
        self._windows = Windows(NUM_OPEN)
        self.points: list[tuple[int, float, float]] = []  # (last step, seconds of the slowest, of the fastest rank)
        self._per_point = 1  # windows
        self._num_in_last = 0
        self.first_step = 0
        self.findings: list[tuple[str, str, str]] = []  # (steps, who, why)
        self.num_findings = 0

    def add(self, event: Event) -> None:
        if (skew := self._windows.add(event)) is not None:
            self._on_skew(skew)

    def finish(self) -> None:
        """No more events come."""
        for first, loads in sorted(self._windows.loads.items()):
            if (skew := judge(first, loads)) is not None:
                self._on_skew(skew)

    def _on_skew(self, skew: Skew) -> None:
        for what, ranks in (("straggles", skew.stragglers), ("is starved", skew.starved)):
            for rank, why in ranks.items():
                self.num_findings += 1
                if len(self.findings) < MAX_FINDINGS:
                    self.findings.append((f"{skew.first_step} to {skew.last_step}", f"rank {rank} {what}", why))
        self.first_step = self.first_step or skew.first_step
        point = (skew.last_step, skew.slowest_s, skew.fastest_s)
        if self.points and self._num_in_last < self._per_point:
            self.points[-1] = _extremes(self.points[-1], point)
            self._num_in_last += 1
            return
        if len(self.points) == MAX_POINTS:
            self.points = [_extremes(*pair) for pair in zip(self.points[::2], self.points[1::2], strict=True)]
            self._per_point *= 2
        self.points.append(point)
        self._num_in_last = 1


def _extremes(some: tuple[int, float, float], others: tuple[int, float, float]) -> tuple[int, float, float]:
    return max(some[0], others[0]), max(some[1], others[1]), min(some[2], others[2])


def judge(first_step: int, loads: Mapping[int, Load]) -> Skew | None:
    """``loads``: by rank. None where there are not two ranks to compare."""
    if len(loads) < 2:
        return None
    own_s = {rank: load.own_s / load.num_steps for rank, load in loads.items()}
    wall_s = max(load.wall_s / load.num_steps for load in loads.values())
    usual_s = statistics.median_low(own_s.values())
    slowest, fastest = max(own_s, key=own_s.__getitem__), min(own_s, key=own_s.__getitem__)
    last_step = max(load.last_step for load in loads.values())
    when = f"steps {first_step} to {last_step}"
    stragglers = {
        rank: f"a step takes {mine_s:.2f} s of its own, others {usual_s:.2f} s ({when})"
        for rank, mine_s in sorted(own_s.items())
        if mine_s > STRAGGLES * usual_s and mine_s - usual_s > max(LEAST_S, NOTICEABLE * wall_s)
    }
    waits_s = {rank: load.fetch_s / load.num_steps for rank, load in sorted(loads.items())}
    starved = {
        rank: f"it waits {wait_s:.2f} s a step for its batch ({when})"
        for rank, wait_s in waits_s.items()
        if wait_s > max(LEAST_S, STARVES * wall_s)
    }
    return Skew(first_step, last_step, slowest, own_s[slowest], fastest, own_s[fastest], stragglers, starved)
