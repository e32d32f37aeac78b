"""What ranks were doing when, as cells of equal length over a run, however long it was. Pure.

In: events with what a process measured, in any order of time. Out: of each cell the shares of the categories of each
rank, and the extremes of its steps.
Known limit: of more than ``MAX_RANKS`` ranks those with the lowest numbers are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MAX_RANKS", "NUM_CELLS", "Slice", "StepCell", "Timeline", "slices_of"]

Event = Mapping[str, Any]
Shares = dict[str, float]  # of a cell, by category

NUM_CELLS = 120
MAX_RANKS = 64
ORDER = ("startup", "other", "data", "protection", "saving", "repeated", "useful", "recovery", "waiting", "phase")
PLACES = {category: place for place, category in enumerate(ORDER)}


@dataclass(frozen=True, slots=True)
class Slice:
    """One category of one rank, for a while. Within one report of the meter the order is made up."""

    rank: int
    node: str
    category: str
    begin: float  # seconds since 1970
    seconds: float


def slices_of(event: Event) -> Iterator[Slice]:
    """What a process reported at once, one category after the other, ending when it was measured."""
    if "clock" not in event:
        return
    seconds = event["clock"]["seconds"]
    begin = float(event["clock"]["until"]) - sum(seconds.values())
    rank, node = int(event["rank"]), str(event["node"])
    for name in sorted(seconds, key=lambda name: PLACES.get(name.partition(".")[0], len(ORDER))):
        yield Slice(rank, node, name, begin, float(seconds[name]))
        begin += float(seconds[name])


@dataclass(slots=True)
class StepCell:
    """The most that a step of any rank had in it."""

    useful_s: float = 0.0
    fetch_s: float = 0.0
    lag_steps: int = 0  # committed and not protected


class Timeline:
    def __init__(self, begin: float, end: float) -> None:
        self._begin = begin
        self._cell_s = max(1e-9, end - begin) / NUM_CELLS
        self.ranks: dict[int, list[Shares]] = {}
        self.steps: dict[int, StepCell] = {}  # by cell

    def add(self, part: Slice) -> None:
        cells = self._cells_of(part.rank)
        if cells is None:
            return
        category = part.category.partition(".")[0]
        begin, end = (part.begin - self._begin) / self._cell_s, (part.begin + part.seconds - self._begin) / self._cell_s
        for index in range(max(0, int(begin)), min(NUM_CELLS - 1, int(end)) + 1):
            overlap = min(end, index + 1) - max(begin, index)
            if overlap > 0:
                cells[index][category] = cells[index].get(category, 0.0) + overlap

    def add_step(self, t: float, useful_s: float, fetch_s: float, lag_steps: int) -> None:
        place = min(NUM_CELLS - 1, max(0, int((t - self._begin) / self._cell_s)))
        cell = self.steps.setdefault(place, StepCell())
        cell.useful_s, cell.fetch_s = max(cell.useful_s, useful_s), max(cell.fetch_s, fetch_s)
        cell.lag_steps = max(cell.lag_steps, lag_steps)

    def _cells_of(self, rank: int) -> list[Shares] | None:
        cells = self.ranks.get(rank)
        if cells is not None:
            return cells
        if len(self.ranks) == MAX_RANKS:
            last = max(self.ranks)
            if rank > last:
                return None
            del self.ranks[last]
        return self.ranks.setdefault(rank, [{} for _ in range(NUM_CELLS)])
