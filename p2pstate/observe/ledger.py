"""The wall clock of every rank over all its processes and restarts, from the events of a run. Pure.

In: events in order of time (agent/events.py writes them). Out: seconds by category of each rank; they add up to the
time from the start of its node, or of its first process where no view was told, to its newest event, so also where
there was no process to measure anything.

Rules for the time without a process: before the first one it was ``startup``, since the node was started, if the rank
was given to it when the run began, or since the view that gave it to it. Up to the end of the one before it was a step
in vain, as long as a usual step, and ``recovery.detect`` (``startup`` where no step of the rank was committed since the
run began); from then to the next process ``recovery.replace``, and ``waiting`` where an agent said that there is no
node.
A process whose successor has started on another node counts no more, whatever it still tells.
Between the end of a run (a verdict, or another run's first view) and the next start no time passes.
Known limit: clocks of different nodes are taken to agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from p2pstate.observe.goodput import Goodput

__all__ = ["Event", "Ledger"]

Event = Mapping[str, Any]


@dataclass(slots=True)
class _Rank:
    seconds: dict[str, float] = field(default_factory=dict)
    until: float = 0.0  # everything before is accounted for
    open: bool = False  # the time from there on counts
    alive: bool = False  # there is a process,
    heard: bool = False  # which has told what it measured
    process: tuple[object, object] = (None, None)  # its node and pid
    stepped: bool = False  # since the run began
    newest_step: int = 0
    usual_s: float = 0.0  # of a step

    def add(self, category: str, seconds: float) -> None:
        if seconds > 0:
            self.seconds[category] = self.seconds.get(category, 0.0) + seconds


class Ledger:
    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._nonce: str | None = None
        self._agents: dict[object, float] = {}  # by node: when it was started
        self._given: float | None = None  # when the newest view gave ranks to nodes
        self._begins = False  # and whether it was the run's first
        self._aborts: list[float] = []
        self._waiting_since: float | None = None
        self._waits: list[tuple[float, float]] = []  # in which there was no node for some place

    def add_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        handler = getattr(self, "_on_" + str(event["event"]), None)
        if handler is not None:
            handler(event, float(event["t"]))
        if "clock" in event:
            self._measured(event)

    def ranks(self) -> dict[int, Goodput]:
        """Of each rank, all its processes together."""
        return {rank: Goodput(dict(found.seconds)) for rank, found in sorted(self._ranks.items())}

    def of_rank(self, rank: int) -> dict[str, float]:
        """Seconds by category so far."""
        return dict(self._ranks[rank].seconds) if rank in self._ranks else {}

    def is_open(self, rank: int) -> bool:
        """Whether the rank has had a process, and its run has not come to an end since."""
        return rank in self._ranks and self._ranks[rank].open

    def until(self, rank: int) -> float:
        """When the newest that is known of the rank happened, in seconds since 1970."""
        return self._ranks[rank].until

    def newest_step(self, rank: int) -> int:
        """That the rank has ever committed; 0: none."""
        return self._ranks[rank].newest_step

    def total(self) -> Goodput:
        """All ranks together."""
        seconds: dict[str, float] = {}
        for found in self._ranks.values():
            for category, part in found.seconds.items():
                seconds[category] = seconds.get(category, 0.0) + part
        return Goodput(seconds)

    # -- events

    def _on_agent_started(self, event: Event, t: float) -> None:
        self._agents[event["node"]] = t

    def _on_view(self, event: Event, t: float) -> None:
        nonce = event.get("nonce")
        if nonce is not None and nonce != self._nonce:
            if self._nonce is not None:
                self._close()
            self._nonce = nonce
        self._given, self._begins = t, event.get("round") == 1
        if self._waiting_since is not None:
            self._waits.append((self._waiting_since, t))
            self._waiting_since = None

    def _on_waiting(self, event: Event, t: float) -> None:
        if self._waiting_since is None:
            self._waiting_since = t

    def _on_abort(self, event: Event, t: float) -> None:
        self._aborts.append(t)

    def _on_verdict(self, event: Event, t: float) -> None:
        if event.get("scope") != "node":  # the run's; a node that leaves is replaced
            self._close()

    def _on_worker_started(self, event: Event, t: float) -> None:
        rank = self._ranks.setdefault(int(event["rank"]), _Rank())
        if rank.open:
            if rank.alive:  # nobody saw its end: its node is gone
                self._ended(rank, min((at for at in self._aborts if at >= rank.until), default=rank.until))
            waited_s = sum(max(0.0, min(end, t) - max(begin, rank.until)) for begin, end in self._waits)
            rank.add("waiting", waited_s)
            rank.add("recovery.replace", t - rank.until - waited_s)
        elif self._given is not None:
            given = self._agents.get(event["node"], self._given) if self._begins else self._given
            rank.add("startup", t - max(given, rank.until))
        rank.until, rank.open, rank.alive, rank.heard = t, True, True, False
        rank.process = event["node"], event["pid"]

    def _on_worker_exited(self, event: Event, t: float) -> None:
        rank = self._ranks.get(int(event["rank"]))
        if rank is not None and rank.open and rank.alive and rank.process == (event["node"], event["pid"]):
            self._ended(rank, t)

    def _on_finished(self, event: Event, t: float) -> None:
        rank = self._ranks.get(int(event["rank"]))
        if rank is not None:
            rank.open = rank.alive = False

    def _measured(self, event: Event) -> None:
        """What a process has measured since its last such event, or since it got its rank."""
        rank = self._ranks.setdefault(int(event["rank"]), _Rank())
        if rank.alive and rank.process[0] not in (None, event["node"]):
            return
        until = float(event["clock"]["until"])
        seconds = {str(name): float(value) for name, value in event["clock"]["seconds"].items()}
        if rank.open and not rank.heard:
            rank.add("startup", until - sum(seconds.values()) - rank.until)
        step = event.get("step") if event["event"] == "step" else None
        if step is not None:
            useful_s = seconds.get("useful", 0.0)
            if step <= rank.newest_step:
                seconds["repeated"] = seconds.get("repeated", 0.0) + seconds.pop("useful", 0.0)
            rank.stepped, rank.newest_step = True, max(rank.newest_step, step)
            rank.usual_s = 0.9 * rank.usual_s + 0.1 * useful_s if rank.usual_s else useful_s
        for category, value in seconds.items():
            rank.add(category, value)
        rank.until = until
        rank.open = rank.alive = rank.heard = True

    def _ended(self, rank: _Rank, t: float) -> None:
        """A process ended at ``t`` without a word about its last step."""
        tail_s = max(0.0, t - rank.until)
        in_vain_s = min(tail_s, rank.usual_s) if rank.stepped else 0.0
        rank.add("repeated", in_vain_s)
        rank.add("recovery.detect" if rank.stepped else "startup", tail_s - in_vain_s)
        rank.until = max(t, rank.until)
        rank.alive = False

    def _close(self) -> None:
        for rank in self._ranks.values():
            rank.open = rank.alive = rank.stepped = False
        self._given = self._waiting_since = None
