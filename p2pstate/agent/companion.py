"""The vault of a node whose workers torchrun starts: it lives in the node's agent process, which outlives them.

In: the agent of ``torchrun --rdzv-backend=p2p`` (through the entry point ``rendezvous.agents``), messages of workers
that use a :class:`Replicator`. Out: a place in the round for each of them, memory for their copies, the end of one that
hangs, and, after torchrun has started all workers anew, the word that they resume from it.

Invariants: every round starts connected, and resumes as soon as any node has state; a rank's memory goes to a new
process only after the one before has ended; a run whose state is lost ends with that verdict; before this node goes,
or the run ends badly, the newest whole version goes to disk (draining.py) where there are checkpoints.
Limits: the number of nodes is fixed (``--nnodes N``; more wait as spares), and all nodes start equally many workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from p2pstate.agent.attached import Attached, AttachedWorkers
from p2pstate.agent.data_ends import KIND as DATA_ENDED
from p2pstate.agent.data_ends import DataEnds
from p2pstate.agent.describing import environment
from p2pstate.agent.draining import Draining
from p2pstate.agent.events import EventLog
from p2pstate.agent.hang import DEFAULT_FLOOR_S
from p2pstate.agent.held import Phase
from p2pstate.agent.helpers import Interpreters
from p2pstate.agent.output import Writer
from p2pstate.agent.preloaded import Preloaded
from p2pstate.agent.requests import Requests
from p2pstate.agent.round_state import RoundState, tell_view
from p2pstate.agent.rounds import assignment, decide_restart, round_info
from p2pstate.agent.saves import Saves
from p2pstate.agent.serving import Site, read_token
from p2pstate.agent.status import ranks_status
from p2pstate.agent.watchdog import Watchdog
from p2pstate.agent.weaknesses import Weaknesses
from p2pstate.errors import EXIT_STATE_LOST
from p2pstate.observe.spans import IncidentSpans
from p2pstate.trace import map_page, new_page
from p2pstate.types import RoundInfo, Start
from p2pstate.vault import Vault
from rendezvous.channel import Channel, Message
from rendezvous.companion import Host
from rendezvous.standing import standing_of
from rendezvous.types import Change, MemberChange, MemberKey, Verdict, View

__all__ = ["Settings", "VaultKeeper", "create"]


@dataclass(frozen=True, slots=True)
class Settings:
    """``run_dir``: where events go, None for nowhere; ``hang_floor_s``: as ``p2prun --hang-floor``, 0 for nobody
    looks; ``http``, ``http_token``: as ``p2prun --http``; ``otel``: as ``p2prun --otel``."""

    run_dir: str | None = None
    hang_floor_s: float = DEFAULT_FLOOR_S
    http: str | None = None
    http_token: str | None = None
    otel: bool = False

    @staticmethod
    def from_env(env: Mapping[str, str]) -> Settings:
        """P2PSTATE_RUN_DIR, P2PSTATE_HANG_FLOOR, P2PSTATE_HTTP, P2PSTATE_HTTP_TOKEN_FILE and P2PSTATE_OTEL: torchrun
        has no options of ours. ValueError for what is none, OSError for a file that cannot be read."""
        text = env.get("P2PSTATE_HANG_FLOOR", str(DEFAULT_FLOOR_S))
        try:
            floor_s = float(text)
        except ValueError:
            floor_s = -1.0
        if not 0 <= floor_s < float("inf"):
            raise ValueError(f"P2PSTATE_HANG_FLOOR={text}: give seconds, or 0 to leave hung workers alone")
        token_file = env.get("P2PSTATE_HTTP_TOKEN_FILE")
        return Settings(
            run_dir=env.get("P2PSTATE_RUN_DIR"),
            hang_floor_s=floor_s,
            http=env.get("P2PSTATE_HTTP"),
            http_token=read_token(token_file) if token_file else None,
            otel=env.get("P2PSTATE_OTEL", "0") not in ("", "0"),
        )


def create(host: Host) -> VaultKeeper:
    """ValueError or OSError for settings that cannot be understood."""
    keeper = VaultKeeper(host, settings := Settings.from_env(os.environ))
    try:
        keeper.show(settings)
    except (OSError, ValueError) as error:
        host.say(f"nothing is shown of this node: {error}")  # the vault is there, and that is what counts
    return keeper


class VaultKeeper:
    """rendezvous.companion.Companion."""

    def __init__(self, host: Host, settings: Settings) -> None:
        self._host = host
        self._node = host.node
        self._name = host.config.name
        self._writer = Writer()
        self._events = EventLog(self._name, settings.run_dir, self._writer, quiet=False)
        self._vault = Vault(self._name)
        self._workers = AttachedWorkers(host, self._writer, self._on_ended)
        self._state = RoundState(
            host.node, self._events, want_round=self._want_round, state_lost=self._declare_state_lost
        )
        self._interpreters = Interpreters(host.node)
        self._preloaded = Preloaded(host.node, self._events, os.environ)
        self._saves = Saves(
            host.node, self._interpreters.helpers, self._workers.tell_ranks, self._vault, self._events, self._name
        )
        self._draining = Draining(host.node, self._vault, self._events, self._saves, self._state.lineage, self._name)
        self._info: RoundInfo | None = None  # of the newest round that workers of this node have come to
        self._requests = Requests[Attached](host.node, self._workers.tell, self._vault, self._state.lineage)
        self._data_ends = DataEnds(host.node, self._workers.tell_ranks)
        self._ranks: list[int] = []  # of this node
        self._weaknesses = Weaknesses(self._events)
        self._watchdog = Watchdog(
            host.node, self._workers, self._events, floor_s=settings.hang_floor_s, on_stuck=self._want_round
        )
        self._watchdog.start()
        self._waiting = ""  # why there is no view
        self._site = Site(host.node, self._events, self._whole_status)
        config = host.config
        known = {"run id": config.run_id, "launcher": "torchrun", "training nodes": config.num_nodes_max}
        self._events.keep_room_for_verdict()
        self._events.emit("agent_started", configuration=known, environment=environment())
        self._handlers: dict[str, Callable[..., None]] = {
            **self._requests.handlers,
            **self._data_ends.handlers,
            **self._state.handlers,
            **self._saves.handlers,
            **self._weaknesses.handlers,
            "save": lambda worker, version, final: self._saves.ready(worker.rank, version, final, self._ranks),
        }

    def show(self, settings: Settings) -> None:
        """Raises OSError or ValueError when the page cannot be served, or spans not be made."""
        if settings.otel:
            self._events.spans = IncidentSpans(self._host.config.run_id, self._name)
        if settings.http is not None:
            self._site.serve(settings.http, settings.http_token)
            self._site.start()

    # -- rendezvous.companion.Companion

    def ballot(self) -> dict[str, Any]:
        return self._state.ballot() | {"has_state": self._vault.has_state}

    def decide(self, previous: View | None, ballots: Iterable[Mapping[str, Any]]) -> tuple[bool, dict[str, Any]]:
        return decide_restart(previous, ballots)

    def on_view(self, view: View) -> None:
        before = self._state.view
        self._waiting = ""
        tell_view(self._events, view, str(view.data.get("start", Start.FRESH)), aloud=False)
        if self._state.on_view(view) and before is not None:
            self._watchdog.over(before.round)
        self._assign_places()

    def on_waiting(self, reason: str) -> None:
        self._waiting = reason
        self._events.emit("waiting", reason=reason)

    def on_member(self, change: MemberChange) -> None:
        if change.kind in (Change.DEAD, Change.LEFT):
            self._events.emit("member_dead", member=change.member.name, reason=change.reason, proof=change.proof)

    def on_peer(self, sender: MemberKey, kind: str, body: Any) -> None:
        with suppress(KeyError, TypeError, ValueError):  # of another version of this program
            if kind in ("hang_ask", "hang_answer", "hung"):
                self._watchdog.receive(sender, kind, body)
            elif kind in ("look", "seen"):
                self._site.heard(sender, kind, body)
            elif kind == "save":
                self._saves.heard(sender, body)
            elif kind == DATA_ENDED:
                self._data_ends.heard(body)
            elif kind == "drain":
                self._draining.heard(sender, body)

    def on_message(self, channel: Channel, message: Message) -> None:
        kind = message.pop("t")
        if kind == "worker":
            self._on_worker(channel, **message)
            return
        worker = self._workers.of_channel(channel)
        handler = self._handlers.get(kind)
        if handler is not None:  # what only p2prun's agent needs to hear is passed over
            handler(worker, **message)

    def on_closed(self, channel: Channel) -> None:
        self._workers.closed(channel)

    def status(self) -> dict[str, Any]:
        return ranks_status(self._workers.assigned(), 0, self._vault, self._weaknesses)

    def _whole_status(self) -> dict[str, Any]:
        return standing_of(self._node) | {"waiting": self._waiting} | self.status()

    def drain(self, reason: str, then: Callable[[], None]) -> None:
        holders = [self._workers.of_rank(rank) for rank in self._ranks]
        current = self._info is not None and self._state.is_current(self._info.epoch)
        training = current and all(worker is not None and worker.phase is Phase.LOOP for worker in holders)
        self._draining.start(self._info, reason, then, training=training)

    def close(self) -> None:
        self._interpreters.close()
        self._preloaded.close()
        verdict = self._node.verdict
        if verdict is not None:
            self._events.emit("verdict", code=verdict.code, text=verdict.text, scope="run")
        self._site.close()
        self._workers.close()
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
        if problem:
            self._host.tell(channel, {"t": "refused", "reason": problem})
            return
        self._workers.add(channel, pid, round, rank, num_local)
        self._assign_places()

    def _assign_places(self) -> None:
        view = self._state.view
        place = view.place_of(self._node.key) if view is not None else None
        if view is None or place is None:
            return
        for worker in self._workers.waiting(view.round):
            if self._workers.free(worker.asks, worker):
                self._assign(worker, view, place)

    def _assign(self, worker: Attached, view: View, place: int) -> None:
        start = str(view.data.get("start", Start.FRESH))
        info = round_info(view, start, self._host.config.run_id, worker.num_local)
        if info.node_of(worker.asks) != self._name:
            raise ValueError(f"rank {worker.asks} is not of this node in round {view.round}")
        if not any(other.epoch == view.round for other in self._workers.assigned()):
            self._begin(view, info, place)
        worker.rank = worker.asks
        message = assignment(info, worker.rank, worker.num_local, fresh=True, aborted=False)
        message["seconds"] = self._events.ledger.of_rank(worker.rank)
        try:
            page = new_page()
        except OSError:  # out of descriptors: nobody will notice if this one hangs
            self._workers.tell(worker, message)
        else:
            worker.page = map_page(page)
            self._workers.tell(worker, message, (page,))
            os.close(page)
        fields = {"rank": worker.rank, "local_rank": message["local_rank"], "pid": worker.pid, "warm": False}
        self._events.emit("worker_started", **fields)

    def _begin(self, view: View, info: RoundInfo, place: int) -> None:
        """The first worker of this node has come to the round: only now is it known how many there are."""
        self._watchdog.begin(view.round, [member.key for member in view.places], place, info.world_size)
        self._preloaded.start(self._host.address)
        self._weaknesses.on_round(info)
        self._saves.round_begins(info)
        self._info = info
        self._ranks = [each.rank for each in info.workers if each.node == self._name]

    def _on_ended(self, worker: Attached) -> None:
        if worker.rank is not None:
            cause = f"it hung: {worker.hung}" if worker.hung else "ended by torchrun or of its own"
            self._events.emit("worker_exited", rank=worker.rank, pid=worker.pid, cause=cause, node_alive=True)
        self._assign_places()

    # -- troubles

    def _want_round(self, reason: str) -> None:
        self._state.wants_round = f"{self._name}: {reason}"
        self._node.propose(self._state.wants_round)

    def _declare_state_lost(self, text: str) -> None:
        if self._node.verdict is None:
            self._node.declare(Verdict(EXIT_STATE_LOST, text, self._node.key))
