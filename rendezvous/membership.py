"""Who is alive, suspect, dead, gone: the table every node keeps, and how news changes it. Pure: no I/O, no clock.

Flows in: updates (own judgements and gossip), with the time. Flows out: the table, `Changed` effects, updates to
gossip.
Invariants: LEFT, GONE and FENCED are for ever and only get worse; otherwise the higher refutation number wins and at
equal numbers the worse status; only a member itself raises its refutation number. So tables that saw the same updates
in any order are equal.
Limits: records of gone members are kept (late gossip must not revive them), at most MAX_GONE of them. In a group of
more than BROADCAST_LIMIT, who has news does not send it to everybody: it is handed on (rumours.py).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from rendezvous.effects import Changed, Outbox
from rendezvous.messages import Gossip, Status, Update
from rendezvous.plain import MAX_COUNTER
from rendezvous.suspicion import EXPECTED_CONFIRMATIONS, Suspicion
from rendezvous.types import Change, Member, MemberChange, MemberKey, Role

MAX_GONE = 2048
BROADCAST_LIMIT = 32
_PIGGYBACK = 8
_NO_PROGRESS: Mapping[str, Any] = {}
_DIGEST_MASK = 2**63 - 1
_CHANGES = {
    Status.ALIVE: Change.ALIVE,
    Status.SUSPECT: Change.SUSPECT,
    Status.DEAD: Change.DEAD,
    Status.LEFT: Change.LEFT,
    Status.GONE: Change.DEAD,
    Status.FENCED: Change.DEAD,
}


@dataclass(slots=True)
class Record:
    """What is known about one member. `heard_s`: last message from itself."""

    member: Member
    status: Status
    refutation: int
    reason: str
    proof: bool
    origin: str
    since_s: float
    heard_s: float
    progress: Mapping[str, Any] = field(default_factory=lambda: _NO_PROGRESS)
    progress_s: float = 0.0
    suspicion: Suspicion | None = None

    @property
    def ended(self) -> bool:
        return self.status >= Status.LEFT

    @property
    def live(self) -> bool:
        return self.status <= Status.SUSPECT

    def update(self) -> Update:
        return Update(self.member, self.status, self.refutation, self.reason, self.proof, self.origin)


class Membership:
    """The table. Its owner is the core; `version` grows with each change of a status.

    `suspects` are the records with a suspicion. Sums over the table are kept up to date, so that none is made anew for
    each message.
    """

    def __init__(self, me: Member, out: Outbox, now: float) -> None:
        self.me = me
        self.version = 0
        self.suspects: dict[MemberKey, Record] = {}
        self.digest = 0
        self._counts = [0] * len(Status)
        self._gone: set[MemberKey] = set()
        self._fenced: set[MemberKey] = set()
        self._out = out
        self.own = Record(me, Status.ALIVE, 0, "", False, me.name, now, now)
        self.records: dict[MemberKey, Record] = {me.key: self.own}
        self._news: dict[MemberKey, tuple[Update, int]] = {}
        self.refuted = 0
        self._enter(self.own)

    def others(self) -> Iterator[Record]:
        """Every record but the own one."""
        own = self.own
        return (record for record in self.records.values() if record is not own)

    def live(self) -> list[Record]:
        """Other members that are alive or suspect."""
        return [record for record in self.others() if record.status <= Status.SUSPECT]

    def num_live(self) -> int:
        return self._counts[Status.ALIVE] + self._counts[Status.SUSPECT]

    def num_silent(self) -> int:
        """Members whose suspicion has grown old."""
        return self._counts[Status.DEAD]

    def num_alive(self) -> int:
        """Members that are not even suspected, this one included."""
        return self._counts[Status.ALIVE]

    def gone(self) -> AbstractSet[MemberKey]:
        """Members that certainly never propose again, as far as is proven. Read only."""
        return self._gone

    def fenced(self) -> AbstractSet[MemberKey]:
        """Members whose votes are not missed because somebody outside vouches for their end. Read only."""
        return self._fenced

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def _enter(self, record: Record) -> None:
        """Count a record in. Its status, refutation and proof change only between `_withdraw` and this."""
        key = record.member.key
        self._counts[record.status] += 1
        self.digest = (self.digest + _fingerprint(record)) & _DIGEST_MASK
        if record.ended and record.proof:
            self._gone.add(key)
        if record.status is Status.FENCED:
            self._fenced.add(key)
        if record.suspicion is not None:
            self.suspects[key] = record
        self.version += 1

    def _withdraw(self, record: Record) -> None:
        key = record.member.key
        self._counts[record.status] -= 1
        self.digest = (self.digest - _fingerprint(record)) & _DIGEST_MASK
        self._gone.discard(key)
        self._fenced.discard(key)
        self.suspects.pop(key, None)

    def at(self, address: str) -> list[Record]:
        return [record for record in self.others() if record.member.address == address and not record.ended]

    def table(self) -> tuple[Update, ...]:
        return tuple(record.update() for record in self.records.values())

    def apply(self, update: Update, now: float, *, first_hand: bool = False) -> bool:
        """Take in one update; True if it was news. First-hand news is told to all at once, other news is passed on."""
        key = update.member.key
        if key == self.me.key:
            return self._about_myself(update)
        record = self.records.get(key)
        if record is None:
            if sum(self._counts[Status.LEFT :]) >= MAX_GONE:
                self._drop_oldest_gone()
            record = Record(
                update.member,
                update.status,
                update.refutation,
                update.reason,
                update.proof,
                update.origin,
                now,
                now,
            )
            self.records[key] = record
            if not record.ended:
                self._changed(record, Change.JOINED)
        elif not self._newer(update, record):
            return self._confirms(update, record) and self._spread(record, first_hand)
        else:
            self._withdraw(record)
            before = record.status
            record.status, record.refutation, record.reason = update.status, update.refutation, update.reason
            record.proof, record.origin = update.proof, update.origin
            if before is update.status:
                self._enter(record)
                return self._spread(record, first_hand)
            record.since_s = now
            if before < Status.LEFT:
                self._changed(record, _CHANGES[update.status])
        record.suspicion = Suspicion(now, {update.origin}) if record.status is Status.SUSPECT else None
        self._enter(record)
        return self._spread(record, first_hand)

    def lives(self, record: Record, refutation: int, now: float) -> None:
        """A member says itself that it lives."""
        if refutation > record.refutation or record.status is not Status.ALIVE:  # else it is no news
            self.apply(Update(record.member, Status.ALIVE, refutation, "", False, record.member.name), now)

    def judge(
        self, key: MemberKey, status: Status, reason: str, now: float, *, proof: bool = False, at_once: bool = True
    ) -> bool:
        """This node's own finding about another member, told to all `at_once` or along with what is sent anyway."""
        record = self.records[key]
        update = Update(record.member, status, record.refutation, reason, proof, self.me.name)
        return self.apply(update, now, first_hand=at_once)

    def leave(self, reason: str) -> None:
        """Announce the own departure. This node still votes, so that the others can decide to go on without it."""
        self._withdraw(self.own)
        self.own.status, self.own.reason, self.own.proof = Status.LEFT, reason, True
        self._enter(self.own)
        self._spread(self.own, True)

    def take_news(self, limit: int = _PIGGYBACK) -> tuple[Update, ...]:
        """Updates to send along with the next message, in turn; each goes out O(log n) times."""
        if not self._news:
            return ()
        chosen = list(itertools.islice(self._news.items(), limit))
        for key, (update, num_left) in chosen:
            del self._news[key]
            if num_left > 1:
                self._news[key] = (update, num_left - 1)  # behind the others
        return tuple(update for _, (update, _) in chosen)

    def candidates(self, role: Role, members: frozenset[MemberKey]) -> list[Member]:
        """Live members of a role that are in none of `members`."""
        return [r.member for k, r in self.records.items() if r.live and r.member.role is role and k not in members]

    def _about_myself(self, update: Update) -> bool:
        if update.status is Status.ALIVE or update.status <= self.own.status:
            return False
        if update.status >= Status.LEFT:
            self._withdraw(self.own)
            self.own.status, self.own.reason = max(self.own.status, update.status), update.reason
            self._enter(self.own)
            return True
        if self.own.refutation <= update.refutation < MAX_COUNTER:
            self._withdraw(self.own)
            self.own.refutation = update.refutation + 1
            self._enter(self.own)
            self.refuted += 1
            self._spread(self.own, True)
        return True

    @staticmethod
    def _newer(update: Update, record: Record) -> bool:
        if update.status >= Status.LEFT or record.ended:
            return update.status > record.status
        return (update.refutation, update.status) > (record.refutation, record.status)

    @staticmethod
    def _confirms(update: Update, record: Record) -> bool:
        """Another member suspects the same life sign: shortens the suspicion, if there were not enough before."""
        if record.suspicion is None or update.status is not Status.SUSPECT or update.refutation != record.refutation:
            return False
        accusers = record.suspicion.accusers
        if update.origin in accusers or len(accusers) > EXPECTED_CONFIRMATIONS:
            return False
        accusers.add(update.origin)
        record.origin = update.origin
        return True

    def _changed(self, record: Record, kind: Change) -> None:
        self._out.put(Changed(MemberChange(kind, record.member, record.reason, record.proof)))

    def _spread(self, record: Record, first_hand: bool) -> bool:
        update = record.update()
        self._news[record.member.key] = (update, 3 * math.ceil(math.log2(len(self.records) + 1)))
        if first_hand and self.num_live() <= BROADCAST_LIMIT:
            for other in self.live():
                if other is not record:
                    self._out.send(other.member, Gossip((update,)))
        return True

    def _drop_oldest_gone(self) -> None:
        ended = [(record.since_s, key) for key, record in self.records.items() if record.ended]
        self._withdraw(self.records.pop(min(ended)[1]))


def _fingerprint(record: Record) -> int:
    """Of what others must agree on about a member. Digests add them up, so the order of a table does not matter."""
    refutation = 0 if record.ended else record.refutation  # there it depends on the order in which news came
    text = f"{record.member.name}\0{record.member.incarnation}\0{record.status:d}\0{refutation}"
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()) & _DIGEST_MASK
