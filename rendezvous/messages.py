"""What nodes say to each other: message values without their bytes.

Flows in: fields. Flows out: frozen values; those that contain others know their plain form.
Invariants: `from_plain` takes untrusted input and raises ValueError for anything that is not exactly right.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from rendezvous.plain import (
    MAX_NAME_CHARS,
    counter_from,
    flag_from,
    list_from,
    optional,
    table_from,
    text_from,
    to_plain,
)
from rendezvous.types import Member, MemberKey, Verdict, View, key_from
from rendezvous.view_delta import ViewDelta


class Status(enum.IntEnum):
    """What a member is thought to be. At equal refutation numbers the greater one is the news."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2  # silent for too long: may still refute, keeps its vote
    LEFT = 3  # said good-bye, for ever: proposes nothing more, votes as long as it is there
    GONE = 4  # proven dead, or voted out: for ever
    FENCED = 5  # gone, and somebody outside guarantees that nothing it began goes on: its vote is not missed


class Standing(enum.IntEnum):
    """What a member can say to an operator who wants another one counted as gone."""

    ANSWERS = 0  # it is alive here: nobody may assume its death
    UNCLEAR = 1  # suspected: ask again
    SILENT = 2  # for long enough: assume its death if you know of it
    ASSUMED_DEAD = 3
    UNKNOWN = 4  # nothing waits for such a member here


@dataclass(frozen=True, slots=True)
class Update:
    """One member's status as somebody sees it. `proof`: certain (the member votes no more); `origin`: who says so."""

    member: Member
    status: Status
    refutation: int
    reason: str
    proof: bool
    origin: str

    def to_plain(self) -> list[Any]:
        return [self.member.to_plain(), int(self.status), self.refutation, self.reason, self.proof, self.origin]

    @staticmethod
    def from_plain(value: object) -> Update:
        member, status, refutation, reason, proof, origin = list_from(value, "an update", 6)
        return Update(
            Member.from_plain(member),
            Status(status),
            counter_from(refutation, "a refutation"),
            text_from(reason, "a reason"),
            flag_from(proof),
            text_from(origin, "an origin", MAX_NAME_CHARS),
        )


class Ballot(NamedTuple):
    """Totally ordered; unique because each proposer uses a number once."""

    number: int
    proposer: MemberKey


@dataclass(frozen=True, slots=True)
class Accepted:
    """What an acceptor holds: the value and the ballot it came with."""

    ballot: Ballot
    view: View

    def to_plain(self) -> list[Any]:
        return [to_plain(self.ballot), self.view.to_plain()]

    @staticmethod
    def from_plain(value: object) -> Accepted:
        ballot, view = list_from(value, "an accepted value", 2)
        return Accepted(ballot_from(ballot), View.from_plain(view))


@dataclass(frozen=True, slots=True)
class Beat:
    """The part common to all heartbeats. `epoch`: newest view known to the sender; `refutation`: its own."""

    epoch: int
    refutation: int
    updates: tuple[Update, ...] = ()
    verdict: Verdict | None = None
    progress: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def to_plain(self) -> list[Any]:
        return [self.epoch, self.refutation, to_plain(self.updates), to_plain(self.verdict), dict(self.progress)]

    @staticmethod
    def from_plain(value: object) -> Beat:
        epoch, refutation, updates, verdict, progress = list_from(value, "a beat", 5)
        return Beat(
            counter_from(epoch, "an epoch"),
            counter_from(refutation, "a refutation"),
            updates_from(updates),
            optional(Verdict.from_plain)(verdict),
            table_from(progress, "progress"),
        )


def ballot_from(value: object) -> Ballot:
    number, proposer = list_from(value, "a ballot", 2)
    return Ballot(counter_from(number, "a ballot's number"), key_from(proposer))


def updates_from(value: object) -> tuple[Update, ...]:
    return tuple(Update.from_plain(item) for item in list_from(value, "updates"))


