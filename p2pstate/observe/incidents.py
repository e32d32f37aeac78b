"""Failures of a run and how each was survived, from its events. Pure.

In: events of all nodes in order of time. Out: incidents: what died and why, in which phases it was recovered from, what
it cost. An incident begins with its first sign (a process's end, a hang, a node's death) and is over when every rank
has committed a step beyond the newest one before it; failures in between belong to it.
Known limit: clocks of different nodes are taken to agree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PHASES", "Incident", "IncidentFinder", "Survival", "longest"]

Event = Mapping[str, Any]

SIGN_S = 30.0  # a death is a sign of a round's end that follows within so long
PHASES = {  # of a recovery, in order: in words
    "detect": "noticing",
    "abort": "stopping the step",
    "quiesce": "copies come to rest",
    "view": "agreeing who is in",
    "spare": "waiting for the replacement",
    "groups": "connecting",
    "verify": "checking copies",
    "pull": "fetching state",
    "restore": "putting state in place",
    "first step": "first step",
}
KINDS = ("node", "hang", "process", "restart", "other")  # of causes; restart: of a script with the meter alone
CAUSES = {"member_dead": "node", "hang": "hang", "worker_exited": "process"}  # the first of these that was seen counts


@dataclass(slots=True, kw_only=True)
class Survival:
    """Of one failure, as far as it has come."""

    t: float  # of the first sign, seconds since 1970
    last_step: int  # the newest that any rank had committed
    recoveries: dict[int, Event] = field(default_factory=dict)  # by rank: how it resumed
    beyond: dict[int, float] = field(default_factory=dict)  # by rank: when it first went beyond last_step
    over_at: float | None = None  # None: the run ended before, or has not gone on yet

    def stepped(self, rank: int, step: int, t: float, ranks: Collection[int]) -> None:
        """A committed step. ``ranks``: all that have to go beyond the newest step before the failure."""
        if t <= self.t:  # committed before it, told after it
            self.last_step = max(self.last_step, step)
        elif step > self.last_step:
            self.beyond.setdefault(rank, t)
            if self.beyond.keys() >= set(ranks):
                self.over_at = max(self.beyond.values())

    @property
    def seconds(self) -> float | None:
        """Until every rank had made a new step."""
        return None if self.over_at is None else self.over_at - self.t

    @property
    def steps_lost(self) -> int:
        return max((int(event["steps_lost"]) for event in self.recoveries.values()), default=0)

    def sources(self, ranks: Iterable[int]) -> str:
        """Where those of these ranks that have resumed got their state; empty if none has."""
        return ", ".join(sorted({str(self.recoveries[rank]["source"]) for rank in ranks if rank in self.recoveries}))

    def longest_phases(self) -> dict[str, float]:
        """Seconds of each phase of the recoveries, on the rank that was in it for longest, in order."""
        phases: dict[str, float] = {}
        for event in self.recoveries.values():
            phases = longest(phases, event["phases"])
        return phases


@dataclass(slots=True, kw_only=True)
class Incident(Survival):
    round: int  # that it ended
    aborted_at: float
    cause: str  # one of KINDS
    reason: str  # in words, for a person
    num_ranks: int  # whose steps were known then: none on a node that only looked on
    nonce: str = ""  # of the run's start
    replaced: set[int] = field(default_factory=set)  # ranks that got a new process
    protected: dict[int, float] = field(default_factory=dict)  # by rank: when it told of a version on two nodes again

    @property
    def looked_on(self) -> bool:
        """It touched no rank of which anything is known."""
        return not (self.num_ranks or self.replaced or self.recoveries)

    @property
    def protected_s(self) -> float | None:
        """From its first sign until every rank's state was on two nodes again; None: it is not, or was not before the
        next one."""
        if not self.recoveries or not self.protected.keys() >= self.recoveries.keys():
            return None
        return max(self.protected.values()) - self.t

    @property
    def source(self) -> str:
        """Where the ranks that were replaced got their state, or all of them if none was."""
        return self.sources(self.replaced) or self.sources(self.recoveries) or "none"

    @property
    def num_bytes(self) -> int:
        """That came over the network."""
        return sum(int(event["bytes"]) for event in self.recoveries.values())

    def phases(self) -> dict[str, float]:
        """Seconds of each phase, in order: detecting, the longest that any rank was in each phase, the first step."""
        phases = longest({"detect": self.aborted_at - self.t}, self.longest_phases())
        if self.over_at is not None and self.recoveries:
            phases["first step"] = self.over_at - max(float(event["t"]) for event in self.recoveries.values())
        return {name: seconds for name, seconds in phases.items() if seconds > 0}


def longest(some: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """Each phase as long as it was where it took longest, in the order in which they come."""
    names = [name for name in dict.fromkeys((*PHASES, *some, *others)) if name in some or name in others]
    return {name: max(float(some.get(name, 0.0)), float(others.get(name, 0.0))) for name in names}


class IncidentFinder:
    """Fed event by event; ``incidents`` is what there has been so far."""

    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self._signs: list[Event] = []
        self._steps: dict[int, int] = {}  # rank -> newest committed step
        self._finished: set[int] = set()
        self._ended = False  # the run, or there was none yet
        self._nonce: object = None  # of the run
        self._round = 0  # the newest
        self._places: set[str] = set()  # the nodes that train in it

    def add(self, event: Event) -> None:
        handler = getattr(self, "on_" + str(event["event"]), None)
        if handler is not None:
            handler(event, float(event["t"]))

    @property
    def _open(self) -> Incident | None:
        last = self.incidents[-1] if self.incidents else None
        return last if last is not None and last.over_at is None and not self._ended else None

    def on_view(self, event: Event, t: float) -> None:
        self._ended = False
        nonce, round_, places = event.get("nonce"), int(event.get("round", 0)), set(event.get("places", ()))
        if nonce == self._nonce and round_ > self._round > 0:
            gone = "node" if self._places - places else "other"
            self._round_over(self._round, t, str(event["reason"]), gone)  # where nobody was told before
        self._nonce, self._round, self._places = nonce, round_, places

    def on_verdict(self, event: Event, t: float) -> None:
        if event.get("scope") == "node":  # it leaves, the run goes on
            return
        self._ended = True
        self._signs.clear()
        self._steps.clear()
        self._finished.clear()

    def on_finished(self, event: Event, t: float) -> None:
        self._finished.add(event["rank"])

    def on_worker_exited(self, event: Event, t: float) -> None:
        if event["rank"] not in self._finished:
            self._signs.append(event)

    def on_hang(self, event: Event, t: float) -> None:
        self._signs.append(event)

    def on_member_dead(self, event: Event, t: float) -> None:
        self._signs.append(event)

    def on_abort(self, event: Event, t: float) -> None:
        if not self._ended:
            told = event.get("cause")
            self._round_over(int(event["round"]), t, str(event["reason"]), told if told in KINDS else "other")

    def _round_over(self, round_: int, t: float, reason: str, cause: str = "other") -> None:
        """``cause``: if no sign tells."""
        if self.incidents and self.incidents[-1].round == round_:
            return
        if self._open is not None and not self._open.looked_on:
            self._open.protected.clear()
            return
        signs = [sign for sign in self._signs if t - SIGN_S <= sign["t"] <= t]
        self._signs.clear()
        cause = next((CAUSES[kind] for kind in CAUSES if any(sign["event"] == kind for sign in signs)), cause)
        began = min([t, *(float(sign["t"]) for sign in signs)])
        last_step = max(self._steps.values(), default=0)
        nonce = "" if self._nonce is None else str(self._nonce)
        self.incidents.append(
            Incident(
                t=began,
                last_step=last_step,
                round=round_,
                aborted_at=t,
                cause=cause,
                reason=reason,
                num_ranks=len(self._steps),
                nonce=nonce,
            )
        )

    def on_worker_started(self, event: Event, t: float) -> None:
        if self._open is not None:
            self._open.replaced.add(event["rank"])
        self._steps.setdefault(event["rank"], 0)

    def on_recovery(self, event: Event, t: float) -> None:
        if self._open is not None:
            self._open.recoveries[event["rank"]] = event

    def on_step(self, event: Event, t: float) -> None:
        rank, step = event.get("rank"), event.get("step")
        if rank is None or step is None:
            return
        last = self.incidents[-1] if self.incidents and not self._ended else None
        if last is not None and rank in last.recoveries and event.get("protected") is not None:
            last.protected.setdefault(rank, t)
        incident = self._open
        self._steps[rank] = step
        if incident is None:
            return
        incident.stepped(rank, step, t, self._steps)
        if incident.over_at is not None:
            self._signs.clear()
