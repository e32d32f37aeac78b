"""The process that holds a node's membership while torchrun's workers come and go.

Flows in: one message of settings from the launcher (over the descriptor named in argv), its wishes, store requests of
the workers. Flows out: views, verdicts and waiting reasons for the launcher, sentences on standard error.
Invariants: launcher and agent share their fate: when the launcher ends, its workers are ended and the node leaves; the
run ends only by a verdict (every place of the round done, or failed with too few nodes left), never because one
member left; before this node leaves or the run ends badly, companions have saved what they hold. SIGTERM and SIGINT,
which schedulers send to every process of a node, are the launcher's to answer.
Limits: workers are found by a variable in their environment, so one that clears it and outlives its parent is not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rendezvous import completion
from rendezvous.autoload import ENV_AGENT
from rendezvous.channel import Channel, ChannelClosed, Message
from rendezvous.companion import load_companions
from rendezvous.completion import Completion
from rendezvous.config import Config
from rendezvous.discovery import local_binds
from rendezvous.local import LocalServer
from rendezvous.node import Node
from rendezvous.processes import kill_marked, open_pidfd
from rendezvous.standing import standing_of
from rendezvous.store_line import store_reply_message
from rendezvous.types import (
    EXIT_STOPPED,
    Change,
    Member,
    MemberChange,
    MemberKey,
    RendezvousError,
    Role,
    StoreReply,
    Verdict,
    View,
    split_address,
)

_LINGER_S = 0.7  # for the last messages, and for the votes that let the others go on without this node
_MAX_SLOTS = 64


class NodeAgent:
    """One node as torchrun sees it. rendezvous.types.Application and rendezvous.companion.Host."""

    def __init__(self, config: Config, launcher: Channel, launcher_pid: int) -> None:
        self.config = config
        self._view: View | None = None
        self._place: int | None = None
        self._left_round = 0  # the round whose workers have ended here, and why
        self._left_reason = ""
        self._done_round = 0  # in which this node's workers have all finished
        self._waiting = ""  # why there is no view
        self._ending = False
        self._drained = False  # nothing is left to be saved any more
        self._evicted = False
        self.node = Node(config, self)
        self._completion = Completion(self.node, lambda round_: round_ == self._done_round, self._finished)
        self._server = LocalServer(self.node, self._on_local, self._on_local_closed)
        self.address = self._server.address
        self._launcher: Channel | None = launcher
        self._server.adopt(launcher)
        self._pidfd = open_pidfd(launcher_pid)
        if self._pidfd is None:
            raise RendezvousError("the launcher has ended already")
        self.node.add_reader(self._pidfd, self._launcher_ended)
        self._companions = load_companions(self)
        self.say(f"listens at {self.node.member.address}; contacts: {', '.join(config.contacts) or 'none'}")
        self._tell("ready", name=config.name, address=self.node.member.address, socket=self._server.address)

    def run(self) -> None:
        """Until the launcher has ended or this node is out."""
        try:
            self.node.run()
        finally:
            self._server.close()
            self.node.close()
            for companion in self._companions:
                companion.close()

    # -- rendezvous.companion.Host

    def tell(self, channel: Channel, message: Message, fds: tuple[int, ...] = ()) -> None:
        self._server.tell(channel, message, fds)

    def say(self, sentence: str) -> None:
        print(f"[{self.config.name}] rendezvous: {sentence}", file=sys.stderr, flush=True)

    # -- rendezvous.types.Application

    def ballot(self) -> dict[str, Any]:
        ballot: dict[str, Any] = {"left_round": self._left_round}
        for companion in self._companions:
            ballot |= companion.ballot()
        return ballot

    def decide(
        self, previous: View | None, places: Sequence[Member], ballots: Mapping[MemberKey, dict[str, Any]]
    ) -> tuple[bool, dict[str, Any]]:
        wanted, data = has_left(previous, ballots.values()), dict[str, Any]()
        for companion in self._companions:
            also_wanted, more = companion.decide(previous, ballots.values())
            wanted, data = wanted or also_wanted, data | more
        return wanted, data

    def on_view(self, view: View) -> None:
        self._view, self._place, self._waiting = view, view.place_of(self.node.key), ""
        groups = {"training on": view.places, "spare": view.spares, "witness": view.witnesses}
        parts = [f"{text} {', '.join(member.name for member in group)}" for text, group in groups.items() if group]
        self.say(f"view {view.epoch} (round {view.round}): {'; '.join(parts)} ({view.reason})")
        hosts = [split_address(member.address)[0] for member in view.places]
        self._tell("view", round=view.round, place=self._place, hosts=hosts, reason=view.reason)
        if view.round == self._left_round:
            self.node.propose(self._left_reason)  # decided from ballots that did not know yet
        for companion in self._companions:
            companion.on_view(view)

    def on_waiting(self, reason: str) -> None:
        self._waiting = reason
        self.say(f"waiting: {reason}")
        self._tell("waiting", reason=reason)
        for companion in self._companions:
            companion.on_waiting(reason)

    def on_member(self, change: MemberChange) -> None:
        if change.kind in (Change.DEAD, Change.LEFT):
            self.say(f"node {change.member.name} is gone: {change.reason}")
        for companion in self._companions:
            companion.on_member(change)

    def on_message(self, sender: MemberKey, kind: str, body: Any) -> None:
        if kind == completion.KIND:
            self._completion.heard(body)
        else:
            for companion in self._companions:
                companion.on_peer(sender, kind, body)

    def answer(self, kind: str, body: Any) -> Any:
        """What an operator outside the run asks (p2prun status, p2prun stop)."""
        if kind == "status":
            status = standing_of(self.node) | {"waiting": self._waiting}
            for companion in self._companions:
                status |= companion.status()
            return status
        if kind == "stop" and isinstance(body, str):
            self._fail(EXIT_STOPPED, f"stopped by an operator: {' '.join(body.split())}")
            return {"taken": True}
        return None

    def on_verdict(self, verdict: Verdict) -> None:
        self.say(f"the run has ended: {verdict.text}")
        self._tell("verdict", code=verdict.code, text=verdict.text)
        self._stop_if_over()

    def on_evicted(self, reason: str) -> None:
        self._evicted = True
        self.say(reason)
        self._tell("evicted", reason=reason)

    # -- what the processes of this node say

    def _on_local(self, channel: Channel, message: Message, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if message["t"] == "store":
            del message["t"]
            self._on_store(channel, **message)
        elif channel is self._launcher:
            getattr(self, f"_on_{message.pop('t')}")(**message)
        else:
            for companion in self._companions:
                companion.on_message(channel, message)

    def _on_store(self, channel: Channel, id: int, epoch: int, op: str, args: list[Any], deadline_s: float) -> None:
        def reply(answer: StoreReply) -> None:
            self._server.tell(channel, store_reply_message(id, answer))

        self.node.store_request(epoch, op, args, deadline_s, reply)

    def _on_next(self, after_round: int, reason: str) -> None:
        """The launcher has no workers of `after_round` (or an older round) any more and wants a newer one."""
        if self._view is None or self._view.round > after_round or after_round == 0:
            return
        self._left_round, self._left_reason = after_round, f"{self.config.name}: {reason}"
        self.node.propose(self._left_reason)

    def _on_done(self, round: int) -> None:
        """Every worker of this node has finished its script in `round`."""
        self._done_round = round
        self._completion.tell()

    def _on_failed(self, reason: str) -> None:
        """The launcher gives up. The job has failed for good if it cannot go on without this node."""
        reason = f"{self.config.name}: {reason}"
        me = self.node.key
        others = [r for key, r in self.node.members().items() if key != me and r.live and r.member.role is Role.NODE]
        if len(others) < self.config.num_nodes_min:
            needed = f"{self.config.num_nodes_min} training nodes are needed and {len(others)} would be left"
            self._fail(1, f"{reason}; {needed}")
        else:
            self._leave(reason)

    def _on_leave(self, reason: str) -> None:
        self._leave(reason)

    def _on_close(self, reason: str) -> None:
        self._fail(1, f"{self.config.name}: {reason}")

    def _on_local_closed(self, channel: Channel) -> None:
        if channel is self._launcher:
            self._launcher_ended()
        else:
            for companion in self._companions:
                companion.on_closed(channel)

    def _launcher_ended(self) -> None:
        if self._pidfd is not None:
            self.node.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._launcher = None
        num_killed = kill_marked(ENV_AGENT, self._server.address)
        if num_killed:
            self.say(f"torchrun has ended: {num_killed} processes that it left behind were ended")
        if self.node.verdict is None:
            self._leave("its torchrun has ended")
        self._stop_if_over()

    # -- the end

    def _finished(self) -> None:
        self.node.declare(Verdict(0, "finished: the workers of every node ended well", self.node.key))

    def _leave(self, reason: str) -> None:
        self._drain(reason, lambda: self.node.leave(reason))

    def _fail(self, code: int, reason: str) -> None:
        self._drain(reason, lambda: self.node.declare(Verdict(code, reason, self.node.key)))

    def _drain(self, reason: str, end: Callable[[], None]) -> None:
        """Call `end` once companions have saved what they hold. Only the first call counts."""
        if self._ending:
            return
        self._ending = True
        # A node that is counted out has nothing that is still the run's.
        remaining = [] if self._evicted else list(self._companions)

        def go_on() -> None:
            if remaining:
                remaining.pop().drain(reason, go_on)
                return
            self._drained = True
            end()
            self._stop_if_over()

        go_on()

    def _stop_if_over(self) -> None:
        if self._launcher is None and (self._drained or not self._ending):
            self._stop_soon()

    def _stop_soon(self) -> None:
        self.node.call_later(_LINGER_S, self.node.stop)

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._launcher is not None:
            self._server.tell(self._launcher, {"t": kind, **fields})


def has_left(previous: View | None, ballots: Iterable[Mapping[str, Any]]) -> bool:
    """Whether somebody's workers of this round have ended: then a new one begins."""
    return previous is not None and previous.round in {ballot.get("left_round") for ballot in ballots}


