"""Finds workers that live and do not go on, and ends them.

In: the pages of this node's workers (trace.py), what the kernel says of them, and the evidence of the other nodes. Out:
the stacks of a hung worker in its log, then its death, which its agent treats as any other; or a call that the
connections have to be made anew.

A worker that was stopped by a signal, or is still in a round that is over, is judged by its own agent. Else the node
with the lowest place that sees a late worker of its own asks all others, judges (hang.py) once all have answered, and
tells the agent of the one at fault, which looks again before it acts.

Invariants: nothing here waits; a worker is ended only if nothing has happened in it since the evidence was taken; time
in which this agent itself did not run is nobody's fault.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from p2pstate.agent.events import EventLog
from p2pstate.agent.hang import SLOW, Evidence, Fault, allowed_s, is_busy, is_starved, judge, quiet_since, where
from p2pstate.agent.held import Held, Phase, RankProcesses
from p2pstate.agent.vitals import Vitals, describe_threads, python_stacks, vitals_of
from p2pstate.trace import STACKS_SIGNAL, Doing, Sample, read
from rendezvous.node import Node
from rendezvous.plain import count_from, list_from, seconds_from, text_from
from rendezvous.types import MemberKey

__all__ = ["Watchdog"]

TICK_S = 0.25
LATE_TICK_S = 0.5  # more between two looks, and this agent was held up itself
ASK_INTERVAL_S = 0.5
PLACE_DELAY_S = 0.05  # the next place asks only if nobody was heard asking meanwhile
HEARD_S = 2.0
POLLING_S = 1.0  # a wait looks at the world many times a second
STACKS_S = 0.3  # for the stacks to arrive in the log
STOPPED, TRACED = "T", "t"  # states of a process
MORE_PATIENCE = 4.0  # after each time that a rank hung at one step


@dataclass(slots=True)
class _Watch:
    """One worker. ``changed_at``: when something was last seen to happen in it; ``vitals``: as they were then."""

    count: int
    changed_at: float
    vitals: Vitals


@dataclass(frozen=True, slots=True)
class _Seen:
    evidence: Evidence
    sample: Sample
    state: str
    allowed_s: float


@dataclass(slots=True)
class _Rank:
    """What is remembered from one process of a rank to the next."""

    turn_s: float = 0.0
    hung_at_step: int = -1
    patience: float = 1.0


@dataclass(slots=True)
class _Case:
    """Evidence that is being collected for one judgement."""

    number: int
    missing: set[int]  # places
    evidence: dict[int, Evidence] = field(default_factory=dict)


class Watchdog(Generic[Held]):
    """Used on the node's thread. Events: ``hang`` when a worker is about to be ended, ``straggler`` when all others
    wait for a rank that is late, but may come. ``on_stuck`` is told that everybody waits and nobody is to blame.
    """

    def __init__(
        self,
        node: Node,
        processes: RankProcesses[Held],
        events: EventLog,
        *,
        floor_s: float,
        on_stuck: Callable[[str], None],
    ) -> None:
        self._node = node
        self._processes = processes
        self._floor_s = floor_s
        self._events = events
        self._on_stuck = on_stuck
        self._round = 0
        self._places: Sequence[MemberKey] = ()
        self._my_place: int | None = None
        self._num_ranks = 0
        self._over_round = 0
        self._over_at = 0.0
        self._watches: dict[int, _Watch] = {}  # by process id
        self._ranks: dict[int, _Rank] = {}
        self._turn_elsewhere_s = 0.0  # what a step takes, as another node has told
        self._ticked_at = 0.0
        self._asked_at = self._heard_at = float("-inf")
        self._asked_for_slow: dict[int, int] = {}  # process id -> count: asked about once while only slow
        self._asking = False
        self._case: _Case | None = None
        self._num_cases = 0
        self._said_slow: set[tuple[int, int]] = set()  # rank and step

    def start(self) -> None:
        if self._floor_s > 0:
            self._ticked_at = time.monotonic()
            self._node.call_later(TICK_S, self._tick)

    def begin(self, round_: int, places: Sequence[MemberKey], my_place: int | None, num_ranks: int) -> None:
        """A round begins: ``places`` are the agents of its nodes."""
        self._round, self._places, self._my_place, self._num_ranks = round_, places, my_place, num_ranks
        self._case = None
        self._said_slow.clear()
        self._asked_for_slow.clear()

    def over(self, round_: int) -> None:
        """The round was aborted: its workers leave it soon, or are hung."""
        if round_ > self._over_round:
            self._over_round, self._over_at = round_, time.monotonic()

    # -- looking

    def _tick(self) -> None:
        self._node.call_later(TICK_S, self._tick)
        now = time.monotonic()
        held_up_s = now - self._ticked_at - TICK_S
        self._ticked_at = now
        if held_up_s > LATE_TICK_S:
            self._over_at += held_up_s
            for watch in self._watches.values():
                watch.changed_at += held_up_s
            return  # the workers may have been held up as well: what they wrote since is seen next time
        workers = [worker for worker in self._processes.assigned() if not worker.ended]
        pids = {worker.pid for worker in workers}
        self._watches = {pid: watch for pid, watch in self._watches.items() if pid in pids}
        for worker in workers:
            seen = self._look(worker, now)
            if seen is None or worker.hung:
                continue
            alone = self._fault_of_its_own(worker, seen, now)
            if alone:
                self._end(worker, alone)
            elif seen.evidence.lateness >= SLOW:
                self._suspect(seen.evidence, now)

    def _look(self, worker: Held, now: float) -> _Seen | None:
        """None: it has ended, or writes nothing that can be understood (yet)."""
        assert worker.rank is not None
        vitals = vitals_of(worker.pid)
        if worker.page is None or vitals is None:
            return None
        try:
            sample = read(worker.page)
        except ValueError:
            return None
        watch = self._watches.get(worker.pid)
        if watch is None or watch.count != sample.count:
            watch = self._watches[worker.pid] = _Watch(sample.count, now, vitals)
        known = self._ranks.setdefault(worker.rank, _Rank())
        known.turn_s = sample.turn_s or known.turn_s
        if sample.step > known.hung_at_step:
            known.patience = 1.0
        quiet_s = max(0.0, now - quiet_since(sample, watch.changed_at, now))
        cpu_s = vitals.cpu_s - watch.vitals.cpu_s
        busy = is_busy(quiet_s, cpu_s, vitals.num_io_bytes - watch.vitals.num_io_bytes)
        joined = worker.phase is Phase.LOOP
        known_turn_s = known.turn_s or self._known_turn_s()
        allowed = allowed_s(sample, self._floor_s, joined=joined, busy=busy, known_turn_s=known_turn_s)
        allowed = known.patience * (self._floor_s if vitals.state == STOPPED else allowed)
        evidence = Evidence(
            rank=worker.rank,
            pid=worker.pid,
            count=sample.count,
            doing=sample.doing,
            step=sample.step,
            quiet_s=quiet_s,
            lateness=0.0 if is_starved(vitals.state, quiet_s, cpu_s) else quiet_s / allowed,
            traced=vitals.state == TRACED,
            polling=now - sample.polled_at < POLLING_S,
            expected=sample.expected,
            operations=sample.operations,
        )
        return _Seen(evidence, sample, vitals.state, allowed)

    def _fault_of_its_own(self, worker: Held, seen: _Seen, now: float) -> str:
        """Why this worker must be ended, whatever the others do; empty: nothing of the kind."""
        evidence, sample = seen.evidence, seen.sample
        doing = where(evidence.doing, evidence.step, evidence.expected)
        if seen.state == STOPPED and evidence.lateness >= 1:
            return f"it was stopped by a signal {evidence.quiet_s:.1f} s ago {doing}"
        behind = worker.phase is Phase.LOOP and sample.doing is not Doing.JOINING and sample.round <= self._over_round
        over_s = now - max(self._over_at, sample.expected_until)
        if behind and over_s >= seen.allowed_s and seen.state != TRACED:
            return f"it has not left round {self._over_round} for {over_s:.1f} s {doing}"
        return ""

    # -- asking

    def _suspect(self, evidence: Evidence, now: float) -> None:
        """A worker of this node is late: hear what all others do."""
        if self._my_place is None or self._asking or now - self._asked_at < ASK_INTERVAL_S:
            return
        if evidence.lateness < 1:
            if self._asked_for_slow.get(evidence.pid) == evidence.count:
                return
            self._asked_for_slow[evidence.pid] = evidence.count
        self._asking = True
        self._node.call_later(min(self._my_place * PLACE_DELAY_S, 1.0), self._ask)

    def _ask(self) -> None:
        self._asking = False
        now = time.monotonic()
        if self._over_round >= self._round or self._my_place is None or now - self._heard_at < HEARD_S:
            return
        self._asked_at = now
        self._num_cases += 1
        self._case = _Case(self._num_cases, set(range(len(self._places))))
        for place, key in enumerate(self._places):
            if place != self._my_place:
                self._node.send(key, "hang_ask", [self._round, self._num_cases, self._known_turn_s()])
        self._heard(self._my_place, self._evidence())

    def _known_turn_s(self) -> float:
        """What a step takes in some rank, for those of which that is not known: all ranks step together. A worker that
        died before its steps were seen has left nothing to its successor, nor has any on a spare node."""
        return max((known.turn_s for known in self._ranks.values()), default=0.0) or self._turn_elsewhere_s

    def _evidence(self) -> list[Evidence]:
        now = time.monotonic()
        found = (self._look(worker, now) for worker in self._processes.assigned() if not worker.ended)
        return [seen.evidence for seen in found if seen is not None]

    def receive(self, sender: MemberKey, kind: str, body: Any) -> None:
        """A message of another agent; ValueError if it is nonsense."""
        if self._floor_s <= 0 or self._my_place is None:
            return
        if kind == "hang_ask":
            round_, number, turn_s = list_from(body, kind, 3)
            if round_ == self._round and sender in self._places[: self._my_place]:
                self._heard_at = time.monotonic()
            if round_ == self._round:
                self._turn_elsewhere_s = seconds_from(turn_s) or self._turn_elsewhere_s
                packed = [evidence.pack() for evidence in self._evidence()]
                self._node.send(sender, "hang_answer", [round_, number, self._my_place, packed])
        elif kind == "hang_answer":
            round_, number, place, packed = list_from(body, kind, 4)
            if round_ == self._round and self._case is not None and number == self._case.number:
                self._heard(count_from(place, "a place"), [Evidence.unpack(raw) for raw in list_from(packed, kind)])
        elif kind == "hung":
            round_, *numbers, sentence = list_from(body, kind, 5)
            if round_ == self._round:
                rank, pid, count = (count_from(number, "a number") for number in numbers)
                self._act(Fault(rank, pid, count, text_from(sentence, "a reason")))

    def _heard(self, place: int, evidence: Sequence[Evidence]) -> None:
        case = self._case
        if case is None:
            return
        case.missing.discard(place)
        case.evidence.update({each.rank: each for each in evidence})
        if case.missing:
            return
        self._case = None
        if self._over_round >= self._round:
            return
        judgement = judge(case.evidence, self._num_ranks)
        num_local = self._num_ranks // len(self._places)
        for fault in judgement.at_fault:
            at = fault.rank // num_local
            if at == self._my_place:
                self._act(fault)
            else:
                body = [self._round, fault.rank, fault.pid, fault.count, fault.sentence]
                self._node.send(self._places[at], "hung", body)
        for rank, sentence in judgement.slow.items():
            if (rank, case.evidence[rank].step) not in self._said_slow:
                self._said_slow.add((rank, case.evidence[rank].step))
                self._events.emit("straggler", f"rank {rank} is slow: {sentence}", rank=rank, reason=sentence)
        if judgement.stuck:
            self._on_stuck(judgement.stuck)

    # -- acting

    def _act(self, fault: Fault) -> None:
        worker = self._processes.of_rank(fault.rank)
        if worker is None or worker.pid != fault.pid or worker.hung or self._over_round >= self._round:
            return
        seen = self._look(worker, time.monotonic())
        if seen is not None and seen.evidence.count == fault.count:
            self._end(worker, fault.sentence)

    def _end(self, worker: Held, sentence: str) -> None:
        """Have its stacks written, then kill it."""
        assert worker.rank is not None
        assert worker.page is not None
        worker.hung = sentence
        known, step = self._ranks[worker.rank], read(worker.page).step
        known.patience = known.patience * MORE_PATIENCE if step <= known.hung_at_step else MORE_PATIENCE
        known.hung_at_step = max(step, known.hung_at_step)
        text = f"rank {worker.rank} (pid {worker.pid}) hangs and is replaced: {sentence}"
        self._events.emit("hang", text, rank=worker.rank, pid=worker.pid, reason=sentence)
        self._processes.note(worker, f"p2pstate: this process is ended: {sentence}\n{describe_threads(worker.pid)}")
        vitals = vitals_of(worker.pid)
        if vitals is not None and vitals.state == STOPPED:
            arguments = (worker,)
            threading.Thread(target=self._read_stacks, args=arguments, name="p2pstate-stacks", daemon=True).start()
        else:
            self._processes.signal(worker, STACKS_SIGNAL)
            self._node.call_later(STACKS_S, lambda: self._processes.kill(worker))

    def _read_stacks(self, worker: Held) -> None:
        text = python_stacks(worker.pid)

        def finish() -> None:
            if not worker.ended:
                self._processes.note(worker, text)
                self._processes.kill(worker)

        self._node.call_soon_threadsafe(finish)
