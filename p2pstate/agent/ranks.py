"""The ranks of this node: which process holds each, and when they need another round.

In: rounds that begin, deaths and words of workers. Out: processes with the right ranks, the abort of a round as soon as
anybody knows that it cannot go on, the wish for another one.

A round ends when a worker of it dies, reports an error, or its node is no longer in the view. Whoever notices tells all
agents (``abort``), which free their workers, and asks for a new view; the view says how its workers begin
(types.Start).

Invariants: everything here runs on the node's thread; a rank is never held by two live processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from p2pstate.agent.budget import Budget
from p2pstate.agent.events import EventLog
from p2pstate.agent.held import Phase
from p2pstate.agent.job import Job
from p2pstate.agent.journals import Journals
from p2pstate.agent.rehearsals import Rehearsals
from p2pstate.agent.round_state import RoundState
from p2pstate.agent.rounds import assignment, ranks_of, round_info
from p2pstate.agent.supervisor import Failure, Supervisor, WorkerProcess
from p2pstate.errors import EXIT_RETRY, EXIT_STATE_LOST
from p2pstate.types import NOTHING_RAISED, RoundInfo, Start
from rendezvous.node import Node
from rendezvous.types import View

__all__ = ["Ending", "Ranks"]

STAYING = {Start.IN_PLACE: (Phase.LOOP, Phase.ALONE), Start.RERUN: (Phase.RERUN,)}  # who keeps its process in a round


class Ending(Protocol):
    """The end of the run, as far as ranks have to do with it."""

    def declare(self, code: int, text: str) -> None:
        """End the run."""

    @property
    def ended(self) -> bool: ...

    @property
    def closing(self) -> bool:
        """Whether it has ended, or is about to: nobody is replaced any more."""


class Ranks:
    def __init__(
        self,
        node: Node,
        supervisor: Supervisor,
        events: EventLog,
        rehearsals: Rehearsals,
        journals: Journals,
        job: Job,
        ending: Ending,
    ) -> None:
        self._node, self._supervisor, self._events, self._rehearsals = node, supervisor, events, rehearsals
        self._journals, self._job, self._ending = journals, job, ending
        self.on_over: Callable[[int], None] = lambda round_: None  # called with each round that was aborted
        self._name, self._run_id = node.config.name, node.config.run_id
        self._budget = Budget(job)
        self.info: RoundInfo | None = None  # the newest round
        self.place: int | None = None  # in it
        self.state = RoundState(
            node,
            events,
            want_round=self.want_round,
            state_lost=lambda text: ending.declare(EXIT_STATE_LOST, text),
            is_over=lambda: self.round_is_over,
        )
        self._aborted_round = 0
        self._raised: dict[int, tuple[int, str]] = {}  # by rank: what it raised last in a step
        self._some_finished = False  # a rank of this node has finished its script in this round
        self._loop_reached = False  # some rank of this node has trained since everybody started together
        self.handlers: dict[str, Callable[..., None]] = {
            **self.state.handlers,
            "in_loop": self._in_loop,
            "rerunnable": self._rerunnable,
            "resumed": self._resumed,
            "rerun_done": self._rerun_done,
            "finished": self._finished,
            "failed": self._failed,
            "raised": self._on_raised,
            "step": self._step,
        }

    # -- what is so

    @property
    def mine(self) -> range:
        return ranks_of(self.place, self._job.num_workers)

    @property
    def round_is_over(self) -> bool:
        """Whether the newest round has been aborted, and the next view is awaited."""
        return self.info is not None and self._aborted_round >= self.info.epoch

    @property
    def training(self) -> bool:
        """Whether this node's ranks go on with steps."""
        holders = [self._supervisor.of_rank(rank) for rank in self.mine]
        return not self.round_is_over and all(w is not None and w.phase is Phase.LOOP for w in holders)

    def all_finished(self, round_: int) -> bool:
        current = self.info is not None and self.info.epoch == round_
        return current and self.place is not None and not self._supervisor.assigned()

    def ballot(self) -> dict[str, Any]:
        """See rounds.decide_start."""
        phases = {worker.phase for worker in self._supervisor.assigned()}
        return {
            **self.state.ballot(),
            # Ranks that are on their way into the loop, or have left it, cannot be joined in place.
            "outside": bool(phases & {Phase.FRESH, Phase.DONE, Phase.FINISHED}) or self._some_finished,
            "rerun": Phase.RERUN in phases,
        }

    # -- rounds

    def on_view(self, view: View) -> bool:
        """Returns whether a new round begins with it: then :meth:`begin` has to follow."""
        self.place = view.place_of(self._node.key)
        return self.state.on_view(view)

    def begin(self, view: View, start: str, waited_s: float) -> None:
        previous = self.info
        if previous is not None:  # the view may come before the word that this round is over
            self.abort(previous.epoch, view.reason, tell_others=False)
        self.info = round_info(view, start, self._run_id, self._job.num_workers)
        self._some_finished = False
        if start != Start.IN_PLACE:
            self._loop_reached = False
        first = previous is None or self.place is None
        given_up = self._budget.round_begins(self.state.known.step, view.reason, time.monotonic(), first=first)
        if given_up:
            self._ending.declare(EXIT_RETRY, given_up)
            return
        self._rehearsals.round_begins(self.mine if start == Start.IN_PLACE else ())
        for worker in self._supervisor.assigned():
            if worker.phase in STAYING.get(start, ()) and worker.rank in self.mine:
                worker.epoch = self.info.epoch
                self._tell_round(worker, waited_s)
            else:
                self._supervisor.kill(worker)
        self.fill()
        missing = [rank for rank in self.mine if self._supervisor.of_rank(rank) is None]
        if missing:
            ranks = ", ".join(map(str, missing))
            self._events.emit("workers_starting", f"rank {ranks}: waiting for a process that has imported torch")

    def fill(self) -> None:
        """Give every rank of this node that no process holds to a spare, as far as spares are ready."""
        if self._ending.closing or self.info is None:
            return
        together = self.info.start != Start.IN_PLACE
        if together and self.round_is_over and not self._loop_reached:
            return  # the next view decides how everybody begins
        for rank in self.mine:
            if self._supervisor.of_rank(rank) is not None:
                continue
            fresh = together and not self.round_is_over
            rehearsed = None if fresh else self._rehearsals.take(rank)
            spare = rehearsed or self._supervisor.spare()
            if spare is None:
                return
            if rehearsed is not None:
                self._adopt(rehearsed, rank)
            else:
                self._assign(spare, rank, fresh=fresh)

    def _tell_round(self, worker: WorkerProcess, waited_s: float) -> None:
        """``waited_s``: how long this node waited before it for a view."""
        assert self.info is not None
        self._supervisor.tell(worker, {"t": "round", "round": self.info.pack(), "waited_s": waited_s})

    def _adopt(self, rehearsed: WorkerProcess, rank: int) -> None:
        assert self.info is not None
        rehearsed.epoch = self.info.epoch
        local_rank = self.info.workers[rank].local_rank
        self._supervisor.adopt(rehearsed, local_rank)
        before = {"seconds": self._events.ledger.of_rank(rank), "raised": self._raised_by(rank)}
        self._supervisor.tell(rehearsed, {"t": "adopted", **before})
        if not self.round_is_over:
            self._tell_round(rehearsed, 0.0)
        fields = {"rank": rank, "local_rank": local_rank, "pid": rehearsed.pid, "warm": True, "rehearsed": True}
        self._events.emit("worker_started", f"rank {rank} is pid {rehearsed.pid}, which has rehearsed it", **fields)

    def _assign(self, spare: WorkerProcess, rank: int, *, fresh: bool) -> None:
        assert self.info is not None
        spare.epoch = self.info.epoch
        job = self._job
        message = assignment(
            self._info_now(self.info),
            rank,
            job.num_workers,
            fresh=fresh,
            aborted=self.round_is_over,
            raised=self._raised_by(rank),
            max_restarts=job.max_restarts,
        )
        message["seconds"] = self._events.ledger.of_rank(rank)
        message["journal"] = b"" if fresh else self._journals.of(rank)
        message |= job.program()
        local_rank = message["local_rank"]
        self._supervisor.assign(spare, message, rank, local_rank, Phase.FRESH if fresh else Phase.ALONE)
        fields = {"rank": rank, "local_rank": local_rank, "pid": spare.pid, "warm": True}
        self._events.emit("worker_started", f"rank {rank} is pid {spare.pid}", **fields)

    def abort(self, round_: int, reason: str, *, tell_others: bool, said: bool = False, cause: str = "") -> None:
        """Free every worker of this round. Idempotent. ``said``: a person has read the reason already. ``cause``: what
        the node that noticed takes it for (observe/incidents.py)."""
        if self.info is None or round_ != self.info.epoch or self.round_is_over:
            return
        self._aborted_round = round_
        self.on_over(round_)
        told = {"cause": cause} if cause else {}
        self._events.emit("abort", "" if said else f"interrupted: {reason}", round=round_, reason=reason, **told)
        if tell_others:
            self._node.broadcast("abort", [round_, reason, self._events.live.cause_of(round_)])
        for worker in self._supervisor.assigned():
            self._supervisor.tell(worker, {"t": "abort", "epoch": round_, "reason": reason})
        if self.state.is_current(round_) and self.place is not None:
            # Workers that were freed wait for the next round: it must come, even if what ended this one heals.
            self.state.wants_round = self.state.wants_round or reason
            self._node.propose(reason)

    def want_round(self, reason: str) -> None:
        """This node needs another round, whatever the others think of the present one."""
        assert self.info is not None
        self.state.wants_round = reason
        if self.round_is_over:
            self._node.propose(reason)
        self.abort(self.info.epoch, reason, tell_others=True)

    def start_all_over(self, reason: str) -> None:
        """All workers begin again, from disk, on whatever places the next view has."""
        self.state.start_over = Start.FRESH
        self.want_round(reason)

    # -- the ends of workers

    def finished(self) -> None:
        """A rank of this node has come to the end of its script, and its process has ended."""
        self._some_finished = True

    def died(self, worker: WorkerProcess, cause: str) -> None:
        assert self.info is not None
        if worker.epoch < self.info.epoch and self.info.start != Start.IN_PLACE:
            self.fill()  # it belonged to a round that everybody has left
            return
        reason = f"rank {worker.rank} on {self._name} died: {cause}"
        if worker.failure is not None and worker.phase is Phase.ALONE:
            reason = f"rank {worker.rank} cannot start alone ({cause}): all workers start again together"
            self.state.start_over = Start.RESTART
        elif worker.phase in (Phase.DONE, Phase.FINISHED):
            reason = f"rank {worker.rank} on {self._name} died after its loop: {cause}"
            self.state.start_over = Start.RESTART
        used_up = self._budget.worker_replaced(reason)
        if used_up:
            self._ending.declare(EXIT_RETRY, used_up)
            return
        self.want_round(reason)
        self.fill()

    # -- what workers say (see worker/link.py and steps.py)

    def _in_loop(self, worker: WorkerProcess) -> None:
        self.state.in_loop(worker)
        self._loop_reached = self._loop_reached or worker.phase is Phase.LOOP

    def _rerunnable(self, worker: WorkerProcess) -> None:
        worker.phase = Phase.RERUN

    def _resumed(self, worker: WorkerProcess, epoch: int, version: list[int], ends: list[Any]) -> None:
        self.state.resumed(worker, epoch, version, ends)
        self._loop_reached = True

    def _rerun_done(self, worker: WorkerProcess) -> None:
        worker.phase = Phase.DONE

    def _finished(self, worker: WorkerProcess) -> None:
        worker.phase = Phase.FINISHED
        self._events.emit("finished", rank=worker.rank)

    def _failed(self, worker: WorkerProcess, code: int, text: str, innocent: bool) -> None:
        lines = text.strip().splitlines()
        worker.failure = Failure(code if 0 < code < 256 else 1, lines[-1] if lines else "no reason given", innocent)

    def _on_raised(self, worker: WorkerProcess, epoch: int, step: int, where: str, text: str, leaving: bool) -> None:
        """The user's code has raised in a step, which is discarded everywhere and tried again, once."""
        assert worker.rank is not None
        self._raised[worker.rank] = step, where
        how = "by another process" if leaving else "in place"
        sentence = f"rank {worker.rank} raised {text} in step {step}, which is tried again {how}"
        self._events.emit("raised", sentence, rank=worker.rank, step=step, text=text, leaving=leaving)
        if not leaving and self.info is not None and epoch == self.info.epoch:
            self.want_round(f"rank {worker.rank} raised {text} in step {step}")

    def _raised_by(self, rank: int) -> tuple[int, str]:
        """What ended the step that is tried next."""
        raised = self._raised.get(rank, NOTHING_RAISED)
        return raised if raised[0] > self.state.known.step else NOTHING_RAISED

    def _step(self, worker: WorkerProcess, step: int, protected: int | None, **fields: Any) -> None:
        self.state.step(worker, step, protected, **fields)
        if worker.rank is not None and self.info is not None:
            self._rehearsals.on_step(worker.rank, self._info_now(self.info), self.mine)

    def _info_now(self, info: RoundInfo) -> RoundInfo:
        """The round with what has become known since it began."""
        return info if info.ends == self.state.ends else replace(info, ends=self.state.ends)
