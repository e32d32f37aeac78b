"""``torchrun --rdzv-backend=p2p``: rendezvous for elastic agents without a server.

Flows in: torchrun's parameters (`--nnodes`, `--rdzv-endpoint`, `--rdzv-conf`) and P2PSTATE_* variables. Flows out: a
RendezvousHandler, whose node lives in a process of its own (agent.py), and variables for the workers.
Invariants: no TCPStore is made here or, thanks to autoload.py, in workers; `num_nodes_waiting` answers from memory and
never raises; a rendezvous that is overtaken by a newer round hands out ranks that torchrun replaces at its next look.
Limits: torchrun tells its handler neither how many restarts it has left nor how its workers ended; the latter is read
from the exception under way when it says good-bye.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from rendezvous.autoload import ENV_AGENT, ENV_LAUNCHER, ENV_ROUND
from rendezvous.channel import Channel, Message
from rendezvous.companion import DRAIN_WITHIN_S
from rendezvous.config import Config
from rendezvous.local import LocalClient
from rendezvous.store import EpochStore, StoreChannel, StoreEnded, channel_to
from rendezvous.store_line import ENV_GLOO_ASKS_ONCE
from rendezvous.torchrun_settings import Settings, read_settings

BACKEND = "p2p"
_START_S = 120.0
_CLOSE_S = 3.0
_SECRETS = ("P2PSTATE_KEY", ENV_AGENT, ENV_ROUND, ENV_LAUNCHER)


def creator() -> Any:
    """What the entry point group `torchrun.handlers` asks for: the function that makes a handler."""
    return create


def create(params: RendezvousParameters) -> P2PHandler:
    """ValueError or OSError, saying which parameter is wrong."""
    return P2PHandler(read_settings(params))


@dataclass(frozen=True, slots=True)
class Round:
    """What the agent told about the newest view. `place` is None on a spare."""

    round: int
    place: int | None
    hosts: tuple[str, ...]


class AgentProcess:
    """The launcher's end of the node's agent: starts it, hears from it, ends with it."""

    def __init__(self, settings: Settings, *, rejoin: bool) -> None:
        self._changed = threading.Condition()
        self._socket = ""
        self._round: Round | None = None
        self._waiting = ""
        self._problem = ""
        self._evicted = ""
        self.verdict: tuple[int, str] | None = None
        ours, theirs = Channel.pair()
        environ = {name: value for name, value in os.environ.items() if name not in _SECRETS}
        command = [sys.executable, "-P", "-m", "rendezvous.agent", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True, env=environ
        )
        theirs.close()
        ours.set_blocking()
        self.client = LocalClient(ours, self._on_news, self._on_closed)
        config = {spec.name: getattr(settings.config, spec.name) for spec in dataclasses.fields(Config)}
        config |= {"contacts": list(settings.config.contacts), "role": str(settings.config.role), "rejoin": rejoin}
        config["labels"] = dict(settings.config.labels)
        if config["name"] == "unnamed":
            config["name"] = ""
        self.client.send("settings", config=config, binds=list(settings.binds), launcher_pid=os.getpid())

    @property
    def lost(self) -> str:
        """Why this agent is of no use any more; empty while it is."""
        if self._problem or self._evicted:
            return self._problem or self._evicted
        return "its agent process has ended" if self.client.closed else ""

    @property
    def socket(self) -> str:
        return self._socket

    @property
    def newest_round(self) -> int:
        return self._round.round if self._round else 0

    def wait_ready(self) -> None:
        """RendezvousConnectionError if the agent cannot do its work here."""
        with self._changed:
            ready = self._changed.wait_for(lambda: self._socket or self.lost, _START_S)
        if not ready or self.lost:
            problem = self.lost or f"it did not get ready within {_START_S:g} s"
            raise RendezvousConnectionError(f"this node's agent cannot start: {problem}")

    def wait_round(self, after: int, until_s: float, timeout_s: float) -> Round | None:
        """A newer round in which this node has a place; None if this agent is lost or there is a verdict.

        RendezvousTimeoutError if there is none by `until_s`; a spare waits as long as the run lasts, and `timeout_s`
        from when it is none any more.
        """
        with self._changed:
            while not self.lost and self.verdict is None:
                newest = self._round
                if newest is not None and newest.place is not None and newest.round > after:
                    return newest
                if newest is not None and newest.place is None:
                    until_s = time.monotonic() + timeout_s
                elif time.monotonic() >= until_s:
                    why = self._waiting or "no node answered"
                    raise RendezvousTimeoutError(f"no view within {timeout_s:g} s (--rdzv-conf timeout=S): {why}")
                self._changed.wait(0.5)
        return None

    def wait_end(self, of_round: int, timeout_s: float) -> None:
        """Until the run's verdict, a newer round, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.verdict or self.lost or self.newest_round > of_round, timeout_s)

    def close(self) -> None:
        """End the agent, which needs a moment to say good-bye to the others, and more where companions have something
        to save."""
        self.client.close()
        try:
            self._process.wait(DRAIN_WITHIN_S + _CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _on_news(self, message: Message) -> None:
        with self._changed:
            match message["t"]:
                case "ready":
                    self._socket = message["socket"]
                case "problem":
                    self._problem = message["text"]
                case "view":
                    self._round = Round(message["round"], message["place"], tuple(message["hosts"]))
                case "waiting":
                    self._waiting = message["reason"]
                case "evicted":
                    self._evicted = message["reason"]
                case "verdict":
                    self.verdict = message["code"], message["text"]
            self._changed.notify_all()

    def _on_closed(self) -> None:
        with self._changed:
            self._changed.notify_all()


class AgentStore(EpochStore):
    """The store that torchrun itself uses to deal out ranks.

    If the round ends in the middle of that, torchrun must not: it gets ranks as if all nodes were alike, starts its
    workers and replaces them at its next look, because `num_nodes_waiting` tells of the newer round.
    """

    _ROLES, _RANKS = "torchelastic/role_info/", "torchelastic/assigned_ranks/"

    def __init__(self, channel: StoreChannel, epoch: int, timeout: timedelta, num_nodes: int) -> None:
        super().__init__(channel, epoch, timeout)
        self._num_nodes = num_nodes
        self._own_role = b"{}"

    def _request(self, op: str, args: list[Any], timeout: timedelta | None = None) -> Any:
        key = args[0][0] if args and isinstance(args[0], list) and args[0] else (args or [""])[0]
        if op == "set" and key.startswith(self._ROLES):
            self._own_role = args[1]
        try:
            return super()._request(op, args, timeout)
        except StoreEnded:
            if op == "multi_get" and key.startswith(self._ROLES):
                return [self._own_role] * len(args[0])
            if op == "get" and key.startswith(self._RANKS):
                num_workers = int(json.loads(self._own_role).get("local_world_size", 1))
                first, size = int(key.removeprefix(self._RANKS)) * num_workers, self._num_nodes * num_workers
                return json.dumps([first, size, first, size]).encode()
            if op in ("set", "multi_set") and key.startswith((self._ROLES, self._RANKS)):
                return None
            raise


class P2PHandler(RendezvousHandler):
    """One torchrun's part in the run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._agent: AgentProcess | None = None
        self._round = 0  # the newest round that torchrun was given

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._settings.config.run_id

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Blocks until this node has a place in a new round. Exits with the run's verdict if there is one."""
        until_s = time.monotonic() + self._settings.join_timeout_s
        while True:
            agent = self._living_agent()
            reason = "its workers ended, or must start again"
            agent.client.send("next", after_round=self._round, reason=reason)
            found = agent.wait_round(self._round, until_s, self._settings.join_timeout_s)
            if agent.verdict is not None:
                self._exit(*agent.verdict)
            if found is None or found.place is None:
                continue
            self._round = found.round
            try:
                return self._enter(agent, found, found.place)
            except StoreEnded:
                continue  # overtaken by another round

    def _enter(self, agent: AgentProcess, found: Round, place: int) -> RendezvousInfo:
        store = AgentStore(
            channel_to(agent.socket),
            found.round,
            timedelta(seconds=self._settings.join_timeout_s),
            len(found.hosts),
        )
        # For scripts that open a store of their own: a port that is free on the first node's host.
        bootstrap = RendezvousStoreInfo.build(place, PrefixStore("bootstrap", store), found.hosts[place])
        os.environ[ENV_AGENT] = agent.socket
        os.environ[ENV_ROUND] = str(found.round)
        os.environ[ENV_LAUNCHER] = str(os.getpid())
        os.environ.setdefault(ENV_GLOO_ASKS_ONCE, "1")
        return RendezvousInfo(store, place, len(found.hosts), bootstrap)

    def _living_agent(self) -> AgentProcess:
        """This node's agent; a new incarnation if the old one ended or the others went on without it."""
        previous = self._agent
        if previous is not None and not previous.lost:
            return previous
        if previous is not None:
            print(f"rendezvous: {previous.lost}; this node joins anew", file=sys.stderr)
            previous.close()
            self._round = 0
        else:
            # torchrun does not say good-bye when a signal ends it; what its agent holds is saved before it is gone.
            atexit.register(self._torchrun_ends)
        agent = self._agent = AgentProcess(self._settings, rejoin=previous is not None)
        os.environ.pop("P2PSTATE_KEY", None)  # workers have no use for it, and user code may print its environment
        agent.wait_ready()
        return agent

    def _exit(self, code: int, text: str) -> None:
        print(f"rendezvous: the run has ended: {text}", file=sys.stderr)
        raise SystemExit(code)

    def is_closed(self) -> bool:
        return self._agent is not None and self._agent.verdict is not None

    def set_closed(self) -> None:
        """End the whole run."""
        if self._agent is not None:
            self._agent.client.send("close", reason="set_closed() was called")

    def num_nodes_waiting(self) -> int:
        agent = self._agent
        if agent is None or (agent.verdict is not None and agent.verdict[0] == 0):
            return 0
        return int(agent.newest_round > self._round or bool(agent.lost) or agent.verdict is not None)

    def _torchrun_ends(self) -> None:
        agent = self._agent
        if agent is not None:
            error = getattr(sys, "last_value", None)  # what ended the interpreter
            agent.client.send("leave", reason=_ended_with(error) if error is not None else "its torchrun has ended")
            agent.close()

    def shutdown(self) -> bool:
        """Called by torchrun at its end: say how it ended, and leave."""
        agent = self._agent
        if agent is None:
            return True
        error = sys.exc_info()[1]
        if agent.verdict is None and not agent.lost:
            if error is None:
                agent.client.send("done", round=self._round)
                agent.wait_end(self._round, self._settings.close_timeout_s)
            elif isinstance(error, ChildFailedError):
                agent.client.send("failed", reason="its workers failed and its restarts are used up")
            else:
                agent.client.send("leave", reason=_ended_with(error))
        agent.close()
        self._agent = None
        return True


def _ended_with(error: BaseException) -> str:
    return f"its torchrun ended with {type(error).__name__}: {error}"[:500]
