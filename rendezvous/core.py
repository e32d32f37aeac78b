"""The protocol core: one node's whole behaviour as `step(event, now) -> effects`. No socket, clock or thread.

Flows in: events (a message, a tick, a broken connection, the application's wishes) with the time. Flows out: effects.
Invariants: given the same events, times and seed it does the same; messages of another run (nonce) change nothing.
Limits: an event costs some ten microseconds, and more the more members there are that it concerns.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

from rendezvous.agreement import Agreement, Decider
from rendezvous.config import Config
from rendezvous.decisions import Decisions
from rendezvous.detector import Detector
from rendezvous.effects import Asked, Deliver, Effect, Outbox, Send, Waiting
from rendezvous.events import (
    AssumeDead,
    ConnectionLost,
    Contacts,
    Declare,
    Dialed,
    Event,
    FenceAnswered,
    Leave,
    Propose,
    Received,
    Tick,
    Unauthorised,
)
from rendezvous.fences import Fences
from rendezvous.joining import Joining
from rendezvous.membership import Membership, Record
from rendezvous.messages import (
    Accept,
    AcceptDelta,
    AcceptedVote,
    Ack,
    Answer,
    AppMessage,
    Beat,
    Decided,
    DecidedDelta,
    Ended,
    Fence,
    FenceAnswer,
    Gossip,
    IndirectAck,
    Join,
    JoinRefused,
    Message,
    Ping,
    PingRequest,
    Prepare,
    Promise,
    Question,
    Reject,
    Status,
    StoreCall,
    StoreResult,
    Sync,
    TableDigest,
    Update,
    ViewWanted,
    Wanted,
)
from rendezvous.motives import Motives
from rendezvous.rumours import Rumours
from rendezvous.types import Member, MemberKey, Verdict, View
from rendezvous.view_delta import ViewDelta, apply_delta
from rendezvous.views import Sizes
from rendezvous.wire import MAX_PROGRESS_BYTES, Envelope, pack

_MAX_SAID = 256
# What is answered whoever sends it, also somebody who is no member or is out.
_FROM_ANYBODY = frozenset((Join, JoinRefused, Sync, Decided, DecidedDelta, Ended, Fence, FenceAnswer, Question, Answer))


class Oracle(Decider, Protocol):
    """What the core asks of the application, synchronously."""

    def progress(self) -> Mapping[str, Any]: ...


class Core:
    """One node's protocol state, advanced in place by `step`."""

    def __init__(self, me: Member, config: Config, oracle: Oracle, rng: random.Random, now: float) -> None:
        timing = config.timing
        self.config = config
        self._timing = timing
        self._oracle = oracle
        self._rng = rng
        self._out = Outbox()
        sizes = Sizes(config.num_nodes_min, config.num_nodes_max, config.max_size, config.proof_suffices)
        self.membership = Membership(me, self._out, now)
        self.detector = Detector(self.membership, timing, self._beat, rng, self._out, now)
        self.agreement = Agreement(self.membership, sizes, timing, config.rejoin, oracle, self._install, rng, self._out)
        self.motives = Motives(self.membership, self.agreement, config, self._out, now)
        self._decisions = Decisions(self.membership, self.agreement, self.motives, self._out)
        self._fences = Fences(self.membership, self.agreement, timing, self._out)
        self._rumours = Rumours(self.membership, timing, rng, self._out, now)
        self._joining = Joining(self.membership, self.detector, timing, self._out, now)
        self._last_tick_s = now
        self._next_sync_s = now + timing.sync_interval_s
        self._said: set[str] = set()
        self.num_foreign = 0

    @property
    def me(self) -> Member:
        return self.membership.me

    @property
    def view(self) -> View | None:
        """The newest view that contains this node."""
        return self._decisions.view

    @property
    def verdict(self) -> Verdict | None:
        return self._decisions.verdict

    @property
    def newest(self) -> View | None:
        """The newest decided view known here, whether or not this node is in it."""
        return self.agreement.view

    @property
    def nonce(self) -> str:
        return self.newest.nonce if self.newest else ""

    def next_deadline_s(self) -> float:
        """When the next Tick is due. What is overdue then is dealt with by that Tick, so the node never spins."""
        due_s = self._last_tick_s + self._timing.probe_interval_s / 2
        due_s = min(due_s, self.detector.next_deadline_s(), self._rumours.next_deadline_s())
        if self._decisions.may_propose():
            due_s = min(due_s, self.agreement.next_deadline_s(), self.motives.next_deadline_s())
        return due_s

    def step(self, event: Event, now: float) -> list[Effect]:
        """Handle one event. Never blocks and never fails on what others sent."""
        match event:
            case Received():
                self._receive(event.envelope, now)
            case Tick():
                self._tick(now)
            case ConnectionLost():
                self.detector.on_lost(event.address, now)
            case Dialed():
                self.detector.on_dialed(event.address, event.refused, now)
            case Unauthorised():
                self.motives.turned_away()
            case Contacts():
                self._joining.read(event, now)
            case Propose():
                self.agreement.blocked_at = None  # what the application allows may be different now
                self.motives.request(event.reason, now)
            case Declare():
                self._decisions.end(event.verdict)
            case Leave():
                self.membership.leave(event.reason)
                self.agreement.proposal = None
            case AssumeDead():
                self._fences.assume(event, now)
            case FenceAnswered():
                self._fences.answered(event, now)
        decisions = self._decisions
        decisions.notice_eviction()
        self.agreement.abstains = decisions.evicted or self.membership.own.status >= Status.GONE
        if decisions.may_propose():
            self.motives.act(now)
        return self._drain()

    def _drain(self) -> list[Effect]:
        effects: list[Effect] = []
        for effect in self._out.drain():
            if isinstance(effect, Waiting):
                if effect.reason in self._said or len(self._said) >= _MAX_SAID:
                    continue
                self._said.add(effect.reason)
            effects.append(effect)
        return effects

    # -- time -------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        gap_s, self._last_tick_s = now - self._last_tick_s, now
        if gap_s > self._timing.stall_s:
            self.detector.postpone(gap_s, now)
        self.detector.tick(now)
        if self._decisions.may_propose():
            self.agreement.tick(now)
            self._fences.tick(now)
        self._rumours.tick(now)
        if not self._decisions.evicted:
            self._joining.tick(now)
        if now >= self._next_sync_s:
            self._next_sync_s = now + self._timing.sync_interval_s
            others = sorted((r for r in self.membership.others() if not r.ended), key=lambda r: r.member.key)
            if others:
                self._out.send(self._rng.choice(others).member, TableDigest(self.membership.digest))

    # -- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, envelope: Envelope, now: float) -> None:
        newest = self.agreement.view
        foreign = envelope.nonce and newest is not None and envelope.nonce != newest.nonce
        if envelope.run_id != self.config.run_id or foreign:
            self.num_foreign += 1
            self._answer_foreign(envelope)
            return
        sender, me = envelope.sender, self.membership.me.key
        if envelope.to is not None and envelope.to != me:
            # Meant for a predecessor at this address: tell the sender who lives here now.
            self._joining.introduce(envelope.address, now)
            return
        if sender == me:
            return
        if type(envelope.message) in _FROM_ANYBODY:
            self._receive_from_anybody(envelope, now)
            return
        record = self.membership.records.get(sender)
        if record is None:
            self._joining.introduce(envelope.address, now)
            return
        record.heard_s = now
        if record.ended:
            self._answer_ended(record, envelope, now)
            return
        self._dispatch(record, envelope.message, now)

    def _answer_foreign(self, envelope: Envelope) -> None:
        """Who took this node for one of another run is told; a node that has no view yet says that it was told so."""
        match envelope.message:
            case Join():
                reason = f"run {self.config.run_id!r} is at this address, "
                other = envelope.run_id != self.config.run_id
                reason += f"not {envelope.run_id!r}" if other else "but another one of that name"
                self._out.put(Send(envelope.address, envelope.sender, JoinRefused(reason)))
            case JoinRefused(reason) if envelope.to == self.membership.me.key and self.newest is None:
                self._joining.refused(envelope.sender.name, reason)

    def _receive_from_anybody(self, envelope: Envelope, now: float) -> None:
        match message := envelope.message:
            case Join():
                if self._joining.receive(message.member, envelope, self.newest, now):
                    self._out.send(message.member, self._sync(reply=False))
            case JoinRefused():
                self._joining.refused(envelope.sender.name, message.reason)
            case Sync():
                self._on_sync(message, envelope, now)
            case Decided():
                self._install(message.view, now)
            case DecidedDelta():
                self._on_delta(message.delta, envelope, now)
            case Ended():
                self._decisions.end(message.verdict)
            case Fence():
                self._out.put(Send(envelope.address, envelope.sender, self._fences.asked(message, now)))
            case Question():
                self._out.put(Asked(envelope.sender, envelope.address, message))
            case _:
                pass  # an answer to an operator, who is not here

    def _dispatch(self, record: Record, message: Message, now: float) -> None:
        sender = record.member
        match message:
            case Ping():
                self._on_beat(record, message.beat, now)
                self.detector.on_ping(record, message)
            case Ack():
                self._on_beat(record, message.beat, now)
                self.detector.on_ack(record, message)
            case PingRequest():
                self.detector.on_ping_request(record, message, now)
            case IndirectAck():
                self.detector.on_indirect_ack(message)
            case Gossip():
                self._apply_all(message.updates, now)
            case Prepare() | Promise() | Accept() | AcceptDelta() | AcceptedVote() | Reject():
                self.agreement.receive(sender, message, now)
            case ViewWanted():
                if self.newest is not None and self.newest.epoch > message.epoch:
                    self._out.send(sender, Decided(self.newest))
            case TableDigest():
                if message.digest != self.membership.digest:
                    self._out.send(sender, self._sync(reply=True))
            case Wanted():
                self.motives.wanted_by(sender, message, now)
            case AppMessage() | StoreCall() | StoreResult():
                self._out.put(Deliver(sender, message))
            case _:
                raise AssertionError(f"{type(message).__name__} was not expected here")

    def _answer_ended(self, record: Record, envelope: Envelope, now: float) -> None:
        """A member that is out still asks: tell it what it is thought to be and the newest view, so that it stops."""
        message = envelope.message
        if record.status is Status.LEFT and isinstance(message, Promise | AcceptedVote | Reject):
            self.agreement.receive(record.member, message, now)
        if isinstance(message, Ping):
            self.detector.on_ping(record, message)
        if self.newest is not None and isinstance(
            message, Ping | ViewWanted | Prepare | Accept | AcceptDelta | StoreCall
        ):
            self._out.send(record.member, Decided(self.newest))
            if record.status is Status.FENCED:
                self._out.send(record.member, Gossip((record.update(),)))  # that view may still contain it

    def _on_sync(self, message: Sync, envelope: Envelope, now: float) -> None:
        """The table of a member, or of one that this node asked to be taken in by: it may have a taken name itself."""
        if envelope.sender not in self.membership.records and any(
            update.member.key == envelope.sender and self._joining.refuses_name(update.member, now)
            for update in message.updates
        ):
            return
        self._apply_all(message.updates, now)
        if message.view is not None:
            self._install(message.view, now)
        if message.verdict is not None:
            self._decisions.end(message.verdict)
        record = self.membership.records.get(envelope.sender)
        if message.reply and record is not None:
            self._out.send(record.member, self._sync(reply=False))

    def _on_beat(self, record: Record, beat: Beat, now: float) -> None:
        self._apply_all(beat.updates, now)
        self.membership.lives(record, beat.refutation, now)
        record.progress, record.progress_s = beat.progress, now
        if beat.verdict is not None:
            self._decisions.end(beat.verdict)
        epoch = self.agreement.epoch
        self.agreement.hear_epoch(record.member.key, beat.epoch, now)
        if beat.epoch > epoch:
            self._out.send(record.member, ViewWanted(epoch))
        elif self.newest is not None and beat.epoch < epoch:
            self._out.send(record.member, Decided(self.newest))

    def _apply_all(self, updates: tuple[Update, ...], now: float) -> None:
        for update in updates:
            if self.membership.apply(update, now) and update.status is Status.SUSPECT:
                self.detector.confirm(update.member.key, now)

    def _beat(self, to: Record) -> Beat:
        updates = self.membership.take_news()
        if to.status is not Status.ALIVE:
            updates = (to.update(), *(update for update in updates if update.member.key != to.member.key))
        progress = dict(self._oracle.progress())
        if progress:
            pack(progress, MAX_PROGRESS_BYTES, "what Application.progress() returned")
        return Beat(self.agreement.epoch, self.membership.own.refutation, updates, self._decisions.verdict, progress)

    def _sync(self, *, reply: bool) -> Sync:
        return Sync(self.membership.table(), self.newest, self.verdict, reply)

    # -- decisions --------------------------------------------------------------------------------------------------

    def _install(self, view: View, now: float) -> None:
        fewest, most = self.config.num_nodes_min, self.config.num_nodes_max
        if self.newest is None and not fewest <= len(view.places) <= most:
            self._out.put(
                Waiting(
                    f"this run's number of training nodes is {len(view.places)}, but this node was told --nnodes "
                    f"{fewest}:{most}: start all nodes with the same --nnodes"
                )
            )
        if self._decisions.install(view, now):
            self._said.clear()

    def _on_delta(self, delta: ViewDelta, envelope: Envelope, now: float) -> None:
        """A decision for who holds the view before. Who does not asks for the whole."""
        if self.newest is None or delta.epoch > self.newest.epoch + 1:
            self._out.put(Send(envelope.address, envelope.sender, ViewWanted(self.agreement.epoch)))
        elif (view := apply_delta(self.newest, delta)) is not None:
            self._install(view, now)

    def quorate(self) -> bool:
        """Is this node in the newest view it knows, and are enough of its members beyond suspicion to decide the
        next?
        """
        return self._decisions.quorate()

    def members(self) -> Mapping[MemberKey, Record]:
        return self.membership.records