def open_node(config: Config, binds: Sequence[str], launcher: Channel, launcher_pid: int) -> NodeAgent:
    """An agent at the first of `binds` that can be listened at. RendezvousError or ValueError if none can."""
    error: Exception | None = None
    for bind in binds:
        try:
            return NodeAgent(dataclasses.replace(config, bind=bind), launcher, launcher_pid)
        except RendezvousError as failure:
            error = failure
    assert error is not None
    raise error


def claim_name(run_id: str, host: str) -> tuple[str, socket.socket]:
    """A name that no other live agent of this run has on this host, the same after a restart; and what holds it."""
    digest = hashlib.blake2b(f"{run_id}\0{host}".encode(), digest_size=16).hexdigest()
    for slot in range(_MAX_SLOTS):
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            holder.bind(f"\0p2pstate-name-{digest}-{slot}")
        except OSError:
            holder.close()
            continue
        return (host if slot == 0 else f"{host}.{slot}"), holder
    raise RendezvousError(f"{_MAX_SLOTS} agents of run {run_id!r} live on {host} already")


def main() -> int:
    """``python -m rendezvous.agent FD``: settings come over the descriptor, never on the command line."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # also in what companions start
    launcher = Channel(socket.socket(fileno=int(sys.argv[1])), blocking=False)
    try:
        settings = _receive_settings(launcher)
        fields = {**settings["config"], "contacts": tuple(settings["config"]["contacts"])}
        holder = None
        if not fields["name"]:
            fields["name"], holder = claim_name(fields["run_id"], socket.gethostname())
        config = Config(**{**fields, "role": Role(fields["role"])})
        binds = settings["binds"] or local_binds(config.contacts)
        agent = open_node(config, binds, launcher, settings["launcher_pid"])
    except (RendezvousError, ValueError, OSError) as error:
        _report(launcher, str(error))
        return 1
    except ChannelClosed:
        return 1
    with holder or socket.socket(socket.AF_UNIX):
        agent.run()
    return 0


def _receive_settings(launcher: Channel) -> Message:
    while True:
        readable, _, _ = select.select([launcher.fileno()], [], [], 60.0)
        if not readable:
            raise RendezvousError("the launcher sent no settings within 60 s")
        for message, _ in launcher.receive():
            return message


def _report(launcher: Channel, problem: str) -> None:
    try:
        launcher.send({"t": "problem", "text": problem})
        launcher.flush()
    except ChannelClosed:
        print(f"rendezvous: {problem}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
