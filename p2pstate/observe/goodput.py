"""Seconds by category, and what they say. Pure.

In: seconds by category (meter.py names them). Out: the goodput, the split in the order in which people read it, text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CATEGORIES", "Goodput"]

CATEGORIES = {  # in the order in which they are shown
    "useful": "useful steps",
    "data": "waiting for data",
    "protection": "protection",
    "saving": "durable saves",
    "repeated": "discarded and repeated steps",
    "recovery": "recovery",
    "waiting": "waiting for a node",
    "startup": "start-up",
    "phase": "announced phases",
    "shutdown": "after the loop",
    "other": "other",
}


@dataclass(frozen=True, slots=True)
class Goodput:
    """``seconds`` by category, with the phases of ``recovery.PHASE`` and ``phase.NAME`` apart."""

    seconds: Mapping[str, float]

    @property
    def wall_s(self) -> float:
        """The sum of all categories: the wall clock, as every second is in exactly one."""
        return sum(self.seconds.values())

    @property
    def ratio(self) -> float:
        """Useful part of the wall clock, 0 to 1; 0 before any time has passed."""
        return self.seconds.get("useful", 0.0) / self.wall_s if self.wall_s > 0 else 0.0

    def by_category(self) -> dict[str, float]:
        """Seconds of each category, phases summed, in the order of CATEGORIES; without those that have none."""
        sums: dict[str, float] = {}
        for name, seconds in self.seconds.items():
            category = name.partition(".")[0]
            sums[category] = sums.get(category, 0.0) + seconds
        known = [category for category in CATEGORIES if sums.get(category, 0.0) > 0]
        return {category: sums[category] for category in known}

    def phases(self, category: str) -> dict[str, float]:
        """Seconds of the phases of ``recovery``, or of the announced ones (``phase``)."""
        return {
            name.partition(".")[2]: seconds for name, seconds in self.seconds.items() if name.startswith(category + ".")
        }

    def sentence(self) -> str:
        """One line: the goodput and what the rest was."""
        wall_s = self.wall_s
        if wall_s <= 0:
            return "goodput: nothing was measured"
        lost = [
            f"{CATEGORIES[category]} {100 * seconds / wall_s:.1f} %"
            for category, seconds in self.by_category().items()
            if category != "useful"
        ]
        return ", ".join([f"goodput {100 * self.ratio:.1f} %", *lost])

    def table(self) -> list[str]:
        """A line per category: seconds, part of the wall clock, and the phases it consists of."""
        width = max(map(len, CATEGORIES.values()))
        lines = []
        for category, seconds in self.by_category().items():
            phases = ", ".join(f"{name} {part:.2f}" for name, part in self.phases(category).items())
            share = f"{100 * seconds / self.wall_s:5.1f} %"
            lines.append(f"{CATEGORIES[category]:{width}}  {seconds:9.2f} s  {share}  {phases}".rstrip())
        return lines
