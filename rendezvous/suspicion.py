"""When a suspect is dead: plain arithmetic, no clock.

Flows in: how many members confirmed a suspicion, how many could, and the two bounds. Flows out: seconds.
Invariants: more confirmations never lengthen the wait; the result lies between the bounds.
The rule is the one of SWIM's Lifeguard extension: a suspect gets the long time while only one member suspects it (that
member may itself be the slow one) and the time falls with the logarithm of independent confirmations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

EXPECTED_CONFIRMATIONS = 3


def suspicion_timeout_s(num_confirmations: int, num_expected: int, min_s: float, max_s: float) -> float:
    """How long after the first suspicion a suspect is dead, given `num_confirmations` beyond the first."""
    if num_expected < 1:
        return max_s
    share = math.log(min(num_confirmations, num_expected) + 1) / math.log(num_expected + 1)
    return max(min_s, max_s - share * (max_s - min_s))


def num_expected_confirmations(num_live: int) -> int:
    """How many members besides the suspect and the first accuser may confirm, of `num_live` that are not dead."""
    return max(0, min(EXPECTED_CONFIRMATIONS, num_live - 2))


@dataclass(slots=True)
class Suspicion:
    """One suspect's clock: who accused it, since when. Advanced in place by its owner (detector.py)."""

    since_s: float
    accusers: set[str] = field(default_factory=set)

    def deadline_s(self, num_live: int, min_s: float, max_s: float) -> float:
        expected = num_expected_confirmations(num_live)
        return self.since_s + suspicion_timeout_s(len(self.accusers) - 1, expected, min_s, max_s)

    def postpone(self, by_s: float) -> None:
        """The judge itself was stalled for `by_s`: that time proves nothing about the suspect."""
        self.since_s += by_s
