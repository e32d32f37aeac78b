"""Spares that have run the script already: each under the rank of one live worker, which it replaces without delay.

In: the ranks of this node, spare processes. Out: for a rank whose worker died, a process that has built its model and
done its rehearsal steps alone (or is about to), and waits for a round.

Invariants: a rehearsed process takes only the rank it has rehearsed, for that is what its script has seen; rehearsals
begin only while training goes on, and nothing they do reaches others (see DESIGN: solo mode); one that fails is no
fault of the run: after :data:`MAX_FAILURES` of a rank it is left to spares that wait before the script.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from p2pstate.agent.events import EventLog
from p2pstate.agent.held import Phase
from p2pstate.agent.job import Job
from p2pstate.agent.journals import Journals
from p2pstate.agent.rounds import assignment
from p2pstate.agent.supervisor import Supervisor, WorkerProcess
from p2pstate.types import RoundInfo

__all__ = ["Rehearsals"]

MAX_FAILURES = 2
STEPS_BEFORE = 2  # of each of the node's ranks, after a round has begun: recovery needs the processors more


class Rehearsals:
    def __init__(self, supervisor: Supervisor, events: EventLog, job: Job, journals: Journals) -> None:
        self._supervisor = supervisor
        self._journals = journals
        self._events = events
        self._job = job
        self._num_steps: Counter[int] = Counter()  # in this round, by rank
        self._num_failures: Counter[int] = Counter()

    def round_begins(self, ranks: Iterable[int]) -> None:
        """Only rehearsals of ``ranks`` are of use from now on."""
        self._num_steps.clear()
        kept = set(ranks)
        for worker in self._all():
            if worker.rehearses not in kept:
                self._supervisor.kill(worker)

    def on_step(self, rank: int, info: RoundInfo, ranks: range) -> None:
        """A rank of this node has committed a step: see whether rehearsals are missing."""
        if not self._job.num_rehearsed:
            return
        self._num_steps[rank] += 1
        if self._num_steps[rank] < STEPS_BEFORE or any(self._num_steps[each] < STEPS_BEFORE for each in ranks):
            return
        under_way = {worker.rehearses for worker in self._all()}
        for each in ranks[: self._job.num_rehearsed]:
            if each in under_way or self._num_failures[each] >= MAX_FAILURES:
                continue
            spare = self._supervisor.spare()
            if spare is None:
                return
            job = self._job
            message = assignment(info, each, job.num_workers, fresh=False, aborted=True, max_restarts=job.max_restarts)
            message |= {"seconds": {}, "journal": self._journals.of(each)}
            message |= job.program()
            self._supervisor.rehearse(spare, message, each)
            self._events.emit("rehearsal", rank=each, pid=spare.pid)

    def on_rehearsed(self, worker: WorkerProcess) -> None:
        """It has done its steps, and waits."""
        if worker.rehearses is not None:
            self._events.emit("rehearsed", rank=worker.rehearses, pid=worker.pid)

    def take(self, rank: int) -> WorkerProcess | None:
        """The process that has rehearsed ``rank``, or is doing so."""
        return next((worker for worker in self._all() if worker.rehearses == rank and not worker.ended), None)

    def ended(self, worker: WorkerProcess, cause: str) -> None:
        rank = worker.rehearses
        assert rank is not None
        if worker.killed:
            return
        self._num_failures[rank] += 1
        why = worker.failure.sentence if worker.failure is not None else cause
        sentence = f"the rehearsal of rank {rank} (pid {worker.pid}) failed: {why}"
        self._events.emit("rehearsal_failed", sentence, rank=rank, pid=worker.pid, cause=why)

    def _all(self) -> list[WorkerProcess]:
        return [w for w in self._supervisor.workers.values() if w.phase is Phase.REHEARSING and not w.killed]
