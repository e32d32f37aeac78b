"""One decision per epoch: a Paxos acceptor and proposer for the view after the newest known one. Pure.

Flows in: messages about an epoch, ticks, reasons to decide. Flows out: messages, and `learn`ed views through the core.
Invariants: only incarnations in the view of epoch e vote on e+1, each bound by what it promised and accepted; a
proposer adopts the accepted value with the highest ballot; votes count only under `views.has_quorum`; an epoch is
never reused.
Limits: nothing is written to disk: a restarted agent is a new incarnation and has no vote until a view contains it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rendezvous.config import Timing
from rendezvous.effects import Outbox, Waiting
from rendezvous.hearsay import Hearsay
from rendezvous.membership import Membership, Record
from rendezvous.messages import (
    Accept,
    AcceptDelta,
    Accepted,
    AcceptedVote,
    Ballot,
    Decided,
    Message,
    Prepare,
    Promise,
    Reject,
    Status,
    ViewWanted,
)
from rendezvous.plain import MAX_COUNTER
from rendezvous.types import Member, MemberKey, View
from rendezvous.view_delta import apply_delta, delta_of
from rendezvous.views import Sizes, has_quorum, make_view, plan_view, quorum_text
from rendezvous.wire import MAX_BALLOT_BYTES, pack

MAX_PATIENCE = 4.0
_MAX_REASON_CHARS = 1000


class Decider(Protocol):
    """The part of an Application that the agreement asks."""

    def ballot(self) -> dict[str, Any]: ...

    def decide(
        self, previous: View | None, places: Sequence[Member], ballots: Mapping[MemberKey, dict[str, Any]]
    ) -> tuple[bool, dict[str, Any]]: ...

    def num_places(self, previous: View, ballots: Mapping[MemberKey, dict[str, Any]]) -> tuple[int, int] | None: ...


@dataclass(slots=True)
class Proposal:
    """An own ballot under way. `view` is None in the first phase.

    `given_up`: the time in which members taken for dead may show that they live is over; `collected`: that for late
    ballots is.
    """

    ballot: Ballot
    started_s: float
    resend_s: float
    promises: dict[MemberKey, Promise] = field(default_factory=dict)
    votes: set[MemberKey] = field(default_factory=set)
    view: View | None = None
    num_sent: int = 0
    given_up: bool = False
    collected: bool = False


class Agreement:
    """State of the decision after `view`. `abstains` is set by the core when this node must not take part."""

    def __init__(
        self,
        membership: Membership,
        sizes: Sizes,
        timing: Timing,
        rejoins: bool,
        decider: Decider,
        learn: Callable[[View, float], None],
        rng: random.Random,
        out: Outbox,
    ) -> None:
        self._membership = membership
        self._sizes = sizes
        self._timing = timing
        self._rejoins = rejoins
        self._decider = decider
        self._learn = learn
        self._rng = rng
        self._out = out
        self.view: View | None = None
        self.abstains = False
        self._hearsay = Hearsay(timing.failure_s)
        self.promised: Ballot | None = None
        self._promised_s = 0.0
        self._num_failed = 0  # ballots of this node for this epoch that found no quorum in time
        self.last_accepted: Accepted | None = None
        self.proposal: Proposal | None = None
        self._highest_number = 0
        self.retry_s = 0.0
        self.blocked_at: int | None = None

    @property
    def epoch(self) -> int:
        return self.view.epoch if self.view else 0

    @property
    def accepted(self) -> Accepted | None:
        """What was accepted for the epoch that is being decided."""
        held = self.last_accepted
        return held if held is not None and held.view.epoch == self.epoch + 1 else None

    @property
    def me(self) -> MemberKey:
        return self._membership.me.key

    def install(self, view: View) -> None:
        """A decision became known: everything about older epochs is void."""
        assert view.epoch > self.epoch, "an epoch is decided once"
        self.view = view
        self.promised = self.proposal = self.blocked_at = None
        self.retry_s = 0.0
        self._num_failed = 0
        self._highest_number = 0  # ballots of one epoch are compared with each other only
        self._hearsay.learn(view.epoch)

    def hear_epoch(self, member: MemberKey, epoch: int, now: float) -> None:
        """The newest epoch that a member says it knows."""
        self._hearsay.hear(member, epoch, self.epoch, now)

    def missed(self) -> list[MemberKey]:
        """Who spoke of a view that this node does not know, as far as that still holds."""
        return self._hearsay.said_by(self._membership.fenced())

    def is_voter(self) -> bool:
        """May this incarnation vote on the next epoch? Not while it is to be told of a decision that it missed."""
        if self.abstains or self._hearsay.said_by(self._membership.fenced(), fresh=self.view is not None):
            return False
        return not self._rejoins if self.view is None else self.me in self.view.keys

    def voters(self) -> list[Record]:
        """Others whose votes count, except those that are proven to be gone."""
        records = self._membership.others()
        keys = self.view.keys if self.view else None
        return [r for r in records if r.status <= Status.LEFT and (keys is None or r.member.key in keys)]

    # -- proposer ---------------------------------------------------------------------------------------------------

    def propose(self, reasons: Callable[[Container[MemberKey]], list[str]], now: float) -> None:
        """Start a ballot. `reasons` is asked again, with the members that answered, when the promises are there."""
        self._reasons = reasons
        self._highest_number = min(self._highest_number + 1, MAX_COUNTER)
        self.proposal = Proposal(Ballot(self._highest_number, self.me), now, now)
        self._send_requests(now)

    def tick(self, now: float) -> None:
        """Repeat what was lost, go on without slow members, give up a ballot that got no quorum."""
        self._hearsay.tick(now)
        proposal = self.proposal
        if proposal is None:
            if self.view is None and (text := self._hearsay.text(self._membership.fenced())):
                self._out.put(Waiting(text))
            return
        if proposal.view is None:
            proposal.given_up = now >= proposal.started_s + self._timing.probe_timeout_s
            proposal.collected = now >= proposal.started_s + self._timing.collect_s
            self._maybe_accept_phase(now)
        if self.proposal is proposal and now >= proposal.started_s + self._attempt_s():
            num_votes = len(proposal.votes if proposal.view else self._promise_votes(proposal))
            told = self._hearsay.text(self._membership.fenced())
            self._out.put(Waiting(quorum_text(self.view, num_votes, self._sizes) + (f". {told}" if told else "")))
            self._num_failed += 1
            self._give_up(now)
        elif self.proposal is proposal and now >= proposal.resend_s:
            self._send_requests(now)

    def next_deadline_s(self) -> float:
        if self.proposal is None:
            return float("inf")
        proposal = self.proposal
        due_s = min(proposal.resend_s, proposal.started_s + self._attempt_s())
        if proposal.view is None and not proposal.collected:
            due_s = min(due_s, proposal.started_s + self._timing.collect_s)
        if proposal.view is None and not proposal.given_up:
            due_s = min(due_s, proposal.started_s + self._timing.probe_timeout_s)
        return due_s

    def _send_requests(self, now: float) -> None:
        proposal = self.proposal
        assert proposal is not None
        proposal.resend_s = now + self._timing.resend_s * min(2.0**proposal.num_sent, MAX_PATIENCE)
        proposal.num_sent += 1
        epoch = self.epoch + 1
        if proposal.view is None:
            request: Message = Prepare(epoch, proposal.ballot)
            others = self._membership.others()
            missing = [r for r in others if r.status <= Status.LEFT and r.member.key not in proposal.promises]
            own_missing = self.me not in proposal.promises
        else:
            request = Accept(epoch, proposal.ballot, proposal.view)
            if self.view is not None:
                request = AcceptDelta(epoch, proposal.ballot, delta_of(self.view, proposal.view))
            missing = [record for record in self.voters() if record.member.key not in proposal.votes]
            own_missing = self.me not in proposal.votes
        for record in missing:
            self._out.send(record.member, request)
        if own_missing:
            self.receive(self._membership.me, request, now)

    def _give_up(self, now: float) -> None:
        self.proposal = None
        self.retry_s = now + self._timing.attempt_s * self._rng.uniform(0.3, 1.0)

    def _attempt_s(self) -> float:
        """Where a ballot fails because everybody is slow, the next one fails too unless it gets more time."""
        return self._timing.attempt_s * min(2.0**self._num_failed, MAX_PATIENCE)

    def rival_until_s(self) -> float:
        """Until when this node leaves the decision to another live member whose ballot it has promised."""
        if self.promised is None or self.promised.proposer == self.me:
            return 0.0
        record = self._membership.records.get(self.promised.proposer)
        return self._promised_s + self._attempt_s() if record is not None and record.live else 0.0

    def _promise_votes(self, proposal: Proposal) -> set[MemberKey]:
        return {key for key, promise in proposal.promises.items() if promise.votes}

    def has_quorum(self, votes: set[MemberKey]) -> bool:
        """Would these votes decide the next epoch?"""
        fenced, sizes = self._membership.fenced(), self._sizes
        if self.missed():
            fenced, sizes = frozenset(), dataclasses.replace(sizes, proof_suffices=False)
        return has_quorum(self.view, votes, self._membership.gone(), fenced, self._membership.records, sizes)

    def _maybe_accept_phase(self, now: float) -> None:
        """With a quorum of promises, and every live member's ballot or its time over: choose the value, ask for
        votes.
        """
        proposal = self.proposal
        assert proposal is not None
        if now < proposal.started_s + self._timing.collect_s:
            if len(proposal.promises) < self._membership.num_alive() - 1:
                return  # without looking who: somebody is missing
            alive = [r.member.key for r in self._membership.others() if r.status is Status.ALIVE]
            if any(key not in proposal.promises for key in alive):
                return
            # A rumour of death may come from the other side of a healed partition: the request is a probe, too.
            if now < proposal.started_s + self._timing.probe_timeout_s and any(
                record.status is Status.DEAD and record.member.key not in proposal.promises for record in self.voters()
            ):
                return
        if not self.has_quorum(self._promise_votes(proposal)):
            return
        view = self._choose(proposal, now)
        if view is None:
            return
        proposal.view = view
        proposal.started_s = now
        self._send_requests(now)

    @staticmethod
    def _adopted(proposal: Proposal) -> View | None:
        """The value that may have been decided already: of all accepted ones, that with the highest ballot."""
        held = [p.accepted for p in proposal.promises.values() if p.votes and p.accepted is not None]
        return max(held, key=lambda accepted: accepted.ballot).view if held else None

    def _choose(self, proposal: Proposal, now: float) -> View | None:
        """The value to ask votes for: one that may have been decided already, else a planned one."""
        adopted = self._adopted(proposal)
        if adopted is not None:
            return adopted
        reasons = self._reasons(proposal.promises)
        if not reasons:
            self._give_up(now)
            return None
        records = self._membership.records.values()
        usable = [r.member for r in records if r.live or (not r.ended and r.member.key in proposal.promises)]
        ballots = {key: dict(promise.data) for key, promise in proposal.promises.items()}
        plan = plan_view(self.view, usable, self._next_sizes(ballots))
        if isinstance(plan, str):
            self._out.put(Waiting(plan))
            self.blocked_at = self._membership.version
            self._give_up(now)
            return None
        new_round, data = self._decider.decide(self.view, plan.places, ballots)
        nonce = f"{self._rng.getrandbits(64):016x}"
        return make_view(self.view, plan, nonce, "; ".join(reasons)[:_MAX_REASON_CHARS], new_round, data)

    def _next_sizes(self, ballots: Mapping[MemberKey, dict[str, Any]]) -> Sizes:
        wanted = self._decider.num_places(self.view, ballots) if self.view is not None else None
        if wanted is None:
            return self._sizes
        return dataclasses.replace(self._sizes, num_nodes_min=wanted[0], num_nodes_max=wanted[1])

    # -- messages ---------------------------------------------------------------------------------------------------

    def receive(self, sender: Member, message: Message, now: float) -> None:
        """A Prepare, Promise, Accept, AcceptedVote or Reject. One about an old epoch is answered with the decision."""
        match message:
            case Prepare() | Accept() | AcceptDelta():
                if self.view is not None and message.epoch <= self.epoch:
                    self._out.send(sender, Decided(self.view))
                elif message.epoch != self.epoch + 1:
                    self._out.send(sender, ViewWanted(self.epoch))
                elif isinstance(message, Prepare):
                    self._on_prepare(sender, message, now)
                elif isinstance(message, Accept):
                    self._on_accept(sender, message, now)
                elif self.view is not None and (view := apply_delta(self.view, message.delta)) is not None:
                    self._on_accept(sender, Accept(message.epoch, message.ballot, view), now)
            case Promise() | AcceptedVote() | Reject():
                proposal = self.proposal
                if proposal is not None and message.epoch == self.epoch + 1 and message.ballot == proposal.ballot:
                    self._on_answer(proposal, sender.key, message, now)
            case _:
                raise AssertionError(f"{type(message).__name__} is no message of the agreement")

    def _reply(self, to: Member, message: Message, now: float) -> None:
        if to.key == self.me:
            self.receive(to, message, now)
        else:
            self._out.send(to, message)

    def _on_prepare(self, sender: Member, message: Prepare, now: float) -> None:
        votes = self.is_voter()
        if votes:
            self._highest_number = max(self._highest_number, message.ballot.number)
            if self.promised is not None and message.ballot < self.promised:
                self._reply(sender, Reject(message.epoch, message.ballot, self.promised), now)
                return
            self.promised, self._promised_s = message.ballot, now
        data = self._decider.ballot()
        pack(data, MAX_BALLOT_BYTES, "what Application.ballot() returned")
        accepted = self.accepted if votes else None
        self._reply(sender, Promise(message.epoch, message.ballot, votes, accepted, data), now)

    def _on_accept(self, sender: Member, message: Accept, now: float) -> None:
        if not self.is_voter() or message.view.epoch != message.epoch:
            return
        if self.promised is not None and message.ballot < self.promised:
            self._reply(sender, Reject(message.epoch, message.ballot, self.promised), now)
            return
        self.promised, self._promised_s = message.ballot, now
        self.last_accepted = Accepted(message.ballot, message.view)
        self._reply(sender, AcceptedVote(message.epoch, message.ballot), now)

    def _on_answer(
        self, proposal: Proposal, sender: MemberKey, message: Promise | AcceptedVote | Reject, now: float
    ) -> None:
        match message:
            case Promise() if proposal.view is None:
                votes = message.votes and (self.view is None or sender in self.view.keys)
                proposal.promises[sender] = (
                    message
                    if votes == message.votes
                    else Promise(message.epoch, message.ballot, votes, None, message.data)
                )
                self._maybe_accept_phase(now)
            case AcceptedVote() if proposal.view is not None:
                proposal.votes.add(sender)
                if self.has_quorum(proposal.votes):
                    self._learn(proposal.view, now)
            case Reject():
                self._highest_number = max(self._highest_number, message.promised.number)
                self._give_up(now)
            case _:
                pass
