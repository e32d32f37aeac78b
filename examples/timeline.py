"""What happened in a run, told from its events: who is who, how far it is, and how each failure was survived.

In: events in order of time (dictionaries with t, node and event), those of the run and one "injected" per kill. Out:
lines for a person, and per failure the numbers. Pure: no clock, no file, no process.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from p2pstate.observe.incidents import Survival

Event = dict[str, Any]
STEPS_PER_LINE = 5


@dataclass(slots=True, kw_only=True)
class Failure(Survival):
    """Of which is known when it was done, and to whom: it counts from the signal."""

    kind: str  # "worker", "node" or "all"
    what: str  # for a person
    victims: set[int]  # ranks
    pids_before: dict[int, int]
    detected: float | None = None  # when somebody told of it first
    said: set[str] = field(default_factory=set)  # what was told once already

    @property
    def source(self) -> str:
        """Where the replaced ranks got their state."""
        return self.sources(self.victims) or "unknown"

    @property
    def num_bytes(self) -> int:
        of_each = [int(event["bytes"]) for rank, event in self.recoveries.items() if rank in self.victims]
        return max(of_each, default=0) if self.source == "disk" else sum(of_each)  # all ranks read one checkpoint

    @property
    def steps_lost(self) -> int:
        if self.kind == "all":  # nobody is left who knows how far it had come
            return max((self.last_step - int(event["version"][1]) for event in self.recoveries.values()), default=0)
        return super(Failure, self).steps_lost  # the class is made anew for its slots


class Timeline:
    """Feed it events and failures; it answers with lines."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.pids: dict[int, int] = {}
        self.nodes: dict[int, str] = {}  # rank -> node
        self.spares: list[str] = []  # nodes of the newest view
        self.rehearsed: dict[int, int] = {}  # rank -> process that could take it at once
        self.preloaded: set[str] = set()  # nodes whose torchrun's workers are forked from a process with torch imported
        self.steps: dict[int, int] = {}  # rank -> newest committed step
        self.finished: set[int] = set()
        self.failures: list[Failure] = []
        self.saved_step: int | None = None  # of the newest checkpoint on disk
        self.verdict: Event | None = None
        self._began: float | None = None
        self._line_due = STEPS_PER_LINE

    @property
    def step(self) -> int:
        """The newest step that all ranks have committed."""
        return min(self.steps.values()) if len(self.steps) == self.num_ranks else 0

    @property
    def recovering(self) -> bool:
        return bool(self.failures) and self.failures[-1].over_at is None

    def ranks_on(self, node: str) -> set[int]:
        return {rank for rank, name in self.nodes.items() if name == node}

    def add(self, events: Iterable[Event]) -> list[str]:
        lines: list[str] = []
        for event in events:
            if self._began is None:
                self._began = float(event["t"])
            teller = getattr(self, "_on_" + event["event"], None)
            if teller is not None:
                lines += teller(event)
        return lines

    def _clock(self, t: float) -> str:
        return f"{t - self._began:6.1f} s" if self._began is not None else f"{0.0:6.1f} s"

    def _tell(self, event: Event, text: str, once: str = "") -> list[str]:
        """A line; while a failure is being survived, with the time since its signal, and each `once` only once."""
        if not self.recovering:
            return [f"{self._clock(event['t'])}  {text}"]
        failure = self.failures[-1]
        if once and once in failure.said:
            return []
        failure.said.add(once)
        return [f"          +{event['t'] - failure.t:5.2f} s  {text}"]

    def _on_injected(self, event: Event) -> list[str]:
        """Not from the run: a kill, told by whoever did it."""
        last_step = max(self.steps.values(), default=0)
        victims = set(event["victims"])
        self.failures.append(
            Failure(
                t=float(event["t"]),
                last_step=last_step,
                kind=event["kind"],
                what=event["what"],
                victims=victims,
                pids_before=dict(self.pids),
            )
        )
        return ["", f"{self._clock(event['t'])}  KILL {len(self.failures)}: {event['what']}, after step {last_step}"]

    def _on_view(self, event: Event) -> list[str]:
        self.spares = list(event["spares"])
        text = f"view {event['epoch']}: {', '.join(event['places'])} train"
        if event["spares"]:
            text += f", {', '.join(event['spares'])} spare"
        once = f"view {event['epoch']}"
        if not self.recovering:
            return self._tell(event, text) if event["node"] == event["places"][0] else []
        return self._tell(event, f"agreed     {text} ({event['reason']})", once)

    def _on_saved(self, event: Event) -> list[str]:
        if event["seconds"] is None:  # of a node without ranks, which has only heard of it
            return []
        first = event["step"] != self.saved_step
        self.saved_step = int(event["step"])
        text = f"on disk    step {event['step']}: {event['bytes'] / 1e6:.1f} MB in {event['seconds']:.2f} s"
        return self._tell(event, text) if first and event["bytes"] else []

    def _on_resolved(self, event: Event) -> list[str]:
        if event["step"] is None:
            return []
        return self._tell(event, f"resolved   {event['reason']}: step {event['step']} on disk, every byte verified")

    def _on_rehearsed(self, event: Event) -> list[str]:
        self.rehearsed[int(event["rank"])] = int(event["pid"])
        return []

    def _on_preloaded(self, event: Event) -> list[str]:
        self.preloaded.add(str(event["node"]))
        return []

    def _on_worker_started(self, event: Event) -> list[str]:
        rank = int(event["rank"])
        self.rehearsed.pop(rank, None)
        self.pids[rank], self.nodes[rank] = int(event["pid"]), str(event["node"])
        text = f"rank {rank} is process {event['pid']} on {event['node']}"
        if not self.recovering:
            return self._tell(event, text)
        return self._tell(event, f"spare in   {text}" + (", was warm" if event.get("warm") else ""))

    def _on_worker_exited(self, event: Event) -> list[str]:
        if not self.recovering:
            return []
        self._detected(event)
        return self._tell(event, f"detected   {event['node']}: process {event['pid']} ended ({event['cause']})")

    def _on_member_dead(self, event: Event) -> list[str]:
        self._detected(event)
        proof = "proof" if event.get("proof") else "suspicion"
        return self._tell(event, f"detected   {event['member']} is dead: {event['reason']} ({proof})", "dead")

    def _detected(self, event: Event) -> None:
        if self.recovering and self.failures[-1].detected is None:
            self.failures[-1].detected = float(event["t"])

    def _on_abort(self, event: Event) -> list[str]:
        return self._tell(event, "aborted    blocked collectives are freed, the step is discarded", "abort")

    def _on_recovery(self, event: Event) -> list[str]:
        if not self.failures:
            return []
        failure, rank = self.failures[-1], int(event["rank"])
        failure.recoveries[rank] = event
        step = event["version"][1]
        if rank not in failure.victims:
            return self._tell(event, f"survivors  stay as they are, resume step {step}", "survivors")
        size = f"{event['bytes'] / 1e6:.1f} MB over the network" if event["bytes"] else "nothing sent"
        if event["source"] == "disk":
            size = f"{event['bytes'] / 1e6:.1f} MB for all ranks"
        return self._tell(
            event, f"pulled     rank {rank}: state of step {step} from {event['source']} ({size}), verified"
        )

    def _on_step(self, event: Event) -> list[str]:
        rank, step = int(event["rank"]), int(event["step"])
        self.steps[rank] = step
        lines: list[str] = []
        if self.recovering:
            failure = self.failures[-1]
            failure.stepped(rank, step, float(event["t"]), failure.pids_before)
            if failure.over_at is not None:
                lines = self._survived(failure, step)
        if rank == 0 and step >= self._line_due and not self.recovering:
            self._line_due = step - step % STEPS_PER_LINE + STEPS_PER_LINE
            loss = f"loss {event['loss']:.4f}" if event.get("loss") is not None else ""
            lines.append(f"{self._clock(event['t'])}  step {step:3d}  {loss}  {event['seconds']:.2f} s")
        return lines

    def _survived(self, failure: Failure, step: int) -> list[str]:
        kept = sorted(rank for rank, pid in self.pids.items() if failure.pids_before.get(rank) == pid)
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in failure.longest_phases().items())
        pids = ", ".join(f"{rank} ({self.pids[rank]})" for rank in kept)
        return [
            f"          +{failure.seconds:5.2f} s  first step: all ranks have committed step {step}",
            f"                    survivors kept their processes: {pids or 'none'}",
            f"                    longest phases, s: {phases}",
            "",
        ]

    def _on_finished(self, event: Event) -> list[str]:
        self.finished.add(int(event["rank"]))
        return []

    def _on_verdict(self, event: Event) -> list[str]:
        first = self.verdict is None
        self.verdict = event
        return [f"{self._clock(event['t'])}  {event['text']}"] if first else []
