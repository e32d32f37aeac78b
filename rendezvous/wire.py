"""What travels between nodes: message values, and their bytes.

Flows in: message values, or bytes from the network. Flows out: bytes, or an `Envelope`.
Invariants: tags are append-only, they are the protocol; whatever bytes come in, `decode` returns an envelope of exactly
checked fields or raises `WireError`; `decode(encode(e)) == e`.
Limits: one message is at most MAX_MESSAGE_BYTES; MessagePack only (no object construction from the network).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgpack

from rendezvous.types import (
    MAX_NAME_CHARS,
    Member,
    MemberKey,
    Verdict,
    View,
    address_from,
    count_from,
    key_from,
    list_from,
    table_from,
    text_from,
)

PROTOCOL = 1
MAX_MESSAGE_BYTES = 16 * 2**20
MAX_BALLOT_BYTES = 64 * 2**10
MAX_PROGRESS_BYTES = 2**10

T = TypeVar("T")


class WireError(ValueError):
    """Bytes that are no message of this protocol."""


class Status(enum.IntEnum):
    """What a member is thought to be. At equal refutation numbers the greater one is the news."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2  # silent for too long: may still refute, keeps its vote
    LEFT = 3  # said good-bye, for ever: proposes nothing more, votes as long as it is there
    GONE = 4  # proven dead, or voted out: for ever
    FENCED = 5  # gone, and somebody outside guarantees that nothing it began goes on: its vote is not missed


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
            count_from(refutation, "a refutation"),
            text_from(reason, "a reason"),
            _flag(proof),
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
        return [_plain(self.ballot), self.view.to_plain()]

    @staticmethod
    def from_plain(value: object) -> Accepted:
        ballot, view = list_from(value, "an accepted value", 2)
        return Accepted(_ballot(ballot), View.from_plain(view))


@dataclass(frozen=True, slots=True)
class Beat:
    """The part common to all heartbeats. `epoch`: newest view known to the sender; `refutation`: its own."""

    epoch: int
    refutation: int
    updates: tuple[Update, ...] = ()
    verdict: Verdict | None = None
    progress: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def to_plain(self) -> list[Any]:
        return [self.epoch, self.refutation, _plain(self.updates), _plain(self.verdict), dict(self.progress)]

    @staticmethod
    def from_plain(value: object) -> Beat:
        epoch, refutation, updates, verdict, progress = list_from(value, "a beat", 5)
        return Beat(
            count_from(epoch, "an epoch"),
            count_from(refutation, "a refutation"),
            _updates(updates),
            _optional(Verdict.from_plain)(verdict),
            table_from(progress, "progress"),
        )


def _plain(value: Any) -> Any:
    if hasattr(value, "to_plain"):
        return value.to_plain()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("a flag must be a bool")
    return value


def _number(value: object) -> int:
    return count_from(value, "a number")


def _text(value: object) -> str:
    return text_from(value, "a text")


def _table(value: object) -> dict[str, Any]:
    return table_from(value, "a table")


def _list(value: object) -> list[Any]:
    return list_from(value, "a list", limit=2**20)


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1e9:
        raise ValueError("a duration must be a number of seconds")
    return float(value)


def _ballot(value: object) -> Ballot:
    number, proposer = list_from(value, "a ballot", 2)
    return Ballot(count_from(number, "a ballot's number"), key_from(proposer))


def _updates(value: object) -> tuple[Update, ...]:
    return tuple(Update.from_plain(item) for item in list_from(value, "updates"))


def _optional(decoder: Callable[[object], T]) -> Callable[[object], T | None]:
    return lambda value: None if value is None else decoder(value)


def _any(value: object) -> Any:
    return value


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


# tag = position + 1. Append only: a tag that was ever released keeps its meaning.
_MESSAGES: tuple[tuple[type[Any], tuple[Callable[[object], Any], ...]], ...] = (
    (Join, (Member.from_plain,)),
    (JoinRefused, (_text,)),
    (Sync, (_updates, _optional(View.from_plain), _optional(Verdict.from_plain), _flag)),
    (Ping, (_number, Beat.from_plain)),
    (Ack, (_number, Beat.from_plain)),
    (PingRequest, (_number, key_from)),
    (IndirectAck, (_number, key_from)),
    (Gossip, (_updates,)),
    (Prepare, (_number, _ballot)),
    (Promise, (_number, _ballot, _flag, _optional(Accepted.from_plain), _table)),
    (Accept, (_number, _ballot, View.from_plain)),
    (AcceptedVote, (_number, _ballot)),
    (Reject, (_number, _ballot, _ballot)),
    (Decided, (View.from_plain,)),
    (ViewWanted, (_number,)),
    (Wanted, (_number, _text)),
    (Ended, (Verdict.from_plain,)),
    (AppMessage, (_text, _any)),
    (StoreCall, (_number, _number, _text, _list, _seconds)),
    (StoreResult, (_number, _flag, _any, _text, _flag, _flag)),
)
_TAGS: dict[type[Any], int] = {kind: index + 1 for index, (kind, _) in enumerate(_MESSAGES)}

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
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its frame. `nonce` is that of the sender's view ("" without one); `to` is None for an address
    only.
    """

    run_id: str
    nonce: str
    sender: MemberKey
    address: str
    to: MemberKey | None
    message: Message


def pack(value: Any, limit_bytes: int, what: str) -> bytes:
    """`value` as MessagePack; ValueError naming `what` if it cannot be or is longer than `limit_bytes`."""
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what} must consist of plain MessagePack values: {error}") from error
    if len(packed) > limit_bytes:
        raise ValueError(f"{what} has {len(packed)} bytes; at most {limit_bytes} are allowed")
    return packed


def encode(envelope: Envelope) -> bytes:
    """The bytes of a message; ValueError if it holds something that is not plain or too long."""
    message = envelope.message
    fields = [_plain(getattr(message, spec.name)) for spec in dataclasses.fields(message)]
    frame = [
        PROTOCOL,
        envelope.run_id,
        envelope.nonce,
        envelope.sender,
        envelope.address,
        envelope.to,
        _TAGS[type(message)],
        fields,
    ]
    return pack(frame, MAX_MESSAGE_BYTES, f"a {type(message).__name__} message")


def decode(frame: bytes) -> Envelope:
    """The message in `frame`; WireError for anything else. Never raises another exception, whatever the bytes."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"{len(frame)} bytes are more than a message may have")
    try:
        plain = msgpack.unpackb(frame, raw=False, strict_map_key=False)
        protocol, run_id, nonce, sender, address, to, tag, fields = list_from(plain, "a message", 8)
        if protocol != PROTOCOL:
            raise WireError(f"protocol {protocol!r} instead of {PROTOCOL}: all nodes must run the same version")
        kind, decoders = _MESSAGES[count_from(tag, "a tag", len(_MESSAGES)) - 1 if tag else len(_MESSAGES)]
        items = list_from(fields, kind.__name__, len(decoders))
        return Envelope(
            text_from(run_id, "a run id", MAX_NAME_CHARS),
            text_from(nonce, "a nonce", 64),
            key_from(sender),
            address_from(address),
            _optional(key_from)(to),
            kind(*(decoder(item) for decoder, item in zip(decoders, items, strict=True))),
        )
    except WireError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, RecursionError, OverflowError) as error:
        raise WireError(f"not a message: {error}") from error
