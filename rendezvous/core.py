"""The protocol core: one node's whole behaviour as `step(event, now) -> effects`. No socket, clock or thread.

Flows in: events (a message, a tick, a broken connection, the application's wishes) with the time. Flows out: effects.
Invariants: given the same events, times and seed it does the same; newer views replace older ones, never the reverse;
messages of another run (nonce) change nothing.
Limits: the verdict that a node hears first stays its verdict.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

from rendezvous.agreement import Agreement, Decider
from rendezvous.config import Config
from rendezvous.detector import Detector
from rendezvous.effects import Asked, Deliver, Effect, Evicted, Installed, JobEnded, Outbox, Send, Waiting
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
from rendezvous.view_delta import ViewDelta, apply_delta, delta_of
from rendezvous.views import Sizes
from rendezvous.wire import MAX_PROGRESS_BYTES, Envelope, pack

_MAX_SAID = 256


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
        self.verdict: Verdict | None = None
        self.view: View | None = None  # the newest view that contains this node
        self._evicted = False
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
    def newest(self) -> View | None:
        """The newest decided view known here, whether or not this node is in it."""
        return self.agreement.view

    @property
    def nonce(self) -> str:
        return self.newest.nonce if self.newest else ""

    def next_deadline_s(self) -> float:
        """When the next Tick is due. What is overdue then is dealt with by that Tick, so the node never spins."""
        times = [self._last_tick_s + self._timing.probe_interval_s / 2, self.detector.next_deadline_s()]
        times.append(self._rumours.next_deadline_s())
        if self._may_propose():
            times += [self.agreement.next_deadline_s(), self.motives.next_deadline_s()]
        return min(times)

    def _may_propose(self) -> bool:
        return self.verdict is None and not self._evicted and not self.membership.own.ended

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
            case Contacts():
                self._joining.read(event, now)
            case Propose():
                self.agreement.blocked_at = None  # what the application allows may be different now
                self.motives.request(event.reason, now)
            case Declare():
                self._end(event.verdict)
            case Leave():
                self.membership.leave(event.reason)
                self.agreement.proposal = None
            case AssumeDead():
                self._fences.assume(event, now)
            case FenceAnswered():
                self._fences.answered(event, now)
        self._notice_eviction()
        self.agreement.abstains = self._evicted or self.membership.own.status >= Status.GONE
        if self._may_propose():
            self.motives.act(now)
        return self._drain()

    def _notice_eviction(self) -> None:
        """Out is who is fenced, missing in a view newer than one it was in, or told that others count it as gone."""
        newest, own = self.newest, self.membership.own
        if newest is None or self._evicted:
            return
        if own.status is Status.FENCED:
            self._evict(f"this node was counted out while it was not heard from ({own.reason})")
        elif self.me.key not in newest.keys and (self.view is not None or own.status is Status.GONE):
            self._evict(f"the run went on without this node (view {newest.epoch}: {newest.reason})")

    def _evict(self, reason: str) -> None:
        self._evicted = True
        self._out.put(Evicted(reason))

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
        if self._may_propose():
            self.agreement.tick(now)
            self._fences.tick(now)
        self._rumours.tick(now)
        if not self._evicted:
            self._joining.tick(now)
        if now >= self._next_sync_s:
            self._next_sync_s = now + self._timing.sync_interval_s
            others = sorted((r for r in self.membership.others() if not r.ended), key=lambda r: r.member.key)
            if others:
                self._out.send(self._rng.choice(others).member, TableDigest(self.membership.digest))

    # -- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, envelope: Envelope, now: float) -> None:
        foreign = envelope.nonce and self.nonce and envelope.nonce != self.nonce
        if envelope.run_id != self.config.run_id or foreign:
            self.num_foreign += 1
            return
        message, sender = envelope.message, envelope.sender
        if envelope.to is not None and envelope.to != self.me.key:
            # Meant for a predecessor at this address: tell the sender who lives here now.
            self._joining.introduce(envelope.address, now)
            return
        if sender == self.me.key:
            return
        match message:
            case Join():
                if self._joining.receive(message.member, envelope, self.newest, now):
                    self._out.send(message.member, self._sync(reply=False))
                return
            case JoinRefused():
                self._joining.refused(envelope.sender.name, message.reason)
                return
            case Sync():
                self._on_sync(message, envelope, now)
                return
            case Decided():
                self._install(message.view, now)
                return
            case DecidedDelta():
                self._on_delta(message.delta, envelope, now)
                return
            case Ended():
                self._end(message.verdict)
                return
            case Fence():
                self._out.put(Send(envelope.address, envelope.sender, self._fences.asked(message, now)))
                return
            case Question():
                self._out.put(Asked(envelope.sender, envelope.address, message))
                return
            case FenceAnswer() | Answer():
                return  # meant for an operator
            case _:
                pass
        record = self.membership.records.get(sender)
        if record is None:
            self._joining.introduce(envelope.address, now)
            return
        record.heard_s = now
        if record.ended:
            self._answer_ended(record, envelope, now)
            return
        self._dispatch(record, envelope, now)

    def _dispatch(self, record: Record, envelope: Envelope, now: float) -> None:
        sender = record.member
        match message := envelope.message:
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
        self._apply_all(message.updates, now)
        if message.view is not None:
            self._install(message.view, now)
        if message.verdict is not None:
            self._end(message.verdict)
        record = self.membership.records.get(envelope.sender)
        if message.reply and record is not None:
            self._out.send(record.member, self._sync(reply=False))

    def _on_beat(self, record: Record, beat: Beat, now: float) -> None:
        self._apply_all(beat.updates, now)
        self.membership.apply(Update(record.member, Status.ALIVE, beat.refutation, "", False, record.member.name), now)
        record.epoch, record.progress, record.progress_s = max(record.epoch, beat.epoch), beat.progress, now
        if beat.verdict is not None:
            self._end(beat.verdict)
        if beat.epoch > self.agreement.epoch:
            self.agreement.highest_seen_epoch = max(self.agreement.highest_seen_epoch, beat.epoch)
            self._out.send(record.member, ViewWanted(self.agreement.epoch))
        elif self.newest is not None and beat.epoch < self.newest.epoch:
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
        pack(progress, MAX_PROGRESS_BYTES, "what Application.progress() returned")
        return Beat(self.agreement.epoch, self.membership.refutation, updates, self.verdict, progress)

    def _sync(self, *, reply: bool) -> Sync:
        return Sync(self.membership.table(), self.newest, self.verdict, reply)

    # -- decisions --------------------------------------------------------------------------------------------------

    def _install(self, view: View, now: float) -> None:
        """Take over a decided view if it is newer; tell those who may not know when it was decided here."""
        previous = self.newest
        if view.epoch <= self.agreement.epoch or (previous is not None and view.nonce != previous.nonce):
            return
        proposal = self.agreement.proposal
        decided_here = proposal is not None and proposal.view is view
        self.agreement.install(view)
        self.motives.reset(now)
        self._said.clear()
        for member in view.members:
            if member.key not in self.membership.records:
                self.membership.apply(Update(member, Status.ALIVE, 0, "", False, member.name), now)
        if decided_here:
            self._tell(view, previous)
        for key in (previous.keys if previous else frozenset()) - view.keys:
            left_out = self.membership.records.get(key)
            if left_out is not None and left_out is not self.membership.own and not left_out.ended:
                self.membership.judge(key, Status.GONE, f"not in the view of epoch {view.epoch}", now)
        is_member = self.me.key in view.keys and not self._evicted
        self._out.put(Installed(view, is_member))
        if is_member:
            self.view = view

    def _tell(self, view: View, previous: View | None) -> None:
        """To those of the view before, what changed; to others, all of it."""
        whole = Decided(view)
        change = DecidedDelta(delta_of(previous, view)) if previous is not None else whole
        known = previous.keys if previous is not None else frozenset()
        for record in self.membership.others():
            if not record.ended:
                self._out.send(record.member, change if record.member.key in known else whole)

    def _on_delta(self, delta: ViewDelta, envelope: Envelope, now: float) -> None:
        """A decision for who holds the view before. Who does not asks for the whole."""
        if self.newest is None or delta.epoch > self.newest.epoch + 1:
            self._out.put(Send(envelope.address, envelope.sender, ViewWanted(self.agreement.epoch)))
        elif (view := apply_delta(self.newest, delta)) is not None:
            self._install(view, now)

    def _end(self, verdict: Verdict) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self._out.put(JobEnded(verdict))
            for record in self.membership.live():
                self._out.send(record.member, Ended(verdict))

    def quorate(self) -> bool:
        """Is this node in the newest view it knows, and are enough of its members beyond suspicion to decide the
        next?
        """
        view = self.newest
        if view is None or self._evicted or self.me.key not in view.keys:
            return False
        alive = {key for key, record in self.membership.records.items() if record.status is Status.ALIVE}
        return self.agreement.has_quorum(alive | {self.me.key})

    def members(self) -> Mapping[MemberKey, Record]:
        return self.membership.records
