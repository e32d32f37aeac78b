"""How members come to know each other. Pure.

Flows in: the contact list, joins of others, messages of strangers. Flows out: joins, refusals, new records.
Invariants: a name belongs to one live member; a new incarnation at the address of an old one proves that one's death;
an incarnation that is out stays out.
Limits: contacts that are no live members are asked for ever (less and less often), because that is how two groups that
formed around different contacts find each other.
"""

from __future__ import annotations

from rendezvous.config import Timing
from rendezvous.detector import Detector
from rendezvous.effects import Outbox, Send, Waiting
from rendezvous.events import Contacts
from rendezvous.membership import Membership
from rendezvous.messages import Decided, Gossip, Join, JoinRefused, Status, Update
from rendezvous.types import Member, View
from rendezvous.wire import Envelope

_MAX_INTRODUCED = 1024


class Joining:
    """Asks contacts to be taken in, and takes others in. Owned by the core."""

    def __init__(self, membership: Membership, detector: Detector, timing: Timing, out: Outbox, now: float) -> None:
        self._membership = membership
        self._detector = detector
        self._timing = timing
        self._out = out
        self._contacts = Contacts(())
        self._started_s = self._next_s = now
        self._interval_s = timing.probe_interval_s
        self._introduced_s: dict[str, float] = {}
        self._is_refused = False
        self._has_met = False  # anybody: who lost the others has another reason to wait, which is not hidden

    def read(self, contacts: Contacts, now: float) -> None:
        """The contact list as it reads now."""
        self._contacts = contacts
        self._next_s = now

    def refused(self, by: str, reason: str) -> None:
        """A contact did answer."""
        self._is_refused = True
        self._out.put(Waiting(f"{by} refuses this node: {reason}"))

    def tick(self, now: float) -> None:
        """Introduce this node to every contact that is no known live member."""
        if now < self._next_s:
            return
        membership = self._membership
        known = {record.member.address for record in membership.live()} | {membership.me.address}
        missing = [address for address in self._contacts.addresses if address not in known]
        for address in missing:
            self._out.put(Send(address, None, Join(membership.me)))
        if len(known) > 1:
            self._has_met = True
            self._interval_s = min(2 * self._interval_s, self._timing.failure_s)
        self._next_s = now + self._interval_s
        late = now - self._started_s > self._timing.failure_s
        if late and not (self._has_met or self._is_refused) and (missing or self._contacts.problems):
            listed = ", ".join((*missing, *self._contacts.problems))
            self._out.put(
                Waiting(
                    f"no contact answers ({listed}): waiting for one; check addresses and firewalls, and that all "
                    "nodes have the same run id and key"
                )
            )

    def introduce(self, address: str, now: float) -> None:
        """Somebody there does not know this node, or takes it for its predecessor; not more often than needed."""
        if now >= self._introduced_s.get(address, now):
            if len(self._introduced_s) >= _MAX_INTRODUCED:
                self._introduced_s.clear()
            self._introduced_s[address] = now + self._timing.resend_s
            self._out.put(Send(address, None, Join(self._membership.me)))

    def receive(self, member: Member, envelope: Envelope, newest: View | None, now: float) -> bool:
        """Somebody wants in. True if it is (now) a member and should get the table."""
        if member.key != envelope.sender or member.address != envelope.address:
            return False
        known = self._membership.records.get(member.key)
        if known is not None and known.ended:
            if newest is not None:
                self._out.send(member, Decided(newest))
            self._out.send(member, Gossip((known.update(),)))
            self._out.send(member, JoinRefused(f"this incarnation is out ({known.reason}); start the agent anew"))
            return False
        if self.refuses_name(member, now):
            return False
        self._replace_predecessors(member, now)
        if known is None:
            news = Update(member, Status.ALIVE, 0, "", False, self._membership.me.name)
            self._membership.apply(news, now, first_hand=True)
        return True

    def refuses_name(self, member: Member, now: float) -> bool:
        """Refuse a name that a live member has at another address. A dead one's name is free, a silent one's soon."""
        for record in self._membership.records.values():
            other = record.member
            if other.name != member.name or other.key == member.key or record.status >= Status.DEAD:
                continue
            if other.address != member.address or record is self._membership.own:
                reason = f"its name is taken by a live member at {other.address}; names must be unique"
                self._out.send(member, JoinRefused(reason))
                self._detector.urgent(other.key, now)
                return True
        return False

    def _replace_predecessors(self, member: Member, now: float) -> None:
        """Two processes cannot listen at one address of one host: who was there before is dead."""
        for record in self._membership.at(member.address):
            if record.member.key != member.key:
                reason = f"replaced by {member.key} at its address"
                proof = record.member.host_owned
                self._membership.judge(record.member.key, Status.GONE, reason, now, proof=proof)
