"""What is decided, as far as this node knows: the newest view, the one it is in, whether it is out, the verdict. Pure.

Flows in: decided views, verdicts, what others think of this node. Flows out: effects for the application, messages to
who may not know yet.
Invariants: newer views replace older ones, never the reverse; a view of another run (nonce) changes nothing; who is out
stays out.
Limits: the verdict that a node hears first stays its verdict.
"""

from __future__ import annotations

from rendezvous.agreement import Agreement
from rendezvous.effects import Evicted, Installed, JobEnded, Outbox
from rendezvous.membership import Membership
from rendezvous.messages import Decided, DecidedDelta, Ended, Status, Update
from rendezvous.motives import Motives
from rendezvous.types import Verdict, View
from rendezvous.view_delta import delta_of


class Decisions:
    """Owned by the core. `view`: the newest view that contains this node."""

    def __init__(self, membership: Membership, agreement: Agreement, motives: Motives, out: Outbox) -> None:
        self._membership = membership
        self._agreement = agreement
        self._motives = motives
        self._out = out
        self.verdict: Verdict | None = None
        self.view: View | None = None
        self.evicted = False

    def may_propose(self) -> bool:
        return self.verdict is None and not self.evicted and self._membership.own.status < Status.LEFT

    def install(self, view: View, now: float) -> bool:
        """Take over a decided view if it is newer; tell those who may not know when it was decided here."""
        previous = self._agreement.view
        if view.epoch <= self._agreement.epoch or (previous is not None and view.nonce != previous.nonce):
            return False
        proposal = self._agreement.proposal
        decided_here = proposal is not None and proposal.view is view
        self._agreement.install(view)
        self._motives.reset(now)
        membership = self._membership
        for member in view.members:
            if member.key not in membership.records:
                membership.apply(Update(member, Status.ALIVE, 0, "", False, member.name), now)
        if decided_here:
            self._tell(view, previous)
        for member in previous.members if previous else ():
            left_out = None if member.key in view.keys else membership.records.get(member.key)
            if left_out is not None and left_out is not membership.own and not left_out.ended:
                membership.judge(member.key, Status.GONE, f"not in the view of epoch {view.epoch}", now)
        is_member = membership.me.key in view.keys and not self.evicted
        self._out.put(Installed(view, is_member))
        if is_member:
            self.view = view
        return True

    def _tell(self, view: View, previous: View | None) -> None:
        """To those of the view before, what changed; to others, all of it."""
        whole = Decided(view)
        change = DecidedDelta(delta_of(previous, view)) if previous is not None else whole
        known = previous.keys if previous is not None else frozenset()
        for record in self._membership.others():
            if not record.ended:
                self._out.send(record.member, change if record.member.key in known else whole)

    def notice_eviction(self) -> None:
        """Out is who is fenced, missing in a view newer than one it was in, or told that others count it as gone."""
        newest, own = self._agreement.view, self._membership.own
        if newest is None or self.evicted:
            return
        if own.status is Status.FENCED:
            self._evict(f"this node was counted out while it was not heard from ({own.reason})")
        elif own.member.key not in newest.keys and (self.view is not None or own.status is Status.GONE):
            self._evict(f"the run went on without this node (view {newest.epoch}: {newest.reason})")

    def _evict(self, reason: str) -> None:
        self.evicted = True
        self._out.put(Evicted(reason))

    def end(self, verdict: Verdict) -> None:
        """The run is over; everybody is told."""
        if self.verdict is None:
            self.verdict = verdict
            self._out.put(JobEnded(verdict))
            for record in self._membership.live():
                self._out.send(record.member, Ended(verdict))

    def quorate(self) -> bool:
        """Is this node in the newest view it knows, and are enough of its members beyond suspicion to decide the
        next?
        """
        view, me = self._agreement.view, self._membership.me.key
        if view is None or self.evicted or me not in view.keys:
            return False
        alive = {key for key, record in self._membership.records.items() if record.status is Status.ALIVE}
        return self._agreement.has_quorum(alive | {me})
