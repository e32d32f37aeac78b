"""The vault of a node whose workers torchrun starts: it lives in the node's agent process, which outlives them.

In: the agent of ``torchrun --rdzv-backend=p2p`` (through the entry point ``rendezvous.agents``), messages of workers
that use a :class:`Replicator`. Out: a place in the round for each of them, memory for their copies, and, after torchrun
has started all workers anew, the word that they resume from it.

Invariants: every round starts connected, and resumes as soon as any node has state; a rank's memory goes to a new
process only after the one before has ended; a run whose state is lost ends with that verdict.
Limits: the number of nodes is fixed (``--nnodes N``; more wait as spares), and all nodes start equally many workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from p2pstate.agent.events import EventLog
from p2pstate.agent.output import Writer
from p2pstate.agent.requests import Requests
from p2pstate.agent.rounds import Progress, assignment, decide_restart, progress_of, round_info
from p2pstate.agent.sentences import Sentences
from p2pstate.agent.weaknesses import Weaknesses
from p2pstate.errors import EXIT_STATE_LOST
from p2pstate.types import OLDEST, RoundInfo, Start
from p2pstate.vault import Vault
from rendezvous.channel import Channel, Message
from rendezvous.companion import Host
from rendezvous.processes import open_pidfd
from rendezvous.types import Verdict, View

__all__ = ["VaultKeeper", "create"]

ERROR_GRACE_S = 1.0  # an error without a death: torchrun sees a dead worker within a tenth of that


@dataclass(slots=True, eq=False)
class _Worker:
    """A process that asked for its place in ``round``; it has one once ``info`` is set."""

    channel: Channel
    pid: int
    pidfd: int
    round: int
    rank: int
    num_local: int
    info: RoundInfo | None = None


def create(host: Host) -> VaultKeeper:
    return VaultKeeper(host)


class VaultKeeper:
    """rendezvous.companion.Companion."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._node = host.node
        self._name = host.config.name
        self._writer = Writer()
        self._events = EventLog(self._name, os.environ.get("P2PSTATE_RUN_DIR"), self._writer, quiet=False)
        self._sentences = Sentences()
        self._vault = Vault(self._name)
        self._lineage: dict[int, list[int]] = {}
        self._requests = Requests[_Worker](
            host.node, lambda worker, message, fds: host.tell(worker.channel, message, fds), self._vault, self._lineage
        )
        self._workers: dict[Channel, _Worker] = {}
        self._ending: list[_Worker] = []  # their lines are closed, they are not known to be dead
        self._view: View | None = None
        self._known = Progress(0, -1)
        self._wants_round = ""
        self._start_over = ""
        self._weaknesses = Weaknesses(self._events)

    # -- rendezvous.companion.Companion

    def ballot(self) -> dict[str, Any]:
        return {
            "wants_round": self._wants_round,
            "start_over": self._start_over,
            "has_state": self._vault.has_state,
            **self._known.table(),
        }

    def decide(self, previous: View | None, ballots: Iterable[Mapping[str, Any]]) -> tuple[bool, dict[str, Any]]:
        return decide_restart(previous, ballots)

    def on_view(self, view: View) -> None:
        new_round = self._view is None or view.round != self._view.round
        self._view = view
        self._known = max(self._known, progress_of(view))
        if new_round:
            self._wants_round = self._start_over = ""
            if view.data.get("start") == Start.FRESH:
                self._lineage[view.round] = list(OLDEST)  # what there was before counts no more
            self._events.emit("round", epoch=view.epoch, round=view.round, reason=view.reason)
        elif self._wants_round:
            self._node.propose(self._wants_round)  # decided from ballots that did not know yet
        self._assign_places()

    def on_message(self, channel: Channel, message: Message) -> None:
        kind = message.pop("t")
        if kind == "worker":
            self._on_worker(channel, **message)
            return
        worker = self._workers[channel]
        handler = self._requests.handlers.get(kind) or getattr(self, f"_on_{kind}", None)
        if handler is not None:  # what only p2prun's agent needs to hear is passed over
            handler(worker, **message)

    def on_closed(self, channel: Channel) -> None:
        worker = self._workers.pop(channel, None)
        if worker is not None:
            self._ending.append(worker)

    def close(self) -> None:
        for worker in [*self._workers.values(), *self._ending]:
            os.close(worker.pidfd)
        self._vault.close()
        self._events.close()
        self._writer.close()

    # -- places

    def _on_worker(self, channel: Channel, pid: int, round: int, rank: int, num_local: int, world_size: int) -> None:
        """A worker asks for its place. It is answered when its round has come, and its predecessor has gone."""
        config = self._host.config
        problem = ""
        if config.num_nodes_min != config.num_nodes_max:
            problem = (
                f"--nnodes {config.num_nodes_min}:{config.num_nodes_max}: copies in memory fit one number of ranks "
                f"only; give --nnodes {config.num_nodes_max} (nodes beyond it wait as spares and step in)"
            )
        elif world_size != num_local * config.num_nodes_max:
            problem = (
                f"{world_size} ranks on {config.num_nodes_max} nodes, and {num_local} of them on {self._name}: every "
                "node has to start equally many (--nproc-per-node)"
            )
        pidfd = open_pidfd(pid)
        if pidfd is None:
            return
        if problem:
            self._host.tell(channel, {"t": "refused", "reason": problem})
            os.close(pidfd)
            return
        self._workers[channel] = _Worker(channel, pid, pidfd, round, rank, num_local)
        self._assign_places()

    def _assign_places(self) -> None:
        view = self._view
        place = view.place_of(self._node.key) if view is not None else None
        if view is None or place is None:
            return
        for worker in self._workers.values():
            if worker.info is None and worker.round == view.round and self._is_free(worker):
                self._assign(worker, view)

    def _assign(self, worker: _Worker, view: View) -> None:
        start = str(view.data.get("start", Start.FRESH))
        info = round_info(view, start, self._host.config.run_id, worker.num_local)
        if info.node_of(worker.rank) != self._name:
            raise ValueError(f"rank {worker.rank} is not of this node in round {view.round}")
        worker.info = info
        message = assignment(info, worker.rank, worker.num_local, fresh=True, aborted=False)
        message["seconds"] = self._events.ledger.of_rank(worker.rank)
        self._host.tell(worker.channel, message)
        fields = {"rank": worker.rank, "local_rank": message["local_rank"], "pid": worker.pid, "warm": False}
        self._events.emit("worker_started", **fields)
        self._weaknesses.on_round(info)

    def _is_free(self, worker: _Worker) -> bool:
        """Whether nobody else can write into this rank's memory any more. Ends who still could, and asks again then."""
        others = [w for w in [*self._workers.values(), *self._ending] if w.rank == worker.rank and w is not worker]
        for other in others:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(other.pidfd, signal.SIGKILL)
            if other not in self._ending:
                self._ending.append(other)
                self._workers.pop(other.channel, None)
            self._node.add_reader(other.pidfd, lambda other=other: self._ended(other))  # type: ignore[misc]
        return not others

    def _ended(self, worker: _Worker) -> None:
        self._node.remove_reader(worker.pidfd)
        os.close(worker.pidfd)
        self._ending.remove(worker)
        self._events.emit("worker_exited", rank=worker.rank, pid=worker.pid, cause="ended by torchrun", node_alive=True)
        self._assign_places()

    # -- what workers say (see worker/link.py and steps.py)

    def _on_copies(self, worker: _Worker, copies: int, lean: bool) -> None:
        self._weaknesses.on_copies(copies, lean)

    def _on_resumed(self, worker: _Worker, epoch: int, version: list[int]) -> None:
        self._lineage[epoch] = version

    def _on_error(self, worker: _Worker, epoch: int, text: str) -> None:
        """A worker cannot go on. Mostly a peer has died, and torchrun is about to start everybody anew."""

        def still_unexplained() -> None:
            if self._is_current(epoch):
                self._want_round(f"rank {worker.rank}: {text}")

        if self._is_current(epoch):
            self._node.call_later(ERROR_GRACE_S, still_unexplained)

    def _on_start_over(self, worker: _Worker, epoch: int, start: str, reason: str) -> None:
        if self._is_current(epoch):
            self._start_over = start if start in (Start.FRESH, Start.RESTART) else Start.FRESH
            self._want_round(reason)

    def _on_state_lost(self, worker: _Worker, epoch: int, reason: str) -> None:
        if self._is_current(epoch) and self._node.verdict is None:
            text = f"the training state is lost: {reason}"
            self._node.declare(Verdict(EXIT_STATE_LOST, text, self._node.key))

    def _on_step(self, worker: _Worker, step: int, **fields: Any) -> None:
        self._known = self._known.at(step)
        self._events.emit("step", rank=worker.rank, step=step, **fields)

    def _on_event(self, worker: _Worker, kind: str, **fields: Any) -> None:
        sentence = self._sentences.of(kind, worker.rank, fields)
        if sentence is not None:
            self._events.emit(kind, sentence, rank=worker.rank, **fields)

    def _is_current(self, epoch: int) -> bool:
        return self._view is not None and self._view.round == epoch

    def _want_round(self, reason: str) -> None:
        self._wants_round = f"{self._name}: {reason}"
        self._node.propose(self._wants_round)
