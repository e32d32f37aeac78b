"""Time and the network between simulated nodes: what passes from where to where, and how late. Seeded.

Flows in: names, cuts, a share of losses, actions to run at a time. Flows out: those actions in the order of their
times; whether and when a message arrives.
Invariants: the same seed and the same calls give the same order; what is due at the same time runs in the order in
which it was asked for.
Limits: a message that was sent arrives, whatever is cut meanwhile.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence


class SimulatedNetwork:
    """`cuts`: pairs of sides of which the second hears nothing from the first; `loss`: share of messages lost."""

    def __init__(self, names: Sequence[str], rng: random.Random) -> None:
        self.now = 0.0
        self.loss = 0.0
        self.cuts: list[tuple[frozenset[str], frozenset[str]]] = []
        self.addresses = {name: f"127.0.0.1:{7001 + index}" for index, name in enumerate(names)}
        self._names = {address: name for name, address in self.addresses.items()}
        self._rng = rng
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at_s, next(self._order), action))

    def after(self, low_s: float, high_s: float, action: Callable[[], None]) -> None:
        """At a random time between `low_s` and `high_s` from now."""
        self.at(self.now + self._rng.uniform(low_s, high_s), action)

    def run_until(self, until_s: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.now, _, action = heapq.heappop(queue)
            action()
        self.now = until_s

    def name_at(self, address: str) -> str:
        return self._names[address]

    def passes(self, source: str, target: str) -> bool:
        return not self.cuts or not any(source in here and target in there for here, there in self.cuts)

    def loses(self, source: str, target: str) -> bool:
        """Is this message lost?"""
        return not self.passes(source, target) or self._rng.random() < self.loss

    def carry(self, arrive: Callable[[], None]) -> None:
        """One message that is not lost: it may be late, or arrive twice."""
        rng = self._rng
        for _ in range(2 if rng.random() < 0.05 else 1):
            is_late = rng.random() < 0.1 * bool(self.loss)
            self.after(0.0 if is_late else 0.0005, 2.0 if is_late else 0.02, arrive)

    def cut(self, side: frozenset[str], other: frozenset[str] | None = None) -> None:
        """Between two sides, both ways; `other` is everybody else by default."""
        rest = frozenset(self.addresses) - side if other is None else other
        self.cuts += [(side, rest), (rest, side)]

    def cut_one_way(self, name: str) -> None:
        """Nothing that `name` sends arrives."""
        self.cuts.append((frozenset((name,)), frozenset(self.addresses) - {name}))
