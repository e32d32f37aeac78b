"""How many steps lie between two versions with ``every="auto"``: as few as cost a given part of the time. Pure.

In: what one rank has measured of its newest versions; then, vote by vote, the largest need of any rank. Out: a need (in
steps), and the interval that all ranks go by.

Invariants: the interval follows from what all ranks share, so no two ranks differ; it grows only when several votes in
a row ask for it, and shrinks only when many do and there is slack: what is measured is never exact.
Known limit: what copies cost others (memory bandwidth, cores, links) is seen only as far as it makes versions late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["MAX_EVERY", "NUM_MEASURED", "NUM_VOTES_DOWN", "NUM_VOTES_UP", "Interval", "need"]

MAX_EVERY = 1000  # beyond, versions are skipped as they are with any interval
NUM_MEASURED = 8  # versions
NUM_VOTES_UP = 3
NUM_VOTES_DOWN = 20
SLACK = 1.25  # a shorter interval has to suffice for this many times the need


def need(
    step_s: float,
    capture_s: Sequence[float],
    vote_s: Sequence[float],
    protected_s: Sequence[float],
    max_overhead: float,
) -> float:
    """In steps, 1 to ``MAX_EVERY``: the shortest interval in which a version arrives before the next one is due, and
    after which copying has taken at most ``max_overhead`` of the steps.

    Of each version, oldest first: how long its capture held the training thread up; the seconds from the capture's
    beginning to the next step's vote, and until it was complete. 1 until enough of them were seen.
    """
    if step_s <= 0 or min(len(capture_s), len(vote_s), len(protected_s)) < NUM_MEASURED:
        return 1.0
    capture, vote, protected = (median(series[-NUM_MEASURED:]) for series in (capture_s, vote_s, protected_s))
    to_arrive = 1 + (protected - vote) / step_s
    to_afford = capture / (max_overhead * step_s)
    return min(float(MAX_EVERY), max(1.0, to_arrive, to_afford))


@dataclass(frozen=True, slots=True)
class Interval:
    """``every``: so many steps. ``num_votes`` in a row want it on the same side; the mildest of them ``wanted``."""

    every: int = 1
    wanted: int = 1
    num_votes: int = 0

    def voted(self, largest_need: float) -> Interval:
        """After a vote in which no rank needed more than ``largest_need`` steps."""
        if math.ceil(largest_need) > self.every:
            wanted, mildest, patience = math.ceil(largest_need), min, NUM_VOTES_UP
        elif math.ceil(largest_need * SLACK) < self.every:
            wanted, mildest, patience = math.ceil(largest_need * SLACK), max, NUM_VOTES_DOWN
        else:
            return Interval(self.every)
        num_votes = 1
        if self.num_votes and (self.wanted > self.every) == (wanted > self.every):
            wanted, num_votes = mildest(wanted, self.wanted), self.num_votes + 1
        return Interval(wanted) if num_votes >= patience else Interval(self.every, wanted, num_votes)
