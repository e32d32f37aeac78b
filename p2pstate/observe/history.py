"""A run as its directory tells it: goodput of every rank, incidents, and what happened when.

In: events of all nodes in order of time. Out: a `History`, from which reports and plans are made.
Invariant: events are gone through once and not kept; what is kept grows with the number of ranks and of failures, not
with the length of the run.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pstate.observe.goodput import Goodput
from p2pstate.observe.incidents import Incident, IncidentFinder
from p2pstate.observe.ledger import Ledger
from p2pstate.observe.reading import DAMAGED, read_run, span_of_run
from p2pstate.observe.skew import SkewHistory
from p2pstate.observe.timeline import Slice, Timeline, slices_of

__all__ = ["History", "make_history", "read_history"]

Event = Mapping[str, Any]
NUM_SAMPLES = 1 << 16  # of a run's steps; of fewer steps all


@dataclass(frozen=True, slots=True)
class History:
    begin: float
    end: float
    num_starts: int  # of the whole run
    ranks: Mapping[int, Goodput]
    total: Goodput
    incidents: Sequence[Incident]
    timeline: Timeline
    newest_step: int
    useful_s: float  # of all committed steps,
    step_samples_s: Sequence[float]  # and of a fair sample of them
    skews: SkewHistory
    starts: Mapping[str, Event]  # of each node the newest agent_started
    verdict: Event | None

    @property
    def num_failures(self) -> int:
        return len(self.incidents)

    @property
    def steps_lost(self) -> int:
        return sum(incident.steps_lost for incident in self.incidents)

    @property
    def rank_mtbf_s(self) -> float | None:
        """Seconds of all ranks together per failure; None: none has happened."""
        return self.total.wall_s / self.num_failures if self.incidents else None


def read_history(directory: str | Path, on_slice: Callable[[Slice], None] | None = None) -> History:
    """Of a run directory. Raises ValueError with a sentence when there are no events, or damaged ones; OSError when
    they cannot be read. ``on_slice`` is told of everything that a rank did, as it is read."""
    return make_history(read_run(directory), span_of_run(directory), on_slice)


def make_history(
    events: Iterable[Event], span: tuple[float, float], on_slice: Callable[[Slice], None] | None = None
) -> History:
    """``span``: times of the first and of the last event. Raises ValueError for events that no agent of this release
    has written."""
    try:
        collected = _Collected(span, on_slice)
        for event in events:
            collected.add(event)
        return collected.history()
    except DAMAGED as error:
        raise ValueError(
            f"the run's events are damaged, or of another release of p2pstate ({error!r}): restore its directory, or "
            "use the release that wrote it"
        ) from error


class _Collected:
    def __init__(self, span: tuple[float, float], on_slice: Callable[[Slice], None] | None) -> None:
        self._span, self._on_slice = span, on_slice
        self._ledger, self._finder = Ledger(), IncidentFinder()
        self._timeline, self._skews = Timeline(*span), SkewHistory()
        self._nonces: set[object] = set()
        self._starts: dict[str, Event] = {}
        self._verdict: Event | None = None
        self._newest_step = 0
        self._useful_s, self._num_useful = 0.0, 0
        self._samples_s = array("d")
        self._random = random.Random(0)

    def add(self, event: Event) -> None:
        self._ledger.add(event)
        self._finder.add(event)
        self._skews.add(event)
        for part in slices_of(event):
            self._timeline.add(part)
            if self._on_slice is not None:
                self._on_slice(part)
        kind = event["event"]
        if kind == "step":
            self._on_step(event)
        elif kind == "view" and "nonce" in event:
            self._nonces.add(event["nonce"])
        elif kind == "agent_started":
            self._starts[str(event["node"])] = event
        elif kind == "verdict" and event.get("scope") != "node":  # a node that left alone has not ended the run
            self._verdict = event

    def _on_step(self, event: Event) -> None:
        seconds = event.get("clock", {}).get("seconds", {})
        step, protected = int(event["step"]), event.get("protected")
        useful_s = float(seconds.get("useful", 0.0))
        lag_steps = 0 if protected is None else step - int(protected)
        self._newest_step = max(self._newest_step, step)
        self._timeline.add_step(float(event["t"]), useful_s, float(seconds.get("data", 0.0)), lag_steps)
        if useful_s > 0:
            self._sample(useful_s)

    def _sample(self, useful_s: float) -> None:
        """Each step has the same chance to be in the sample (Vitter 1985, algorithm R)."""
        self._useful_s += useful_s
        self._num_useful += 1
        if len(self._samples_s) < NUM_SAMPLES:
            self._samples_s.append(useful_s)
        elif (place := int(self._random.random() * self._num_useful)) < NUM_SAMPLES:
            self._samples_s[place] = useful_s

    def history(self) -> History:
        self._skews.finish()
        return History(
            begin=self._span[0],
            end=self._span[1],
            num_starts=len(self._nonces),
            ranks=self._ledger.ranks(),
            total=self._ledger.total(),
            incidents=self._finder.incidents,
            timeline=self._timeline,
            newest_step=self._newest_step,
            useful_s=self._useful_s,
            step_samples_s=self._samples_s,
            skews=self._skews,
            starts=self._starts,
            verdict=self._verdict,
        )
