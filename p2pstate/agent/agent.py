"""One node of a run: membership, vault and workers brought together.

In: views from the rendezvous, deaths and errors from the workers. Out: workers with the right ranks in every round, the
abort of a round as soon as anybody knows that it cannot go on, and the run's verdict.

A round ends when a worker of it dies, reports an error, or its node is no longer in the view. Whoever notices tells all
agents (``abort``), which free their workers, and asks for a new view; the view says how its workers begin
(types.Start).

Invariants: everything here runs on the node's thread; a rank is never held by two live processes; the run ends only by
a verdict (finished, failed for good, or this node's own end), and then no process of this node is left.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from p2pstate.agent.budget import Budget
from p2pstate.agent.chaos import Chaos
from p2pstate.agent.describing import describe_start, version_of
from p2pstate.agent.draining import Draining
from p2pstate.agent.events import EventLog
from p2pstate.agent.health import HealthFile
from p2pstate.agent.job import Job
from p2pstate.agent.output import Writer
from p2pstate.agent.pausing import Pausing
from p2pstate.agent.rehearsals import Rehearsals
from p2pstate.agent.requests import Requests
from p2pstate.agent.resizing import Resizing
from p2pstate.agent.rounds import Progress, assignment, decide_start, num_places, progress_of, ranks_of, round_info
from p2pstate.agent.saves import Saves
from p2pstate.agent.sentences import Sentences
from p2pstate.agent.serving import Gatherer, PageServer
from p2pstate.agent.status import node_status
from p2pstate.agent.supervisor import Failure, Phase, Supervisor, WorkerProcess, describe_status
from p2pstate.agent.watchdog import Watchdog
from p2pstate.agent.weaknesses import Weaknesses
from p2pstate.errors import EXIT_CONFIG, EXIT_REPLACE, EXIT_RETRY, EXIT_STATE_LOST
from p2pstate.observe.metrics import exposition
from p2pstate.types import NOTHING_RAISED, OLDEST, RoundInfo, Start
from p2pstate.vault import Vault
from rendezvous.channel import Message
from rendezvous.config import Config
from rendezvous.node import Node, Timer
from rendezvous.types import EXIT_STOPPED, Change, Member, MemberChange, MemberKey, Verdict, View

__all__ = ["Agent"]

ERROR_GRACE_S = 1.0  # an error without a death: give the detector of deaths the first word
VERDICT_LINGER_S = 0.7
DONE_INTERVAL_S = 1.0
PROGRESS_INTERVAL_S = 0.5
STAYING = {Start.IN_PLACE: (Phase.LOOP, Phase.ALONE), Start.RERUN: (Phase.RERUN,)}  # who keeps its process in a round


class Agent:
    """rendezvous.types.Application and agent.supervisor.Listener in one."""

    def __init__(self, config: Config, job: Job) -> None:
        self._config = config
        self._job = job
        self._name = config.name
        self._writer = Writer()
        self.events = EventLog(config.name, job.run_dir, self._writer, quiet=job.quiet)
        self._vault = Vault(config.name)
        self.node = Node(config, self)
        self._supervisor = Supervisor(
            self.node, self, self._writer, name=config.name, run_dir=job.run_dir, quiet=job.quiet
        )
        self._chaos = Chaos(self.node, self._supervisor, self._vault, self._injected) if job.chaos else None
        self._rehearsals = Rehearsals(self._supervisor, self.events, job)
        self._watchdog = Watchdog(
            self.node,
            self._supervisor,
            floor_s=job.hang_floor_s,
            on_hung=self._on_hung,
            on_stuck=self._want_round,
            on_slow=self._on_slow,
        )
        self._pausing = Pausing(self.node, self._supervisor)
        self._view: View | None = None
        self._info: RoundInfo | None = None
        self._place: int | None = None
        self._wants_round = ""  # why this node needs a new round; empty: it does not
        self._start_over = ""  # types.Start that a worker's plan asks for
        self._aborted_round = 0
        self._lineage: dict[int, list[int]] = {}
        self._saves = Saves(self.node, self._supervisor, self._vault, self.events, config.name)
        self._raised: dict[int, tuple[int, str]] = {}  # by rank: what it raised last in a step
        self._draining = Draining(self.node, self._vault, self.events, self._saves, self._lineage, config.name)
        self._resizing = Resizing(self.node, config, self._draining, self._start_all_over)
        self._requests = Requests(self.node, self._supervisor.tell, self._vault, self._lineage)
        self._done_places: dict[int, set[int]] = {}  # round -> places whose workers have all finished
        self._known = Progress(0, -1)  # by what any member has told
        self._budget = Budget(job)
        self._some_finished = False  # a rank of this node has finished its script in this round
        self._loop_reached = False  # some rank of this node has trained since everybody started together
        self._sentences = Sentences()
        self._early_deaths = 0
        self._waiting_timer: Timer | None = None
        self._waiting_reason = ""
        self._weaknesses = Weaknesses(self.events)
        self._waiting_since = self._waited_s = 0.0  # the latter: since the newest round began
        self.verdict: Verdict | None = None
        self._gatherer = Gatherer(self.node, self._snapshot)
        self._page: PageServer | None = None
        if job.http is not None:
            self._page = PageServer(job.http, job.http_token, self._name, self._gatherer.gather, self._metrics)
        self._health = HealthFile(job.health_file, self.node, self._describe) if job.health_file else None

    def run(self) -> int:
        """Until the run's verdict; returns the exit code. No process or memory of this node is left afterwards."""
        try:
            self.events.emit("agent_started", **describe_start(self._config, self._job))
            self._supervisor.start()
            self._supervisor.keep_spares(self._job.num_workers + 1 + self._job.num_rehearsed)
            self._listen_for_progress()
            self._watchdog.start()
            if self._health is not None:
                self._health.start()
            if self._page is not None:
                self._page.start()
                self.events.emit("page", f"this run's page: {self._page.url}", url=self._page.url)
            self.node.run()
        finally:
            total = self.events.ledger.total()
            if total.wall_s > 0:
                self.events.emit("goodput", f"this node's ranks: {total.sentence()}", seconds=dict(total.seconds))
            if self._page is not None:
                self._page.close()
            self._supervisor.close()
            if self._health is not None:
                self._health.close()
            self.node.close()
            self._vault.close()
            self.events.close()
            self._writer.close()
            if self._writer.num_lost_bytes:
                lost, why = (
                    self._writer.num_lost_bytes,
                    self._writer.last_error or "it could not be written fast enough",
                )
                print(f"[{self._name}] {lost} bytes of logs and events were lost: {why}", file=sys.stderr)
        assert self.verdict is not None
        return self.verdict.code

    def interrupt(self, code: int, text: str) -> None:
        """A signal: before the end what can be saved is saved, and the workers finish their step, so that the others
        lose none. A second signal ends at once."""
        if self._draining.active or self._pausing.begun or self._place is None or self._info is None:
            self.end(code, text)
            return
        self.events.emit("leaving", reason=text)
        self._draining.start(
            self._info, text, self._is_training(), lambda: self._pausing.begin(text, lambda: self.end(code, text))
        )

    def end(self, code: int, text: str) -> None:
        """This node's own end (a signal, eviction): the others are told, and go on without it."""
        if self.verdict is None:
            self.verdict = Verdict(code, text, self.node.key)
            self.events.emit("verdict", text, code=code, text=text, scope="node")
            self.node.leave(text)
            self.node.call_later(VERDICT_LINGER_S, self.node.stop)

    def _describe(self) -> dict[str, Any]:
        """For the health file."""
        state = "joining" if self._view is None else "spare" if self._place is None else "training"
        if self.verdict is not None:
            state = "ended"
        elif self._view is not None and self._waiting_timer is not None:
            state = "waiting"
        return {"node": self._name, "state": state, "step": self._known.step}

    # -- rendezvous.types.Application

    def ballot(self) -> dict[str, Any]:
        phases = {worker.phase for worker in self._supervisor.assigned()}
        return {
            "wants_round": self._wants_round,
            "start_over": self._start_over,
            # Ranks that are on their way into the loop, or have left it, cannot be joined in place.
            "outside": bool(phases & {Phase.FRESH, Phase.DONE, Phase.FINISHED}) or self._some_finished,
            "rerun": Phase.RERUN in phases,
            "has_state": any(record.version and record.version.step > 0 for record in self._vault.records()),
            **self._known.table(),
            **self._resizing.ballot(),
        }

    def progress(self) -> dict[str, Any]:
        """Heard by all members: even when every training node is gone, somebody knows that there was something."""
        return self._known.table()

    def decide(
        self, previous: View | None, places: Sequence[Member], ballots: Mapping[MemberKey, dict[str, Any]]
    ) -> tuple[bool, dict[str, Any]]:
        return decide_start(previous, ballots.values())

    def num_places(self, previous: View, ballots: Mapping[MemberKey, dict[str, Any]]) -> tuple[int, int]:
        return num_places(previous, ballots.values())

    def on_view(self, view: View) -> None:
        self._cancel_waiting()
        self._view = view
        self._place = view.place_of(self.node.key)
        self._known = max(self._known, progress_of(view))
        start = str(view.data.get("start", Start.IN_PLACE))
        places, spares = [m.name for m in view.places], [m.name for m in view.spares]
        new_round = self._info is None or view.round != self._info.epoch
        fields = {"epoch": view.epoch, "round": view.round, "places": places, "spares": spares, "start": start}
        fields["nonce"] = view.nonce
        sentence = f"view {view.epoch}: training on {', '.join(places)}" + (
            f", spare {', '.join(spares)}" if spares else ""
        )
        self.events.emit("view", f"{sentence} ({view.reason})", reason=view.reason, **fields)
        self._weaknesses.on_round(round_info(view, start, self._config.run_id, self._job.num_workers))
        if new_round:
            self._begin_round(view, start)
        elif self._wants_round:
            self.node.propose(self._wants_round)  # decided from ballots that did not know yet
        if self._info is not None:
            self._resizing.on_view(view, self._info, self._is_training, new_round=new_round)

    def on_waiting(self, reason: str) -> None:
        if self.verdict is not None:
            return
        self.events.emit("waiting", f"waiting: {reason}", reason=reason)
        self._waiting_reason = reason
        if self._waiting_timer is None:
            self._waiting_since = time.monotonic()
            joining = self._view is None
            wait_s = self._job.join_timeout_s if joining else self._job.spare_wait_s
            self._waiting_timer = self.node.call_later(wait_s, lambda: self._give_up_waiting(joining, wait_s))

    def on_member(self, change: MemberChange) -> None:
        name = change.member.name
        if change.kind is Change.JOINED:
            self.events.emit("node_joined", member=name)
        elif change.kind in (Change.DEAD, Change.LEFT):
            fields = {"member": name, "reason": change.reason, "proof": change.proof}
            self.events.emit("member_dead", f"node {name} is gone: {change.reason}", **fields)
            if self._view and self._view.place_of(change.member.key) is not None:
                self._abort(self._view.round, f"node {name} is gone: {change.reason}", tell_others=False)
        else:
            if self._info is not None and not self._round_is_over():
                self._cancel_waiting()  # back before anything was given up
            self.events.emit(f"member_{change.kind.value}", member=name, reason=change.reason)

    def on_message(self, sender: MemberKey, kind: str, body: Any) -> None:
        if kind == "abort" and isinstance(body, list) and len(body) == 2:
            self._abort(int(body[0]), str(body[1]), tell_others=False)
        elif kind == "done" and isinstance(body, list) and len(body) == 2:
            self._place_done(int(body[0]), int(body[1]))
        elif kind in ("hang_ask", "hang_answer", "hung"):
            with suppress(ValueError):  # of another version of this program
                self._watchdog.receive(sender, kind, body)
        elif kind in ("look", "seen"):
            with suppress(TypeError, ValueError):  # of another version of this program
                self._gatherer.heard(sender, kind, body)
        elif kind == "save":
            self._saves.heard(sender, body)
        elif kind == "drain":
            with suppress(KeyError, TypeError, ValueError):  # of another version of this program
                self._draining.heard(sender, body)

    def _status(self) -> dict[str, Any]:
        waiting = self._waiting_reason if self._waiting_timer is not None else ""
        return node_status(self.node, self._supervisor, self._vault, waiting, self._weaknesses.told)

    def _snapshot(self) -> dict[str, Any]:
        """For pages, also those of other nodes."""
        page = self._page.url if self._page is not None else None
        return self._status() | {"page": page, "live": self.events.live.summary(time.time())}

    def _metrics(self) -> bytes:
        return self._gatherer.on_node(lambda: exposition(self.events.live, self._status(), version_of("p2pstate")))

    def answer(self, kind: str, body: Any) -> Any:
        """What an operator outside the run asks (p2prun status, p2prun stop)."""
        if kind == "status":
            return self._status()
        if kind == "chaos":
            refused = "this node was not started with p2prun --chaos"
            return self._chaos.answer(body) if self._chaos is not None else {"refused": refused}
        if kind == "stop" and isinstance(body, str):
            self._declare(EXIT_STOPPED, f"stopped by an operator: {body}")
            return {"taken": True}
        return None

    def on_verdict(self, verdict: Verdict) -> None:
        if self.verdict is not None:
            return
        self.verdict = verdict
        fields = {"code": verdict.code, "text": verdict.text, "scope": "run"}
        self.events.emit("verdict", f"the run has ended: {verdict.text}", **fields)
        if verdict.code != 0:
            self._end_workers()
        self.node.call_later(VERDICT_LINGER_S, self.node.stop)

    def on_evicted(self, reason: str) -> None:
        self._end_workers()
        self.end(EXIT_REPLACE, f"{reason}; its workers were ended")

    # -- agent.supervisor.Listener

    def on_worker_ready(self, worker: WorkerProcess) -> None:
        self._early_deaths = 0
        self._fill()

    def on_worker_message(self, worker: WorkerProcess, message: Message) -> None:
        kind = message.pop("t")
        handler = self._requests.handlers.get(kind) or getattr(self, f"_on_{kind}", None)
        try:
            if handler is None:
                raise ValueError(f"unknown message {kind!r}")
            handler(worker, **message)
        except (TypeError, ValueError, KeyError) as error:
            # One broken worker must not take the node's vault with it.
            self.events.emit("bad_message", f"pid {worker.pid} sent nonsense and is ended: {error}", pid=worker.pid)
            self._supervisor.kill(worker)

    def on_worker_ended(self, worker: WorkerProcess, status: int) -> None:
        cause = f"it hung: {worker.hung}" if worker.hung else describe_status(status)
        if worker.rehearses is not None:
            self._rehearsals.ended(worker, cause)
            return
        if worker.rank is None:
            self._spare_ended(worker, cause)
            return
        finished = worker.phase is Phase.FINISHED and status == 0
        sentence = "" if finished else f"rank {worker.rank} (pid {worker.pid}) ended: {cause}"
        self.events.emit("worker_exited", sentence, rank=worker.rank, pid=worker.pid, cause=cause, node_alive=True)
        self._pausing.over(worker)
        if self.verdict is not None:
            return
        if worker.failure is not None and not worker.failure.innocent:
            self._declare(worker.failure.code, f"rank {worker.rank} failed in user code: {worker.failure.sentence}")
        elif finished:
            self._some_finished = True
            self._check_done()
        elif worker.failure is not None:
            self._worker_died(worker, worker.failure.sentence)
        else:
            self._worker_died(worker, cause)

    def on_template_ended(self, reason: str) -> None:
        if self.verdict is None:
            self.end(EXIT_REPLACE, f"{reason}: this node cannot make workers any more")

    def on_fork_failed(self, reason: str) -> None:
        self.events.emit("fork_failed", f"no new worker can be started at the moment: {reason}", reason=reason)

    # -- what the watchdog finds

    def _on_hung(self, worker: WorkerProcess, reason: str) -> None:
        sentence = f"rank {worker.rank} (pid {worker.pid}) hangs and is replaced: {reason}"
        self.events.emit("hang", sentence, rank=worker.rank, pid=worker.pid, reason=reason)

    def _injected(self, sentence: str, fields: Mapping[str, Any]) -> None:
        self.events.emit("chaos", sentence, **fields)

    def _on_slow(self, rank: int, reason: str) -> None:
        self.events.emit("straggler", f"rank {rank} is slow: {reason}", rank=rank, reason=reason)

    # -- what workers say (see worker/link.py and steps.py)

    def _on_in_loop(self, worker: WorkerProcess) -> None:
        if worker.phase not in (Phase.ALONE, Phase.REHEARSING):  # they are once they have joined
            worker.phase = Phase.LOOP
            self._loop_reached = True

    def _on_rehearsed(self, worker: WorkerProcess) -> None:
        self._rehearsals.on_rehearsed(worker)

    def _on_rerunnable(self, worker: WorkerProcess) -> None:
        worker.phase = Phase.RERUN

    def _on_copies(self, worker: WorkerProcess, copies: int, lean: bool) -> None:
        self._weaknesses.on_copies(copies, lean)

    def _on_resumed(self, worker: WorkerProcess, epoch: int, version: list[int]) -> None:
        worker.phase = Phase.LOOP
        self._loop_reached = True
        self._lineage[epoch] = version

    def _on_checkpoint(self, worker: WorkerProcess, path: str, keep: int) -> None:
        self._saves.configure(path, keep)

    def _on_save(self, worker: WorkerProcess, version: list[int], final: bool) -> None:
        self._saves.ready(worker, version, final, self._my_ranks())

    def _on_loop_done(self, worker: WorkerProcess, step: int) -> None:
        worker.phase = Phase.DONE

    def _on_finished(self, worker: WorkerProcess) -> None:
        worker.phase = Phase.FINISHED
        self.events.emit("finished", rank=worker.rank)

    def _on_failed(self, worker: WorkerProcess, code: int, text: str, innocent: bool) -> None:
        lines = text.strip().splitlines()
        worker.failure = Failure(code if 0 < code < 256 else 1, lines[-1] if lines else "no reason given", innocent)

    def _on_error(self, worker: WorkerProcess, epoch: int, text: str) -> None:
        """A worker cannot go on in its round although nobody is known to be dead."""
        if self._info is None or epoch != self._info.epoch or self._round_is_over():
            return
        reason = f"rank {worker.rank}: {text}"

        def still_unexplained() -> None:
            if self._info is not None and self._info.epoch == epoch and self.verdict is None:
                self._want_round(reason)

        self.node.call_later(ERROR_GRACE_S, still_unexplained)

    def _on_paused(self, worker: WorkerProcess) -> None:
        self._pausing.over(worker)

    def _on_raised(self, worker: WorkerProcess, epoch: int, step: int, where: str, text: str, leaving: bool) -> None:
        """The user's code has raised in a step, which is discarded everywhere and tried again, once."""
        assert worker.rank is not None
        self._raised[worker.rank] = step, where
        how = "by another process" if leaving else "in place"
        sentence = f"rank {worker.rank} raised {text} in step {step}, which is tried again {how}"
        self.events.emit("raised", sentence, rank=worker.rank, step=step, text=text, leaving=leaving)
        if not leaving and self._info is not None and epoch == self._info.epoch:
            self._want_round(f"rank {worker.rank} raised {text} in step {step}")

    def _raised_by(self, rank: int) -> tuple[int, str]:
        """What ended the step that is tried next."""
        raised = self._raised.get(rank, NOTHING_RAISED)
        return raised if raised[0] > self._known.step else NOTHING_RAISED

    def _on_start_over(self, worker: WorkerProcess, epoch: int, start: str, reason: str) -> None:
        if self._info is not None and epoch == self._info.epoch:
            self._start_over = start if start in (Start.FRESH, Start.RESTART) else Start.FRESH
            self._want_round(reason)

    def _on_state_lost(self, worker: WorkerProcess, epoch: int, reason: str) -> None:
        if self._info is not None and epoch == self._info.epoch:
            self._declare(EXIT_STATE_LOST, f"the training state is lost: {reason}")

    def _on_step(self, worker: WorkerProcess, step: int, protected: int | None, **fields: Any) -> None:
        self._known = self._known.at(step)
        worker.step, worker.protected, worker.told_at = step, protected, time.monotonic()
        if worker.rank is not None and self._info is not None:
            self._rehearsals.on_step(worker.rank, self._info, self._my_ranks())
        self.events.emit("step", rank=worker.rank, step=step, protected=protected, **fields)

    def _on_event(self, worker: WorkerProcess, kind: str, **fields: Any) -> None:
        if worker.rank is None:
            return  # a rehearsal is no part of the run
        sentence = self._sentences.of(kind, worker.rank, fields)
        if sentence is not None:
            self.events.emit(kind, sentence, rank=worker.rank, **fields)

    # -- rounds

    def _begin_round(self, view: View, start: str) -> None:
        previous = self._info
        waited_s, self._waited_s = self._waited_s, 0.0
        self._info = round_info(view, start, self._config.run_id, self._job.num_workers)
        self._wants_round = self._start_over = ""
        self._saves.round_begins(self._info)
        if previous is not None and previous.world_size != self._info.world_size:
            self._vault.close()  # what is in it was cut for another number of ranks, and is on disk
        if previous is not None:
            self._abort(previous.epoch, view.reason, tell_others=False)
        self._some_finished = False
        self._watchdog.begin(view.round, [m.key for m in view.places], self._place, self._info.world_size)
        if start != Start.IN_PLACE:
            self._loop_reached = False
        if start == Start.FRESH:
            self._lineage[view.round] = list(OLDEST)  # what there was before counts no more
        first = previous is None or self._place is None
        given_up = self._budget.round_begins(self._known.step, view.reason, time.monotonic(), first=first)
        if given_up:
            self._declare(EXIT_RETRY, given_up)
            return
        self._rehearsals.round_begins(self._my_ranks() if start == Start.IN_PLACE else ())
        for worker in self._supervisor.assigned():
            if worker.phase in STAYING.get(start, ()) and worker.rank in self._my_ranks():
                worker.epoch = self._info.epoch
                self._supervisor.tell(worker, {"t": "round", "round": self._info.pack(), "waited_s": waited_s})
            else:
                self._supervisor.kill(worker)
        self._fill()

    def _my_ranks(self) -> range:
        return ranks_of(self._place, self._job.num_workers)

    def _round_is_over(self) -> bool:
        """Whether the newest round has been aborted, and the next view is awaited."""
        return self._info is not None and self._aborted_round >= self._info.epoch

    def _fill(self) -> None:
        """Give every rank of this node that no process holds to a spare, as far as spares are ready."""
        if self.verdict is not None or self._info is None or self._draining.active:
            return
        together = self._info.start != Start.IN_PLACE
        if together and self._round_is_over() and not self._loop_reached:
            return  # the next view decides how everybody begins
        for rank in self._my_ranks():
            if self._supervisor.of_rank(rank) is not None:
                continue
            fresh = together and not self._round_is_over()
            rehearsed = None if fresh else self._rehearsals.take(rank)
            spare = rehearsed or self._supervisor.spare()
            if spare is None:
                return
            if rehearsed is not None:
                self._adopt(rehearsed, rank)
            else:
                self._assign(spare, rank, fresh)

    def _adopt(self, rehearsed: WorkerProcess, rank: int) -> None:
        assert self._info is not None
        rehearsed.epoch = self._info.epoch
        local_rank = self._info.workers[rank].local_rank
        self._supervisor.adopt(rehearsed, local_rank)
        before = {"seconds": self.events.ledger.of_rank(rank), "raised": self._raised_by(rank)}
        self._supervisor.tell(rehearsed, {"t": "adopted", **before})
        if not self._round_is_over():
            self._supervisor.tell(rehearsed, {"t": "round", "round": self._info.pack()})
        fields = {"rank": rank, "local_rank": local_rank, "pid": rehearsed.pid, "warm": True, "rehearsed": True}
        self.events.emit("worker_started", f"rank {rank} is pid {rehearsed.pid}, which has rehearsed it", **fields)

    def _assign(self, spare: WorkerProcess, rank: int, fresh: bool) -> None:
        assert self._info is not None
        spare.epoch = self._info.epoch
        job = self._job
        message = assignment(
            self._info, rank, job.num_workers, fresh=fresh, aborted=self._round_is_over(), raised=self._raised_by(rank)
        )
        message["seconds"] = self.events.ledger.of_rank(rank)
        message |= {"script": job.script, "args": list(job.args), "module": job.module}
        local_rank = message["local_rank"]
        self._supervisor.assign(spare, message, rank, local_rank, Phase.FRESH if fresh else Phase.ALONE)
        fields = {"rank": rank, "local_rank": local_rank, "pid": spare.pid, "warm": True}
        self.events.emit("worker_started", f"rank {rank} is pid {spare.pid}", **fields)

    def _abort(self, round_: int, reason: str, *, tell_others: bool) -> None:
        """Free every worker of this round. Idempotent."""
        if self._info is None or round_ != self._info.epoch or self._round_is_over():
            return
        self._aborted_round = round_
        self._watchdog.over(round_)
        self.events.emit("abort", f"round {round_} is over: {reason}", round=round_, reason=reason)
        if tell_others:
            self.node.broadcast("abort", [round_, reason])
        for worker in self._supervisor.assigned():
            self._supervisor.tell(worker, {"t": "abort", "epoch": round_, "reason": reason})
        if self._view is not None and self._view.round == round_ and self._place is not None:
            # Workers that were freed wait for the next round: it must come, even if what ended this one heals.
            self._wants_round = self._wants_round or reason
            self.node.propose(reason)

    def _worker_died(self, worker: WorkerProcess, cause: str) -> None:
        assert self._info is not None
        if worker.epoch < self._info.epoch and self._info.start != Start.IN_PLACE:
            self._fill()  # it belonged to a round that everybody has left
            return
        reason = f"rank {worker.rank} on {self._name} died: {cause}"
        if worker.failure is not None and worker.phase is Phase.ALONE:
            reason = f"rank {worker.rank} cannot start alone ({cause}): all workers start again together"
            self._start_over = Start.RESTART
        elif worker.phase in (Phase.DONE, Phase.FINISHED):
            reason = f"rank {worker.rank} on {self._name} died after its loop: {cause}"
            self._start_over = Start.RESTART
        used_up = self._budget.worker_replaced(reason)
        if used_up:
            self._declare(EXIT_RETRY, used_up)
            return
        self._want_round(reason)
        self._fill()

    def _want_round(self, reason: str) -> None:
        """This node needs another round, whatever the others think of the present one."""
        assert self._info is not None
        self._wants_round = reason
        if self._round_is_over():
            self.node.propose(reason)
        self._abort(self._info.epoch, reason, tell_others=True)

    def _spare_ended(self, worker: WorkerProcess, cause: str) -> None:
        self._early_deaths += 1
        self.events.emit("spare_exited", f"a spare (pid {worker.pid}) ended: {cause}", pid=worker.pid, cause=cause)
        if self._early_deaths > 3 and self.verdict is None:
            self.end(
                EXIT_REPLACE, f"workers cannot start on this node: {self._early_deaths} spares ended in a row ({cause})"
            )

    # -- the end

    def _end_workers(self) -> None:
        for worker in self._supervisor.assigned():
            self._supervisor.kill(worker)

    def _check_done(self) -> None:
        """Tell everybody when all of this node's ranks have finished, until there is a verdict."""
        if self._info is None or self._place is None or self.verdict is not None:
            return
        if self._supervisor.assigned():
            return
        self.node.broadcast("done", [self._info.epoch, self._place])
        self._place_done(self._info.epoch, self._place)
        self.node.call_later(DONE_INTERVAL_S, self._check_done)

    def _place_done(self, round_: int, place: int) -> None:
        done = self._done_places.setdefault(round_, set())
        done.add(place)
        view = self._view
        if view is not None and view.round == round_ and len(done) == len(view.places) and self.verdict is None:
            self._declare(0, "finished: every rank's script ended well")

    def _declare(self, code: int, text: str) -> None:
        if self.verdict is not None or self._draining.active:
            return

        def declare() -> None:
            self.node.declare(Verdict(code, text, self.node.key))

        if code in (0, EXIT_STATE_LOST):
            declare()  # everything is on disk, or nothing is left to write
        else:
            self._draining.start(self._info, text, self._is_training(), declare)

    def _is_training(self) -> bool:
        """Whether this node's ranks go on with steps."""
        ranks = [self._supervisor.of_rank(rank) for rank in self._my_ranks()]
        return not self._round_is_over() and all(w is not None and w.phase is Phase.LOOP for w in ranks)

    def _listen_for_progress(self) -> None:
        """Every now and then, remember the newest step that any member has told of."""
        for record in self.node.members().values():
            self._known = max(self._known, Progress.of(record.progress))
        self.node.call_later(PROGRESS_INTERVAL_S, self._listen_for_progress)

    def _give_up_waiting(self, joining: bool, wait_s: float) -> None:
        if joining:
            text = f"no view within {wait_s:g} s (--join-timeout): {self._waiting_reason}"
            self.end(EXIT_CONFIG, f"{text}; check --contacts ({', '.join(self._config.contacts)}) and --nnodes")
        else:
            text = f"no view within {wait_s:g} s of waiting (--spare-wait): {self._waiting_reason}"
            if self._config.num_nodes_min < self._config.num_nodes_max and not self._saves.configured:
                text += "; fewer nodes, as --nnodes allows, need Replicator(checkpoint=...)"
            if self._info is None or not self._saves.configured:
                self._declare(EXIT_RETRY, text)
                return
            self._resizing.shrink(self._info, text, lambda: self._declare(EXIT_RETRY, text))

    def _start_all_over(self, reason: str) -> None:
        """All workers begin again, from disk, on whatever places the next view has."""
        self._start_over = Start.FRESH
        self._want_round(reason)

    def _cancel_waiting(self) -> None:
        if self._waiting_timer is not None:
            self._waiting_timer.cancel()
            self._waiting_timer = None
            self._waited_s += time.monotonic() - self._waiting_since
