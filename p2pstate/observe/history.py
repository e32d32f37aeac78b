"""A run as its directory tells it: goodput of every rank, incidents, and what happened when. Pure.

In: events of all nodes in order of time. Out: a `History`, from which reports and traces are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2pstate.observe.goodput import Goodput
from p2pstate.observe.incidents import Incident, find_incidents
from p2pstate.observe.ledger import Ledger
from p2pstate.observe.reading import DAMAGED
from p2pstate.observe.skew import Skew, skews_of

__all__ = ["History", "Slice", "Step", "make_history"]

Event = Mapping[str, Any]
ORDER = ("startup", "other", "data", "protection", "saving", "repeated", "useful", "recovery", "waiting", "phase")


@dataclass(frozen=True, slots=True)
class Slice:
    """One category of one rank, for a while. Within one report of the meter the order is made up."""

    rank: int
    node: str
    category: str
    begin: float  # seconds since 1970
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    t: float
    rank: int
    step: int
    protected: int | None
    fetch_s: float
    useful_s: float


@dataclass(frozen=True, slots=True)
class History:
    events: Sequence[Event]
    begin: float
    end: float
    ranks: Mapping[int, Goodput]
    total: Goodput
    incidents: Sequence[Incident]
    slices: Sequence[Slice]
    steps: Sequence[Step]
    skews: Sequence[Skew]
    starts: Mapping[str, Event]  # of each node the newest agent_started
    verdict: Event | None

    @property
    def num_starts(self) -> int:
        """How often the whole run was started."""
        return len({event["nonce"] for event in self.events if event["event"] == "view" and "nonce" in event})

    @property
    def num_failures(self) -> int:
        return len(self.incidents)

    @property
    def newest_step(self) -> int:
        return max((step.step for step in self.steps), default=0)

    @property
    def steps_lost(self) -> int:
        return sum(incident.steps_lost for incident in self.incidents)

    @property
    def rank_mtbf_s(self) -> float | None:
        """Seconds of all ranks together per failure; None: none has happened."""
        return self.total.wall_s / self.num_failures if self.incidents else None


def make_history(events: Sequence[Event]) -> History:
    """``events``: at least one. Raises ValueError for events that no agent of this release has written."""
    try:
        return _history(events)
    except DAMAGED as error:
        raise ValueError(
            f"the run's events are damaged, or of another release of p2pstate ({error!r}): restore its directory, or "
            "use the release that wrote it"
        ) from error


def _history(events: Sequence[Event]) -> History:
    ledger = Ledger()
    ledger.add_all(events)
    # Several agents tell of one verdict: of the run's, the first; a node that left alone has not ended the run.
    verdicts = [event for event in events if event["event"] == "verdict" and event.get("scope") != "node"]
    return History(
        events=events,
        begin=float(events[0]["t"]),
        end=float(events[-1]["t"]),
        ranks=ledger.ranks(),
        total=ledger.total(),
        incidents=find_incidents(events),
        slices=[part for event in events if "clock" in event for part in _slices(event)],
        steps=[_step(event) for event in events if event["event"] == "step"],
        skews=skews_of(events),
        starts={str(event["node"]): event for event in events if event["event"] == "agent_started"},
        verdict=verdicts[-1] if verdicts else None,
    )


def _slices(event: Event) -> list[Slice]:
    """What a process reported at once, one category after the other, ending when it was measured."""
    seconds = event["clock"]["seconds"]
    begin = float(event["clock"]["until"]) - sum(seconds.values())
    out = []
    names = list(seconds)
    for name in sorted(names, key=lambda name: (_position(name), names.index(name))):
        out.append(Slice(int(event["rank"]), str(event["node"]), name, begin, float(seconds[name])))
        begin += float(seconds[name])
    return out


def _position(name: str) -> int:
    category = name.partition(".")[0]
    return ORDER.index(category) if category in ORDER else len(ORDER)


def _step(event: Event) -> Step:
    seconds = event.get("clock", {}).get("seconds", {})
    protected = event.get("protected")
    return Step(
        t=float(event["t"]),
        rank=int(event["rank"]),
        step=int(event["step"]),
        protected=None if protected is None else int(protected),
        fetch_s=float(seconds.get("data", 0.0)),
        useful_s=float(seconds.get("useful", 0.0)),
    )
