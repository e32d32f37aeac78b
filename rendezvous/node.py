"""The loop: receive -> step -> effects.

Flows in: frames, descriptors, timers, calls of the application. Flows out: calls of the application, frames.
Invariants: one thread owns the node, its sockets and the core; every wait has a deadline; an exception of a callback
leaves `run`. Only `call_soon_threadsafe` may be called from other threads.
Limits: application messages and store calls are lost with a connection; store calls are repeated, messages are not.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rendezvous import effects as out
from rendezvous import events
from rendezvous.config import Config, split_endpoint
from rendezvous.core import Core
from rendezvous.discovery import ContactReader, is_literal, publish, read_contacts
from rendezvous.fence_command import FenceCommand
from rendezvous.membership import Record
from rendezvous.messages import Answer, AppMessage, Message, Status, StoreCall, StoreResult
from rendezvous.store_router import StoreRouter
from rendezvous.transport import Incoming, Transport
from rendezvous.types import Application, Change, Member, MemberKey, StoreReply, Verdict, View
from rendezvous.wire import MAX_MESSAGE_BYTES, Encoder, Envelope, WireError, decode, pack
from rendezvous.zmq_transport import ZmqTransport

CLOSE_LINGER_S = 0.5


class Timer:
    """A call to come. `cancel` may be called at any time, also twice."""

    __slots__ = ("callback", "due_s")

    def __init__(self, due_s: float, callback: Callable[[], None]) -> None:
        self.due_s = due_s
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


@dataclass(slots=True)
class Counters:
    """Messages that changed nothing, by cause."""

    malformed: int = 0
    dropped: int = 0


class _Oracle:
    """The application as the core sees it."""

    def __init__(self, application: Application) -> None:
        self.ballot = application.ballot
        self.decide = application.decide
        self.num_places: Callable[[View, Mapping[MemberKey, dict[str, Any]]], tuple[int, int] | None]
        self.num_places = getattr(application, "num_places", lambda previous, ballots: None)
        self._progress: Callable[[], Mapping[str, Any]] = getattr(application, "progress", dict)

    def progress(self) -> Mapping[str, Any]:
        return self._progress()


class Node:
    """One member of the run. Binds its address at once; speaks to others only inside `run`.

    Raises ValueError for settings that must not be used, RendezvousError if the address cannot be bound.
    """

    def __init__(self, config: Config, application: Application, *, transport: Transport | None = None) -> None:
        self.config = config
        self._application = application
        self._transport: Transport = transport if transport is not None else ZmqTransport(config)
        me = Member(
            name=config.name,
            incarnation=config.incarnation if config.incarnation is not None else time.time_ns() // 1000,
            address=self._transport.address,
            role=config.role,
            num_workers=config.num_workers,
            labels=dict(config.labels),
            host_owned=_host_owned(config),
        )
        now = time.monotonic()
        self._core = Core(me, config, _Oracle(application), random.Random(), now)
        self._core_due_s: float | None = None
        self._store = StoreRouter(me.key, self._send_store, config.timing.failure_s / 4)
        self.counters = Counters()
        self._encoder = Encoder()
        self._readers: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_number = itertools.count()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._effects: collections.deque[out.Effect] = collections.deque()
        self._performing = False
        self._stopped = False
        self._closed = False
        self._contact_reader: ContactReader | None = None
        self._fence = FenceCommand(config.fence, config.run_id, self._fence_answered) if config.fence else None

    @property
    def key(self) -> MemberKey:
        """This node's name and incarnation."""
        return self._core.me.key

    @property
    def member(self) -> Member:
        """This node as others see it."""
        return self._core.me

    @property
    def view(self) -> View | None:
        """The newest decided view that contains this node."""
        return self._core.view

    @property
    def verdict(self) -> Verdict | None:
        """How the run ended; None while it goes on."""
        return self._core.verdict

    @property
    def quorate(self) -> bool:
        """Does this node see enough of its view alive to decide the next one?

        False soon after the node was cut off, and before the others can go on without it (a suspicion must first grow
        old there): whoever publishes for the run asks here before.
        """
        return self._core.quorate()

    def members(self) -> Mapping[MemberKey, Record]:
        """What is known of every member: status, last progress and when it came. Read only."""
        return self._core.members()

    # -- the loop ---------------------------------------------------------------------------------------------------

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `fd` can be read. One callback for each descriptor."""
        if fd not in self._readers:
            self._transport.watch(fd)
        self._readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        """Stop watching; must come before the descriptor is closed. Unknown descriptors are ignored."""
        if self._readers.pop(fd, None) is not None:
            self._transport.unwatch(fd)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` in `delay_s` seconds, unless the timer is cancelled. On the node's thread only."""
        timer = Timer(time.monotonic() + delay_s, callback)
        heapq.heappush(self._timers, (timer.due_s, next(self._timer_number), timer))
        return timer

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the node's thread as soon as possible. From any thread."""
        self._calls.append(callback)
        self._transport.wake()

    def run(self) -> None:
        """Serve until `stop`. Whatever a callback raises comes out here; the node may then only be closed."""
        self._start_contacts()
        self._step(events.Tick())
        while not self._stopped:
            self._handle(self._transport.poll(self._wait_s()))
            while self._calls and not self._stopped:
                self._calls.popleft()()
            self._run_timers()
            now = time.monotonic()
            self._store.tick(now)
            if now >= self._core_due():
                self._step(events.Tick())

    def stop(self) -> None:
        """Make `run` return after the callback that is being served. From the node's thread."""
        self._stopped = True

    def close(self) -> None:
        """Give everything back within a second; what waits to be sent gets a moment to leave. Idempotent."""
        if self._closed:
            return
        self._closed = self._stopped = True
        if self._contact_reader is not None:
            self._contact_reader.close()
        if self._fence is not None:
            self._fence.close()
        self._transport.close(CLOSE_LINGER_S)

    def _wait_s(self) -> float:
        if self._calls:
            return 0.0
        due_s = min(self._core_due(), self._store.next_deadline_s())
        if self._timers:
            due_s = min(due_s, self._timers[0][0])
        return max(0.0, due_s - time.monotonic())

    def _core_due(self) -> float:
        """When the core needs its next tick. Only a step can change that."""
        if self._core_due_s is None:
            self._core_due_s = self._core.next_deadline_s()
        return self._core_due_s

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now and not self._stopped:
            callback = heapq.heappop(self._timers)[2].callback
            if callback is not None:
                callback()

    def _handle(self, incoming: Incoming) -> None:
        for frame in incoming.frames:
            try:
                envelope = decode(frame)
            except WireError:
                self.counters.malformed += 1
                continue
            self._step(events.Received(envelope))
        for address in incoming.lost:
            self._step(events.ConnectionLost(address))
        for address, refused in incoming.dialed:
            self._step(events.Dialed(address, refused))
        if incoming.num_unauthorised:
            self._step(events.Unauthorised())
        for fd in incoming.readable:
            callback = self._readers.get(fd)
            if callback is not None and not self._stopped:
                callback()

    def _start_contacts(self) -> None:
        contacts = self.config.contacts
        publish(contacts, self.config.name, self._core.me.address)
        literal = [contact for contact in contacts if is_literal(contact)]
        self._read_contacts(*read_contacts(literal))
        if len(literal) < len(contacts):
            self._contact_reader = ContactReader(
                contacts,
                self.config.failure_s,
                lambda found, problems: self.call_soon_threadsafe(lambda: self._read_contacts(found, problems)),
            )

    def _read_contacts(self, addresses: list[str], problems: list[str]) -> None:
        self._step(events.Contacts(tuple(addresses), tuple(problems)))

    # -- the core ---------------------------------------------------------------------------------------------------

    def _step(self, event: events.Event) -> None:
        """Effects happen in the order in which they came up, also when a callback causes new ones."""
        self._effects.extend(self._core.step(event, time.monotonic()))
        self._core_due_s = None
        if self._performing:
            return
        self._performing = True
        try:
            while self._effects:
                self._perform(self._effects.popleft())
        finally:
            self._performing = False

    def _fence_answered(self, member: MemberKey, status: Status | None, text: str) -> None:
        self.call_soon_threadsafe(lambda: self._step(events.FenceAnswered(member, status, text)))

    def _perform(self, effect: out.Effect) -> None:
        match effect:
            case out.Send():
                self._send(effect.address, effect.to, effect.message)
            case out.Dial():
                self._transport.dial(effect.address, self.config.timing.dial_s)
            case out.AskFence():
                if self._fence is not None:
                    self._fence.ask(effect.member)
            case out.Forget():
                self._transport.forget(effect.address)
            case out.Changed():
                if effect.change.kind is Change.DEAD and effect.change.proof:
                    self._store.lose(effect.change.member.key)
                self._application.on_member(effect.change)
            case out.Installed():
                self._store.enter(effect.view, time.monotonic())
                if effect.member:
                    self._application.on_view(effect.view)
            case out.Evicted():
                self._application.on_evicted(effect.reason)
            case out.Waiting():
                self._application.on_waiting(effect.reason)
            case out.JobEnded():
                if effect.verdict.code != 0:
                    self._store.end()  # nobody waits for those who have given up
                self._application.on_verdict(effect.verdict)
            case out.Asked():
                self._answer(effect)
            case out.Deliver():
                self._deliver(effect.sender, effect.message)

    def _send(self, address: str, to: MemberKey | None, message: Message) -> None:
        frame = self._encoder.encode(
            Envelope(self.config.run_id, self._core.nonce, self.key, self._core.me.address, to, message)
        )
        if not self._transport.send(address, frame):
            self.counters.dropped += 1

    def _answer(self, asked: out.Asked) -> None:
        answer = getattr(self._application, "answer", lambda kind, body: None)(asked.question.kind, asked.question.body)
        if answer is not None:
            self._send(asked.address, asked.sender, Answer(asked.question.kind, answer))

    def _deliver(self, sender: Member, message: Message) -> None:
        match message:
            case AppMessage():
                self._application.on_message(sender.key, message.kind, message.body)
            case StoreCall() | StoreResult():
                self._store.receive(sender.key, message, time.monotonic())
            case _:
                raise AssertionError(f"{type(message).__name__} has no receiver")

    # -- the application's wishes -----------------------------------------------------------------------------------

    def propose(self, reason: str) -> None:
        """Ask for the next epoch, and why. Void once a higher epoch is decided, whoever proposed that."""
        self._step(events.Propose(reason))

    def send(self, to: MemberKey, kind: str, body: Any) -> None:
        """Send a message to a live member, at most once, in order as long as a connection lasts; else it is dropped.

        ValueError if `body` is not plain or too long.
        """
        pack(body, MAX_MESSAGE_BYTES // 2, f"the body of a {kind!r} message")
        record = self._core.members().get(to)
        if to == self.key:
            raise ValueError("a node does not send messages to itself")
        if record is None or record.ended:
            self.counters.dropped += 1
            return
        self._send(record.member.address, to, AppMessage(kind, body))

    def broadcast(self, kind: str, body: Any) -> None:
        """`send` to every other member that is alive or suspect."""
        pack(body, MAX_MESSAGE_BYTES // 2, f"the body of a {kind!r} message")
        for key, record in list(self._core.members().items()):
            if key != self.key and record.live:
                self._send(record.member.address, key, AppMessage(kind, body))

    def declare(self, verdict: Verdict) -> None:
        """End the job: told to everybody until this node is closed. The first verdict that a node hears counts."""
        self._step(events.Declare(verdict))

    def leave(self, reason: str) -> None:
        """Announce this node's departure; it has no part in later views. Call `stop` afterwards."""
        self._step(events.Leave(reason))

    def assume_dead(self, name: str, reason: str) -> None:
        """Count every incarnation of `name` as gone for ever. Only for who knows that it cannot come back."""
        self._step(events.AssumeDead(name, reason))

    # -- the store --------------------------------------------------------------------------------------------------

    def store_request(
        self, epoch: int, op: str, args: list[Any], deadline_s: float, reply: Callable[[StoreReply], None]
    ) -> None:
        """One store operation (store_shard.py) in the round that `epoch` belongs to; `deadline_s` from now.

        `reply` is called once, on the node's thread, possibly before this returns.
        """
        self._store.request(epoch, op, args, time.monotonic(), deadline_s, reply)

    def _send_store(self, to: Member, message: StoreCall | StoreResult) -> None:
        self._send(to.address, to.key, message)


def _host_owned(config: Config) -> bool:
    if config.host_owned is not None:
        return config.host_owned
    if config.advertise is None:
        return True
    bound, _ = split_endpoint(config.bind, "bind", any_port=True)
    advertised, _ = split_endpoint(config.advertise, "advertise", any_port=True)
    return bound == advertised
