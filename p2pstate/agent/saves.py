"""Saves to disk, as the node's agent runs them: sessions and messages.

In: what workers say (where checkpoints go, which version may be written), messages of other agents, the vault's
records. Out: orders to the writer process, events, the word to the workers that a save is over.

Invariants: this file never touches storage; one session at a time; a session that fails costs its checkpoint and
nothing else; a writer that is still busy when its session ends is killed, and the next session gets a new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from p2pstate.agent.events import EventLog
from p2pstate.agent.helpers import Helpers
from p2pstate.agent.save_writer import SaveWriter
from p2pstate.durable.session import REPEAT_S, Action, Begin, End, Publish, Session, State, Tell, Write, limit_s
from p2pstate.sizes import size_text
from p2pstate.types import RoundInfo, Version
from p2pstate.vault import Vault
from rendezvous.channel import Message
from rendezvous.node import Node
from rendezvous.types import MemberKey

__all__ = ["Saves"]

MAX_EARLY = 256
MAX_FAILED = 64
KIND = "save"


@dataclass(frozen=True, slots=True)
class _Target:
    """Where checkpoints go: an absolute path, or a URL; ``stage``: see durable/remote.py."""

    path: str
    stage: str
    keep: int


@dataclass(slots=True)
class _Waiting:
    """Ranks of this node that have said that a version may be written."""

    version: Version
    ranks: set[int] = field(default_factory=set)


class Saves:
    """Everything on the node's thread."""

    def __init__(
        self,
        node: Node,
        helpers: Helpers,
        tell_ranks: Callable[[Message], None],
        vault: Vault,
        events: EventLog,
        name: str,
    ) -> None:
        """``tell_ranks`` sends to every worker of this node that has a rank."""
        self._node, self._tell_ranks, self._vault = node, tell_ranks, vault
        self._events, self._name = events, name
        self._target: _Target | None = None
        self._info: RoundInfo | None = None
        self._session: Session | None = None
        self._reason = ""
        self._ready: _Waiting | None = None
        self._early: list[tuple[str, Mapping[str, Any]]] = []  # messages of a session that has not begun here
        self._writer = SaveWriter(helpers, events, self._writer_ended)
        self._num_failed = 0
        self._num_failed_in_a_row = 0
        self._longest_s: float | None = None  # of all saves that came to their end
        self._told: Version | None = None  # the newest save whose end was reported here
        self._told_late: Version | None = None
        self._told_problem = ""
        self._retained: Callable[[str], None] | None = None  # while older saves are deleted: what ends that
        self._damaged: set[str] = set()  # names of saves
        self._first_name = ""  # of all saves of this run that were begun here
        self._newest_name = ""  # of all saves of this run that this node knows of
        self._failed: list[str] = []  # saves that were begun here since the newest that came to its end
        self._on_end: Callable[[Version, str, str], None] | None = None
        self._outlives_rounds = False
        self.began_at = 0.0  # the newest session, monotonic seconds
        self.on_disk: Version | None = None  # the newest version of this run that is
        self.handlers: dict[str, Callable[..., None]] = {
            "checkpoint": lambda worker, **target: self.configure(**target),
            "damaged_saves": lambda worker, names: self.distrust(names),
            "save_late": lambda worker, version, seconds: self.late(version, seconds),
        }

    # -- what happens around

    def round_begins(self, info: RoundInfo) -> None:
        """What was under way belongs to a round that is over: its slots are no longer set aside. Only that older saves
        are deleted goes on."""
        self._ready = None
        if self.busy and self._outlives_rounds:
            self._outlives_rounds = False
        elif self._retained is None:
            self._fail(f"the round ended: {info.reason}")
        self._info = info

    def configure(self, path: str, stage: str, keep: int) -> None:
        """A worker says where checkpoints go."""
        self._target = _Target(path, stage, keep)
        self._start_writer()

    def distrust(self, names: Iterable[str]) -> None:
        """Ranks have read these saves, and their bytes are wrong: none of them is one of those to keep."""
        self._damaged.update(names)

    def ready(self, rank: int | None, version: list[int], final: bool, ranks: Iterable[int]) -> None:
        """A rank says that ``version`` is protected and its slots are set aside; ``ranks``: all of this node."""
        found = Version(*version)
        if rank is None or self._info is None or found.epoch != self._info.epoch:
            return
        if self._ready is None or self._ready.version != found:
            self._ready = _Waiting(found)
        self._ready.ranks.add(rank)
        if self._ready.ranks >= set(ranks):
            self._ready = None
            self._start(found, "the end of training" if final else "due")

    def late(self, version: list[int], seconds: float) -> None:
        """A rank of this node says that the next save is due before this one has ended."""
        found = Version(*version)
        if found == self._told_late:
            return
        self._told_late = found
        sentence = f"step {found.step} is still being written after {seconds:.1f} s: the save due now is left out"
        self._events.emit("save_late", sentence, step=found.step, epoch=found.epoch, seconds=seconds)

    def heard(self, sender: MemberKey, body: Any) -> None:
        """A message of another agent about a save."""
        record = self._node.members().get(sender)
        if record is None or not isinstance(body, dict):
            return
        try:
            version = Version(*body["version"])
            if self._session is not None and self._session.version == version:
                self._do(self._session.heard(record.member.name, body))
            elif body["op"] in ("ended", "failed"):
                self._report(version, str(body.get("error", "")), str(body.get("name", "")), 0)
            else:
                self._early = [*self._early, (record.member.name, body)][-MAX_EARLY:]
        except (KeyError, TypeError, ValueError) as error:
            self._events.emit("bad_message", "", member=record.member.name, error=str(error))

    # -- for the end of the run (see draining.py)

    @property
    def configured(self) -> bool:
        return self._target is not None

    @property
    def busy(self) -> bool:
        return self._session is not None and self._session.state is not State.ENDED

    def is_saving(self, version: Version) -> bool:
        return self._session is not None and self._session.version == version and self.busy

    def is_gathering(self, version: Version) -> bool:
        return self.is_saving(version) and self._session is not None and self._session.state is State.GATHERING

    def ask_training(self, on_end: Callable[[Version, str, str], None]) -> None:
        """Ask this node's ranks for a save as soon as possible; ``on_end`` is told of every save that ends."""
        self._on_end = on_end
        self._tell_ranks({"t": "save_now"})

    # -- one session

    def start(
        self,
        version: Version,
        reason: str,
        lead: str,
        home: Mapping[int, str],
        places: Mapping[str, int],
        limit_s: float,
        on_end: Callable[[Version, str, str], None] | None = None,
    ) -> None:
        """Take part in a save, whose slots must stand still (whether they did is checked).

        ``on_end`` (version, error, name) is called when it ends; with it, the next round does not end it.
        """
        if on_end is not None:
            self._on_end = None  # of a session that ends here without being asked for any more
        if self._session is not None and self._session.version == version:
            self._stop_retaining("another node saves this version")
            self._session = None  # another node leads it
            self._writer.drop_order()
        else:
            self._fail("another one begins")
        self._reason, self.began_at = reason, time.monotonic()
        if on_end is not None:
            self._on_end, self._outlives_rounds = on_end, True
        records = [record for record in self._vault.records() if record.version == version]
        session = self._session = Session(version, lead, self._name, home, places, records, time.monotonic() + limit_s)
        self._do(session.start())
        early, self._early = self._early, []
        for sender, body in early:
            if self._session is session and Version(*body["version"]) == version:
                self._do(session.heard(sender, body))
        self._node.call_later(REPEAT_S, lambda: self._repeat(session))

    def _start(self, version: Version, reason: str) -> None:
        assert self._info is not None
        home = {worker.rank: worker.node for worker in self._info.workers}
        places = {node: place for place, node in enumerate(dict.fromkeys(home.values()))}
        self.start(
            version, reason, next(iter(places)), home, places, limit_s(self._longest_s, self._num_failed_in_a_row)
        )

    def _repeat(self, session: Session) -> None:
        if self._session is session and session.state is not State.ENDED:
            self._do(session.repeat(time.monotonic()))
            self._node.call_later(REPEAT_S, lambda: self._repeat(session))

    def _fail(self, error: str) -> None:
        self._stop_retaining(error)
        if self._session is not None:
            self._do(self._session.failed(error))

    def _stop_retaining(self, error: str) -> None:
        if self._retained is not None:
            self._retained(f"older ones could not be deleted: {error}")

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Tell():
                    self._tell(action)
                case Begin():
                    assert self._session is not None
                    self._command("begin", self._begun, step=self._step, failed=self._failed, newest=self._newest_name)
                case Write():
                    self._write(action)
                case Publish():
                    self._publish(action)
                case End():
                    self._ended(action)

    def _tell(self, action: Tell) -> None:
        if not action.to:
            self._node.broadcast(KIND, action.body)
            return
        for key, record in list(self._node.members().items()):
            if record.live and record.member.name == action.to:
                self._node.send(key, KIND, action.body)

    def _ended(self, action: End) -> None:
        session = self._session
        assert session is not None
        self._writer.drop_order()
        self._report(session.version, action.error, action.name, action.num_bytes)
        if session.leads and not action.error:
            self._retain(session, action)
        else:
            self._over(session, action)

    def _retain(self, session: Session, action: End) -> None:
        """Older saves go, before this node's ranks, or whoever waits for the end, go on: the node may end with them."""
        assert self._info is not None
        assert self._target is not None

        def over(problem: str) -> None:
            if self._retained is not over:
                return
            self._retained = None
            self._writer.drop_order()
            told, self._told_problem = self._told_problem, problem
            if problem and problem != told:
                self._events.emit("retention_failed", problem, problem=problem)
            self._over(session, action)

        def reply(message: Message) -> None:
            error = message["error"]
            over(f"older ones could not be deleted: {error}" if error else message["problem"])

        self._retained = over
        where = [self._target.path, self._target.stage]
        run = [self._info.run_id, self._info.nonce]
        more = {"keep": self._target.keep, "first": self._first_name, "damaged": sorted(self._damaged)}
        self._writer.order("retain", where, reply, run=run, **more)
        left_s = max(0.0, session.deadline - time.monotonic())
        self._node.call_later(left_s, lambda: over("older ones could not be deleted: it took too long"))

    def _over(self, session: Session, action: End) -> None:
        message = {"t": "saved", "version": list(session.version), "error": action.error, "name": action.name}
        self._tell_ranks(message)
        self._start_writer()
        if self._on_end is not None:
            self._on_end(session.version, action.error, action.name)

    def _report(self, version: Version, error: str, name: str, num_bytes: int) -> None:
        """Once per save, on every member: those without ranks hear of it as well."""
        if version == self._told:
            return
        self._told = version
        if error:
            self._num_failed += 1
            self._num_failed_in_a_row += 1
            sentence = f"step {version.step} was not written to disk: {error}; training goes on, the next save is tried"
            self._events.emit(
                "save_failed",
                sentence,
                step=version.step,
                epoch=version.epoch,
                error=error,
                num_failed=self._num_failed,
            )
            return
        self.on_disk = version
        self._newest_name = name
        self._failed = []
        self._num_failed_in_a_row = 0
        took_part = self._session is not None and self._session.version == version
        seconds = None
        if took_part:
            seconds = time.monotonic() - self.began_at
            self._longest_s = max(self._longest_s or 0.0, seconds)
        sentence = ""
        if took_part and self._session is not None and self._session.leads:
            sentence = f"step {version.step} is on disk ({name}, {size_text(num_bytes)} in {seconds:.2f} s)"
        self._events.emit(
            "saved",
            sentence,
            step=version.step,
            epoch=version.epoch,
            name=name,
            bytes=num_bytes,
            seconds=seconds,
            reason=self._reason,
        )

    # -- the writer

    @property
    def _step(self) -> int:
        return self._session.version.step if self._session is not None else -1

    def _begun(self, reply: Message) -> list[Action]:
        assert self._session is not None
        self._first_name = self._first_name or reply["name"]
        self._newest_name = reply["name"]
        self._failed = [*self._failed, reply["name"]][-MAX_FAILED:]
        return self._session.begun(reply["name"])

    def _write(self, action: Write) -> None:
        session = self._session
        assert session is not None
        if not self._start_writer():
            return
        for slot in sorted({share.slot for share in action.shares}):
            fd = self._vault.open(slot)
            if fd is None:
                self._fail(f"slot {slot} is not in the vault of {self._name} any more")
                return
            self._writer.give_slot(slot, fd)
        self._command(
            "write",
            lambda reply: session.written(reply["digest"]),
            name=action.name,
            place=session.places[self._name],
            node=self._name,
            version=list(session.version),
            num_ranks=len(session.home),
            shares=[share.pack() for share in action.shares],
        )

    def _publish(self, action: Publish) -> None:
        session, info = self._session, self._info
        assert session is not None
        assert info is not None

        self._command(
            "publish",
            lambda reply: session.published(reply["num_bytes"]),
            name=action.name,
            digests=[[place, digest] for place, digest in sorted(action.digests.items())],
            run=[info.run_id, info.nonce],
            version=list(session.version),
            world_size=len(session.home),
            reason=self._reason,
        )

    def _command(self, kind: str, then: Callable[[Message], list[Action]], **fields: Any) -> None:
        """Give the writer an order; ``then`` turns its reply into actions."""
        session = self._session
        if self._target is None:
            self._fail("no worker has said where checkpoints go")
            return
        if not self._start_writer():
            return

        def reply(message: Message) -> None:
            if self._session is not session or session is None:
                return
            self._do(session.failed(message["error"]) if message["error"] else then(message))

        self._writer.order(kind, [self._target.path, self._target.stage], reply, **fields)

    def _start_writer(self) -> bool:
        """Have a writer; False: none can be started now, and the session that needs it has failed."""
        if self._writer.start():
            return True
        self._fail("no process to write it can be started on this node at the moment")
        return False

    def _writer_ended(self, cause: str) -> None:
        self._fail(f"the process that writes on {self._name} ended: {cause}")
        if self._target is not None:
            self._start_writer()