@dataclass(frozen=True, slots=True)
class Join:
    """I exist. Sent to contacts, and to whoever seems not to know the sender."""

    member: Member


@dataclass(frozen=True, slots=True)
class JoinRefused:
    reason: str


@dataclass(frozen=True, slots=True)
class Sync:
    """The sender's whole table and newest view; `reply` asks for the same in return."""

    updates: tuple[Update, ...]
    view: View | None
    verdict: Verdict | None
    reply: bool


@dataclass(frozen=True, slots=True)
class TableDigest:
    """Who has another digest answers with its table, and asks for the sender's."""

    digest: int


@dataclass(frozen=True, slots=True)
class Ping:
    seq: int
    beat: Beat


@dataclass(frozen=True, slots=True)
class Ack:
    seq: int
    beat: Beat


@dataclass(frozen=True, slots=True)
class PingRequest:
    seq: int
    target: MemberKey


@dataclass(frozen=True, slots=True)
class IndirectAck:
    seq: int
    target: MemberKey


@dataclass(frozen=True, slots=True)
class Gossip:
    updates: tuple[Update, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    epoch: int
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Promise:
    """`votes` is false from a member that is no voter of this epoch: it only tells its `data`."""

    epoch: int
    ballot: Ballot
    votes: bool
    accepted: Accepted | None
    data: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Accept:
    epoch: int
    ballot: Ballot
    view: View


@dataclass(frozen=True, slots=True)
class AcceptDelta:
    """An Accept for who holds the view before."""

    epoch: int
    ballot: Ballot
    delta: ViewDelta


@dataclass(frozen=True, slots=True)
class AcceptedVote:
    epoch: int
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Reject:
    """The acceptor is bound to `promised`, which is higher than `ballot`."""

    epoch: int
    ballot: Ballot
    promised: Ballot


@dataclass(frozen=True, slots=True)
class Decided:
    view: View


@dataclass(frozen=True, slots=True)
class DecidedDelta:
    """A Decided for who holds the view before; others ask for the view."""

    delta: ViewDelta


@dataclass(frozen=True, slots=True)
class ViewWanted:
    """Tell me your newest view if it is newer than `epoch`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A member asks for the epoch after `epoch`, and why."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class AppMessage:
    kind: str
    body: Any = field(hash=False)


@dataclass(frozen=True, slots=True)
class StoreCall:
    """One operation for the receiver's shard of `round`. (sender, call) is unique: a repeated call is done once."""

    call: int
    round: int
    op: str
    args: list[Any] = field(hash=False)
    deadline_s: float


@dataclass(frozen=True, slots=True)
class StoreResult:
    call: int
    ok: bool
    value: Any = field(hash=False)
    error: str
    ended: bool
    timed_out: bool


@dataclass(frozen=True, slots=True)
class Fence:
    """An operator, who is no member, guarantees that `name` is gone. `sure` is false while it only asks about it."""

    name: str
    reason: str
    sure: bool


@dataclass(frozen=True, slots=True)
class FenceAnswer:
    """What the receiver of a Fence knows of `name`, or did, in words."""

    name: str
    standing: Standing
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """Somebody who is no member, but has the run's key, asks the receiver's application for something."""

    kind: str
    body: Any = field(hash=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the application says; `kind` is the question's."""

    kind: str
    body: Any = field(hash=False)


Message: TypeAlias = (
    Join
    | JoinRefused
    | Sync
    | Ping
    | Ack
    | PingRequest
    | IndirectAck
    | Gossip
    | Prepare
    | Promise
    | Accept
    | AcceptedVote
    | Reject
    | Decided
    | ViewWanted
    | Wanted
    | Ended
    | AppMessage
    | StoreCall
    | StoreResult
    | Fence
    | FenceAnswer
    | Question
    | Answer
    | TableDigest
    | AcceptDelta
    | DecidedDelta
)
