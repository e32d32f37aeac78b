"""Messages and their bytes.

Flows in: envelopes, or bytes from the network. Flows out: bytes, or an `Envelope`.
Invariants: tags are append-only, they are the protocol; whatever bytes come in, `decode` returns an envelope of exactly
checked fields or raises `WireError`; `decode(encode(e)) == e`.
Limits: one message is at most MAX_MESSAGE_BYTES; MessagePack only (no object construction from the network).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from rendezvous.messages import (
    Accept,
    AcceptDelta,
    Accepted,
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
    Standing,
    StoreCall,
    StoreResult,
    Sync,
    TableDigest,
    ViewWanted,
    Wanted,
    ballot_from,
    updates_from,
)
from rendezvous.plain import (
    MAX_NAME_CHARS,
    count_from,
    flag_from,
    list_from,
    optional,
    seconds_from,
    table_from,
    text_from,
    to_plain,
)
from rendezvous.types import Member, MemberKey, Verdict, View, address_from, key_from
from rendezvous.view_delta import ViewDelta

PROTOCOL = 1
MAX_MESSAGE_BYTES = 16 * 2**20
MAX_BALLOT_BYTES = 64 * 2**10
MAX_PROGRESS_BYTES = 2**10


class WireError(ValueError):
    """Bytes that are no message of this protocol."""


def _number(value: object) -> int:
    return count_from(value, "a number")


def _text(value: object) -> str:
    return text_from(value, "a text")


def _name(value: object) -> str:
    return text_from(value, "a member's name", MAX_NAME_CHARS)


def _standing(value: object) -> Standing:
    return Standing(count_from(value, "a standing"))


def _table(value: object) -> dict[str, Any]:
    return table_from(value, "a table")


def _list(value: object) -> list[Any]:
    return list_from(value, "a list", limit=2**20)


def _any(value: object) -> Any:
    return value


# tag = position + 1. Append only: a tag that was ever released keeps its meaning.
_MESSAGES: tuple[tuple[type[Any], tuple[Callable[[object], Any], ...]], ...] = (
    (Join, (Member.from_plain,)),
    (JoinRefused, (_text,)),
    (Sync, (updates_from, optional(View.from_plain), optional(Verdict.from_plain), flag_from)),
    (Ping, (_number, Beat.from_plain)),
    (Ack, (_number, Beat.from_plain)),
    (PingRequest, (_number, key_from)),
    (IndirectAck, (_number, key_from)),
    (Gossip, (updates_from,)),
    (Prepare, (_number, ballot_from)),
    (Promise, (_number, ballot_from, flag_from, optional(Accepted.from_plain), _table)),
    (Accept, (_number, ballot_from, View.from_plain)),
    (AcceptedVote, (_number, ballot_from)),
    (Reject, (_number, ballot_from, ballot_from)),
    (Decided, (View.from_plain,)),
    (ViewWanted, (_number,)),
    (Wanted, (_number, _text)),
    (Ended, (Verdict.from_plain,)),
    (AppMessage, (_text, _any)),
    (StoreCall, (_number, _number, _text, _list, seconds_from)),
    (StoreResult, (_number, flag_from, _any, _text, flag_from, flag_from)),
    (Fence, (_name, _text, flag_from)),
    (FenceAnswer, (_name, _standing, _text)),
    (Question, (_text, _any)),
    (Answer, (_text, _any)),
    (TableDigest, (_number,)),
    (AcceptDelta, (_number, ballot_from, ViewDelta.from_plain)),
    (DecidedDelta, (ViewDelta.from_plain,)),
)
_TAGS: dict[type[Any], int] = {kind: index + 1 for index, (kind, _) in enumerate(_MESSAGES)}
_FIELDS = {kind: tuple(spec.name for spec in dataclasses.fields(kind)) for kind, _ in _MESSAGES}


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
    return _frame(envelope, _pack_fields(envelope.message))


class Encoder:
    """`encode`, for who sends one large message to many: its fields are packed once."""

    def __init__(self) -> None:
        self._message: Message | None = None
        self._fields = b""

    def encode(self, envelope: Envelope) -> bytes:
        if envelope.message is not self._message:
            self._fields = _pack_fields(envelope.message)
            self._message = envelope.message
        return _frame(envelope, self._fields)


def _pack_fields(message: Message) -> bytes:
    fields = [to_plain(getattr(message, name)) for name in _FIELDS[type(message)]]
    return pack(fields, MAX_MESSAGE_BYTES, f"a {type(message).__name__} message")


def _frame(envelope: Envelope, fields: bytes) -> bytes:
    """The array of the seven parts of the head and the fields, which are packed already."""
    message, to = envelope.message, envelope.to
    head = [PROTOCOL, envelope.run_id, envelope.nonce, envelope.sender, envelope.address, to, _TAGS[type(message)]]
    packer = msgpack.Packer(use_bin_type=True, autoreset=False)
    packer.pack_array_header(len(head) + 1)
    for part in head:
        packer.pack(part)
    frame: bytes = packer.bytes() + fields
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a {type(message).__name__} message has {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
        )
    return frame


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
            None if to is None else key_from(to),
            kind(*(decoder(item) for decoder, item in zip(decoders, items, strict=True))),
        )
    except WireError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, RecursionError, OverflowError) as error:
        raise WireError(f"not a message: {error}") from error
