"""Why a new view is wanted, and whose turn it is to propose it. Pure.

Flows in: the membership table, the newest view, requests of members. Flows out: calls of `Agreement.propose`, and the
sentences that become a view's reason.
Invariants: a motive lasts until it is true no more or an epoch was decided; the first live member in the view's order
proposes at once, the n-th n staggers later; only members of the newest view propose (before the first: everybody).
"""

from __future__ import annotations

from collections.abc import Container

from rendezvous.agreement import Agreement
from rendezvous.config import Config
from rendezvous.effects import Outbox, Waiting
from rendezvous.membership import Membership
from rendezvous.messages import Decided, Status, Wanted
from rendezvous.types import Member, MemberKey, Role, View
from rendezvous.views import natural

_MAX_REQUESTS = 16


class Motives:
    """Watches for reasons to decide. Owned by the core and asked after every event."""

    def __init__(self, membership: Membership, agreement: Agreement, config: Config, out: Outbox, now: float) -> None:
        self._membership = membership
        self._agreement = agreement
        self._config = config
        self._timing = config.timing
        self._out = out
        self._is_stranger_known = False
        self._requests: list[str] = []
        self._own_requests: list[str] = []
        self._resend_s = now
        self._since_s: float | None = None
        self._enough_since_s: float | None = None
        self._now = now
        # What was found last, what it was found from, and until when it holds if nothing changes.
        self._found = False
        self._found_from: tuple[int, int, int] | None = None
        self._holds_until_s = now
        self._turn_s_from: tuple[float, int, int] | None = None
        self._found_turn_s = now

    def request(self, reason: str, now: float) -> None:
        """The application of this node asks for the next epoch."""
        self._note(reason)
        if reason not in self._own_requests:
            self._own_requests.append(reason)
        self._resend(now)

    def _note(self, reason: str) -> None:
        if reason not in self._requests and len(self._requests) < _MAX_REQUESTS:
            self._requests.append(reason)

    def wanted_by(self, sender: Member, message: Wanted, now: float) -> None:
        """Another member asks. One that asks for an epoch already decided is told the decision."""
        self._now = now
        view = self._agreement.view
        if view is not None and message.epoch < view.epoch:
            self._out.send(sender, Decided(view))
        elif view is not None and message.epoch == view.epoch and sender.key in view.keys:
            self._note(message.reason)

    def turned_away(self) -> None:
        """A connection without the right key: perhaps a node that is missed here."""
        if not self._is_stranger_known:
            self._is_stranger_known, self._found_from = True, None

    def reset(self, now: float) -> None:
        """An epoch was decided: requests for it are void, other motives are found again if they still hold."""
        self._now = now
        self._requests.clear()
        self._own_requests.clear()
        self._since_s = None

    def next_deadline_s(self) -> float:
        idle = self._since_s is None or self._agreement.proposal is not None or self._blocked()
        if idle or not self._agreement.is_voter():
            return float("inf")
        return self._may_start_s()

    def act(self, now: float) -> None:
        """Propose if there is a motive and it is this node's turn."""
        self._now = now
        if self._own_requests and now >= self._resend_s:
            self._resend(now)
        if not self._agreement.is_voter():
            return
        if not self._is_any():
            self._since_s = None
            return
        if self._since_s is None:
            self._since_s = now
        may_start = self._agreement.proposal is None and not self._blocked()
        if may_start and now >= self._may_start_s():
            self._agreement.propose(self.reasons, now)

    def _is_any(self) -> bool:
        """Are there reasons? Looked for again only when something changed or time alone can change the answer."""
        source = self._membership.version, self._agreement.epoch, len(self._requests)
        if source != self._found_from or self._now >= self._holds_until_s:
            self._holds_until_s = float("inf")
            self._found, self._found_from = bool(self.reasons()), source
        return self._found

    def reasons(self, answered: Container[MemberKey] = ()) -> list[str]:
        """What speaks for a new view now, as sentences; empty: nothing does. Who just `answered` is not silent."""
        view = self._agreement.view
        if view is None:
            return self._first_view_reasons()
        found = list(self._requests)
        records = self._membership.records
        for member in view.members:
            record = records.get(member.key)
            if record is not None and record.status is Status.LEFT:
                found.append(f"{member.name} left: {record.reason}")
            elif record is not None and not record.live and (record.ended or member.key not in answered):
                dead = f"{member.name} is dead: {record.reason}"
                already = f"node {member.name} is gone: {record.reason}" in self._requests
                found += [] if already else [dead]
        found += [f"{member.name} joined" for member in self._settled_candidates(view, answered)]
        return found

    def _settled_candidates(self, view: View, answered: Container[MemberKey]) -> list[Member]:
        """New members, once they are here for a moment: those that come together enter together. A view has no place
        for one whose name another member has that lives.
        """
        records, members = self._membership.records, view.keys
        taken = {key.name for key in members if key in answered or (key in records and records[key].live)}
        settled_s = self._now - self._timing.probe_interval_s
        new = [r for key, r in records.items() if key not in members and r.live and key.name not in taken]
        waiting = [r.since_s + self._timing.probe_interval_s for r in new if r.since_s > settled_s]
        self._holds_until_s = min([self._holds_until_s, *waiting])
        return [r.member for r in new if r.since_s <= settled_s]

    def _first_view_reasons(self) -> list[str]:
        config = self._config
        nodes = self._membership.candidates(Role.NODE, frozenset())
        witnesses = self._membership.candidates(Role.WITNESS, frozenset())
        found = f"{len(nodes)} of {config.num_nodes_min}"
        if config.num_nodes_max != config.num_nodes_min:
            found += f" to {config.num_nodes_max}"
        if len(nodes) < config.num_nodes_min:
            self._enough_since_s = None
            stranger = "; somebody was turned away here for another run id or key: check that all nodes have the same"
            hint = stranger if self._is_stranger_known else ""
            self._out.put(Waiting(f"{found} training nodes joined: waiting for the others{hint}"))
            return []
        if self._enough_since_s is None:
            self._enough_since_s = self._now
        wanted_nodes = config.num_nodes_max + config.num_spares_expected
        complete = len(nodes) >= wanted_nodes and len(witnesses) >= config.num_witnesses_expected
        if complete or self._now >= self._enough_since_s + config.first_view_last_call_s:
            return ["the run starts"]
        self._holds_until_s = min(self._holds_until_s, self._enough_since_s + config.first_view_last_call_s)
        witnesses_too = (
            f" and {len(witnesses)} of {config.num_witnesses_expected} witnesses"
            if config.num_witnesses_expected
            else ""
        )
        self._out.put(
            Waiting(
                f"{len(nodes)} of {wanted_nodes} nodes{witnesses_too} joined: last call of "
                f"{config.first_view_last_call_s:g} s for the others"
            )
        )
        return []

    def _may_start_s(self) -> float:
        return max(self._turn_s(), self._agreement.retry_s, self._agreement.rival_until_s())

    def _turn_s(self) -> float:
        """When this node proposes, if nobody did by then."""
        assert self._since_s is not None
        source = self._since_s, self._membership.version, self._agreement.epoch
        if source != self._turn_s_from:
            self._turn_s_from, self._found_turn_s = source, self._find_turn_s()
        return self._found_turn_s

    def _find_turn_s(self) -> float:
        assert self._since_s is not None
        records = self._membership.records
        me = self._membership.me
        view = self._agreement.view
        if view is not None:
            order = list(view.members)
        else:
            order = sorted((r.member for r in records.values()), key=lambda m: (natural(m.name), m.key))
        live = [m.key for m in order if m.key == me.key or (m.key in records and records[m.key].status is Status.ALIVE)]
        return self._since_s + live.index(me.key) * self._timing.stagger_s

    def _blocked(self) -> bool:
        """The last plan could not fill the places, and no member's status changed since."""
        return self._agreement.blocked_at == self._membership.version and self._agreement.accepted is None

    def _resend(self, now: float) -> None:
        self._resend_s = now + self._timing.resend_s
        view = self._agreement.view
        if view is None:
            return
        for record in self._membership.live():
            if record.member.key in view.keys:
                for reason in self._own_requests:
                    self._out.send(record.member, Wanted(view.epoch, reason))
