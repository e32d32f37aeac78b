"""One node of a run: membership, vault and workers brought together.

In: views, deaths and messages from the rendezvous, what workers and operators say. Out: each of them to whom it
concerns (ranks.py, saves.py, ...), and the run's verdict.

Invariants: everything here runs on the node's thread; the run ends only by a verdict (finished, failed for good, or
this node's own end), and then no process of this node is left.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from p2pstate.agent.chaos import Chaos
from p2pstate.agent.data_ends import KIND as DATA_ENDED
from p2pstate.agent.data_ends import DataEnds
from p2pstate.agent.describing import describe_start
from p2pstate.agent.draining import Draining
from p2pstate.agent.events import EventLog
from p2pstate.agent.health import HealthFile
from p2pstate.agent.held import Phase
from p2pstate.agent.helpers import describe_status
from p2pstate.agent.job import Job
from p2pstate.agent.journals import Journals
from p2pstate.agent.output import Writer
from p2pstate.agent.pausing import Pausing
from p2pstate.agent.ranks import Ranks
from p2pstate.agent.rehearsals import Rehearsals
from p2pstate.agent.requests import Requests
from p2pstate.agent.resizing import Resizing
from p2pstate.agent.round_state import tell_view
from p2pstate.agent.rounds import Progress, decide_start, num_places, round_info
from p2pstate.agent.saves import Saves
from p2pstate.agent.sentences import lost_with_the_run
from p2pstate.agent.serving import Site
from p2pstate.agent.status import ranks_status
from p2pstate.agent.supervisor import Supervisor, WorkerProcess
from p2pstate.agent.waiting import Waiting
from p2pstate.agent.watchdog import Watchdog
from p2pstate.agent.weaknesses import Weaknesses
from p2pstate.errors import EXIT_CONFIG, EXIT_REPLACE, EXIT_RETRY, EXIT_STATE_LOST
from p2pstate.observe.spans import IncidentSpans
from p2pstate.types import Start
from p2pstate.vault import Vault
from rendezvous import completion
from rendezvous.channel import Message
from rendezvous.completion import Completion
from rendezvous.config import Config
from rendezvous.cut_transport import CutTransport
from rendezvous.node import Node
from rendezvous.standing import standing_of
from rendezvous.types import EXIT_STOPPED, Change, Member, MemberChange, MemberKey, Verdict, View
from rendezvous.zmq_transport import ZmqTransport

__all__ = ["Agent"]

VERDICT_LINGER_S = 0.7
PROGRESS_INTERVAL_S = 0.5


class Agent:
    """rendezvous.types.Application and agent.supervisor.Listener in one."""

    def __init__(self, config: Config, job: Job) -> None:
        with ExitStack() as opened:  # when something cannot be made, what was made before is closed
            self._config = config
            self._job = job
            self._name = config.name
            self._writer = Writer()
            opened.callback(self._writer.close)
            if job.log_dir is not None:
                os.makedirs(job.log_dir, exist_ok=True)
            self.events = EventLog(config.name, job.run_dir, self._writer, quiet=job.quiet)
            opened.callback(self.events.close)
            if job.otel:
                self.events.spans = IncidentSpans(config.run_id, config.name)
            self._vault = Vault(config.name)
            opened.callback(self._vault.close)
            transport = ZmqTransport(config)
            opened.callback(transport.close, 0.0)
            cuttable = CutTransport(transport) if job.chaos else None
            self.node = Node(config, self, transport=cuttable or transport)
            opened.callback(self.node.close)
            self._supervisor = Supervisor(
                self.node, self, self._writer, name=config.name, log_dir=job.log_dir, quiet=job.quiet
            )
            opened.callback(self._supervisor.close)
            self._chaos: Chaos | None = None
            if cuttable is not None:
                self._chaos = Chaos(self.node, cuttable, self._supervisor, self._vault, self._injected)
            self._journals = Journals(self.node)
            self._rehearsals = Rehearsals(self._supervisor, self.events, job, self._journals)
            self._ranks = Ranks(self.node, self._supervisor, self.events, self._rehearsals, self._journals, job, self)
            self._watchdog = Watchdog(
                self.node, self._supervisor, self.events, floor_s=job.hang_floor_s, on_stuck=self._ranks.want_round
            )
            self._ranks.on_over = self._watchdog.over
            self._pausing = Pausing(self.node, self._supervisor)
            self._view: View | None = None
            self._saves = Saves(
                self.node, self._supervisor.helpers, self._supervisor.tell_ranks, self._vault, self.events, config.name
            )
            lineage = self._ranks.state.lineage
            self._draining = Draining(self.node, self._vault, self.events, self._saves, lineage, config.name)
            self._resizing = Resizing(self.node, config, self._draining, self._ranks.start_all_over)
            self._requests = Requests(self.node, self._supervisor.tell, self._vault, lineage)
            self._data_ends = DataEnds(self.node, self._supervisor.tell_ranks)
            self._completion = Completion(
                self.node,
                self._ranks.all_finished,
                lambda: self.declare(0, "finished: every rank's script ended well"),
            )
            self._early_deaths = 0
            self._weaknesses = Weaknesses(self.events)
            self._waiting = Waiting(self.node)
            self.verdict: Verdict | None = None
            self._site = Site(self.node, self.events, self._status)
            opened.callback(self._site.close)
            if job.http is not None:
                self._site.serve(job.http, job.http_token)
            self._handlers: dict[str, Callable[..., None]] = {
                **self._requests.handlers,
                **self._data_ends.handlers,
                **self._ranks.handlers,
                **self._saves.handlers,
                **self._weaknesses.handlers,
                "rehearsed": self._rehearsals.on_rehearsed,
                "save": lambda worker, version, final: self._saves.ready(worker.rank, version, final, self._ranks.mine),
                "paused": self._pausing.over,
                "journal": lambda worker, packed: self._journals.from_worker(worker.rank, packed),
            }
            self._health = HealthFile(job.health_file, self.node, self._describe) if job.health_file else None
            if self._health is not None:
                opened.callback(self._health.close)
            self._opened = opened.pop_all()

    def run(self) -> int:
        """Until the run's verdict; returns the exit code. No process or memory of this node is left afterwards."""
        try:
            self.events.keep_room_for_verdict()
            self.events.emit("agent_started", **describe_start(self._config, self._job))
            self._supervisor.start()
            self._supervisor.keep_spares(self._job.num_workers + 1 + self._job.num_rehearsed)
            self._listen_for_progress()
            self._watchdog.start()
            if self._health is not None:
                self._health.start()
            self._site.start()
            self.node.run()
        finally:
            total = self.events.ledger.total()
            if total.wall_s > 0:
                says = f"this node's ranks: {total.sentence()}" if total.ratio > 0 else ""  # of no steps: nothing
                self.events.emit("goodput", says, seconds=dict(total.seconds))
            self._opened.close()
            if self._writer.num_lost_bytes:
                lost = f"{self._writer.num_lost_bytes} bytes of logs and events were lost"
                why = self._writer.last_error or "it could not be written fast enough"
                print(f"[{self._name}] {lost}: {why}", file=sys.stderr)
        assert self.verdict is not None
        return self.verdict.code

    def interrupt(self, code: int, text: str) -> None:
        """A signal: before the end what can be saved is saved, and the workers finish their step, so that the others
        lose none. A second signal ends at once."""
        ranks = self._ranks
        if self._draining.active or self._pausing.begun or ranks.place is None or ranks.info is None:
            self.end(code, text)
            return
        self.events.emit("leaving", reason=text)

        def pause() -> None:
            self._pausing.begin(text, lambda: self.end(code, text))

        self._draining.start(ranks.info, text, pause, training=ranks.training)

    def end(self, code: int, text: str) -> None:
        """This node's own end (a signal, eviction): the others are told, and go on without it."""
        if self.verdict is None:
            self.verdict = Verdict(code, text, self.node.key)
            self.events.emit("verdict", text, code=code, text=text, scope="node")
            self.node.leave(text)
            self.node.call_later(VERDICT_LINGER_S, self.node.stop)

    def _describe(self) -> dict[str, Any]:
        """For the health file."""
        state = "joining" if self._view is None else "spare" if self._ranks.place is None else "training"
        if self.verdict is not None:
            state = "ended"
        elif self._view is not None and self._waiting.active:
            state = "waiting"
        return {"node": self._name, "state": state, "step": self._ranks.state.known.step}

    # -- rendezvous.types.Application

    def ballot(self) -> dict[str, Any]:
        return self._ranks.ballot() | {"has_state": self._vault.has_state} | self._resizing.ballot()

    def progress(self) -> dict[str, Any]:
        """Heard by all members: even when every training node is gone, somebody knows that there was something."""
        return self._ranks.state.known.table()

    def decide(
        self, previous: View | None, places: Sequence[Member], ballots: Mapping[MemberKey, dict[str, Any]]
    ) -> tuple[bool, dict[str, Any]]:
        return decide_start(previous, ballots.values())

    def num_places(self, previous: View, ballots: Mapping[MemberKey, dict[str, Any]]) -> tuple[int, int]:
        return num_places(previous, ballots.values())

    def on_view(self, view: View) -> None:
        self._waiting.end()
        self._view = view
        ranks = self._ranks
        start = str(view.data.get("start", Start.IN_PLACE))
        tell_view(self.events, view, start)
        info = round_info(view, start, self._config.run_id, self._job.num_workers)
        self._weaknesses.on_round(info)
        new_round = ranks.on_view(view)
        self._journals.on_view(view, ranks.mine)
        if new_round:
            if ranks.info is not None and ranks.info.world_size != info.world_size:
                self._vault.close()  # what is in it was cut for another number of ranks, and is on disk
            self._saves.round_begins(info)
            self._watchdog.begin(view.round, [m.key for m in view.places], ranks.place, info.world_size)
            ranks.begin(view, start, self._waiting.take_seconds())
        self._resizing.on_view(view, info, lambda: ranks.training, new_round=new_round)

    def on_waiting(self, reason: str) -> None:
        if self.verdict is not None:
            return
        self.events.emit("waiting", f"waiting: {reason}", reason=reason)
        joining = self._view is None
        patience_s = self._job.join_timeout_s if joining else self._job.spare_wait_s
        self._waiting.begin(reason, patience_s, lambda newest: self._give_up_waiting(joining, patience_s, newest))

    def on_member(self, change: MemberChange) -> None:
        name = change.member.name
        if change.kind is Change.JOINED:
            self.events.emit("node_joined", member=name)
        elif change.kind in (Change.DEAD, Change.LEFT):
            fields = {"member": name, "reason": change.reason, "proof": change.proof}
            self.events.emit("member_dead", f"node {name} is gone: {change.reason}", **fields)
            if self._view and self._view.place_of(change.member.key) is not None:
                reason = f"node {name} is gone: {change.reason}"
                self._ranks.abort(self._view.round, reason, tell_others=False, said=True)
        else:
            if self._ranks.info is not None and not self._ranks.round_is_over:
                self._waiting.end()  # back before anything was given up
            self.events.emit(f"member_{change.kind.value}", member=name, reason=change.reason)

    def on_message(self, sender: MemberKey, kind: str, body: Any) -> None:
        with suppress(KeyError, TypeError, ValueError):  # of another version of this program
            if kind == "abort" and isinstance(body, list) and len(body) == 3:
                self._ranks.abort(int(body[0]), str(body[1]), cause=str(body[2]), tell_others=False)
            elif kind == completion.KIND:
                self._completion.heard(body)
            elif kind in ("hang_ask", "hang_answer", "hung"):
                self._watchdog.receive(sender, kind, body)
            elif kind in ("look", "seen"):
                self._site.heard(sender, kind, body)
            elif kind == "journal":
                self._journals.heard(body)
            elif kind == "save":
                self._saves.heard(sender, body)
            elif kind == DATA_ENDED:
                self._data_ends.heard(body)
            elif kind == "drain":
                self._draining.heard(sender, body)

    def _status(self) -> dict[str, Any]:
        num_warm = sum(worker.rank is None for worker in self._supervisor.workers.values())
        mine = ranks_status(self._supervisor.assigned(), num_warm, self._vault, self._weaknesses)
        return standing_of(self.node) | mine | {"waiting": self._waiting.reason}

    def answer(self, kind: str, body: Any) -> Any:
        """What an operator outside the run asks (p2prun status, p2prun stop)."""
        if kind == "status":
            return self._status()
        if kind == "chaos":
            refused = "this node was not started with p2prun --chaos"
            return self._chaos.answer(body) if self._chaos is not None else {"refused": refused}
        if kind == "stop" and isinstance(body, str):
            self.declare(EXIT_STOPPED, f"stopped by an operator: {' '.join(body.split())}")
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
        self._ranks.fill()

    def on_worker_message(self, worker: WorkerProcess, message: Message) -> None:
        kind = message.pop("t")
        handler = self._handlers.get(kind)
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
            code, why = worker.failure.code, worker.failure.sentence
            how = "cannot take part" if code == EXIT_CONFIG else "failed in user code"
            self.declare(code, f"rank {worker.rank} {how}: {why}")
        elif finished:
            self._ranks.finished()
            self._completion.tell()
        elif worker.failure is not None:
            self._ranks.died(worker, worker.failure.sentence)
        else:
            self._ranks.died(worker, cause)

    def on_template_ended(self, reason: str) -> None:
        if self.verdict is None:
            self.end(EXIT_REPLACE, f"{reason}: this node cannot make workers any more")

    def on_fork_failed(self, reason: str) -> None:
        self.events.emit("fork_failed", f"no new worker can be started at the moment: {reason}", reason=reason)

    def _injected(self, sentence: str, fields: Mapping[str, Any]) -> None:
        self.events.emit("chaos", sentence, **fields)

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

    @property
    def ended(self) -> bool:
        return self.verdict is not None

    @property
    def closing(self) -> bool:
        return self.ended or self._draining.active

    def declare(self, code: int, text: str) -> None:
        """End the run; before a bad end what can be saved is saved."""
        if self.verdict is not None or self._draining.active:
            return

        def declare() -> None:
            self.node.declare(Verdict(code, text, self.node.key))

        if code in (0, EXIT_STATE_LOST):
            declare()  # everything is on disk, or nothing is left to write
        else:
            self._draining.start(self._ranks.info, text, declare, training=self._ranks.training)

    def _listen_for_progress(self) -> None:
        """Every now and then, remember the newest step that any member has told of."""
        for record in self.node.members().values():
            self._ranks.state.known = max(self._ranks.state.known, Progress.of(record.progress))
        self.node.call_later(PROGRESS_INTERVAL_S, self._listen_for_progress)

    def _give_up_waiting(self, joining: bool, patience_s: float, reason: str) -> None:
        if joining:
            text = f"no view within {patience_s:g} s (--join-timeout): {reason}"
            self.end(EXIT_CONFIG, f"{text}; check --contacts ({', '.join(self._config.contacts)}) and --nnodes")
        else:
            text = f"no view within {patience_s:g} s of waiting (--spare-wait): {reason}"
            if self._config.num_nodes_min < self._config.num_nodes_max and not self._saves.configured:
                text += "; fewer nodes, as --nnodes allows, need Replicator(checkpoint=...)"
            info = self._ranks.info
            if info is None or not self._saves.configured:
                protected = max((worker.protected or 0 for worker in self._supervisor.assigned()), default=0)
                self.declare(EXIT_RETRY, text + lost_with_the_run(protected))
                return
            self._resizing.shrink(info, text, lambda: self.declare(EXIT_RETRY, text))
