"""Messages and their bytes: nothing is lost on the way, and no bytes can do harm."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rendezvous import wire
from rendezvous.messages import (
    Accept,
    AcceptDelta,
    Accepted,
    AcceptedVote,
    Ack,
    Answer,
    AppMessage,
    Ballot,
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
    Status,
    StoreCall,
    StoreResult,
    Sync,
    TableDigest,
    Update,
    ViewWanted,
    Wanted,
)
from rendezvous.plain import MAX_COUNTER
from rendezvous.types import Member, Role, Verdict, View
from rendezvous.view_delta import ViewDelta
from rendezvous.wire import Encoder, Envelope, WireError, decode, encode

A = Member("node-a", 12, "10.0.0.1:4711", Role.NODE, 8, {"rack": "r1"}, True)
B = Member("b", 2**53, "[fe80::1]:1", Role.WITNESS, 0, {}, False)
VIEW = View("0123456789abcdef", 7, 3, (A,), (), (B,), "b joined", {"resume": [3, 100], "blob": b"\x00"})
DELTA = ViewDelta(8, 8, (((0, 1),), (B,), ()), "b joined", {"resume": [3, 100]})
BALLOT = Ballot(5, A.key)
VERDICT = Verdict(75, "retry here", B.key)
UPDATE = Update(B, Status.SUSPECT, 3, "no answer", False, "node-a")
BEAT = Beat(7, 2, (UPDATE,), VERDICT, {"step": 9, "age_s": 0.5})

MESSAGES: list[Message] = [
    Join(A),
    JoinRefused("taken"),
    Sync((UPDATE,), VIEW, VERDICT, True),
    Sync((), None, None, False),
    Ping(1, BEAT),
    Ack(2, Beat(0, 0)),
    PingRequest(3, A.key),
    IndirectAck(3, A.key),
    Gossip((UPDATE, UPDATE)),
    Prepare(8, BALLOT),
    Promise(8, BALLOT, True, Accepted(BALLOT, VIEW), {"x": [1, None]}),
    Promise(8, BALLOT, False, None, {}),
    Accept(7, BALLOT, VIEW),
    AcceptedVote(7, BALLOT),
    Reject(7, BALLOT, Ballot(6, B.key)),
    Decided(VIEW),
    ViewWanted(3),
    Wanted(3, "a worker died"),
    Ended(VERDICT),
    AppMessage("hello", {"any": [1, 2.5, b"x", None, True]}),
    StoreCall(4, 3, "set", ["key", b"value"], 1.5),
    StoreResult(4, False, None, "late", False, True),
    Fence("b", "the rack burnt down", True),
    TableDigest(2**63 - 1),
    AcceptDelta(8, BALLOT, DELTA),
    DecidedDelta(DELTA),
    FenceAnswer("b", Standing.ASSUMED_DEAD, "b is assumed dead"),
    Question("status", None),
    Answer("status", {"members": {"a": [1, 2.5, None]}}),
]


def envelope(message: Message, **more: Any) -> Envelope:
    return Envelope("run", "nonce", A.key, A.address, B.key, message, **more)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_survives_the_way_unchanged(message: Message) -> None:
    assert decode(encode(envelope(message))) == envelope(message)


def test_message_that_goes_to_many_has_the_same_bytes_as_alone() -> None:
    encoder = Encoder()
    for message in (Decided(VIEW), Decided(VIEW), Join(A), Decided(VIEW)):
        for to in (A.key, B.key, None):
            sent = Envelope("run", "nonce", A.key, A.address, to, message)
            assert encoder.encode(sent) == encode(sent)
            assert decode(encode(sent)) == sent


def test_every_kind_of_message_is_covered_here() -> None:
    assert {type(message) for message in MESSAGES} == {kind for kind, _ in wire._MESSAGES}


TOO_HIGH = MAX_COUNTER + 1


@pytest.mark.parametrize(
    "message",
    [
        Prepare(8, Ballot(TOO_HIGH, A.key)),
        Reject(7, BALLOT, Ballot(2**63 - 1, B.key)),
        Ping(1, Beat(TOO_HIGH, 0)),
        Ping(1, Beat(1, 2**63 - 1)),
        Gossip((Update(B, Status.SUSPECT, TOO_HIGH, "", False, "a"),)),
        Decided(dataclasses.replace(VIEW, epoch=TOO_HIGH)),
        DecidedDelta(dataclasses.replace(DELTA, epoch=TOO_HIGH)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_number_that_its_receiver_could_not_count_on_from_is_refused(message: Message) -> None:
    """Else one damaged number is adopted by everybody, and what they count on from it is refused by all."""
    with pytest.raises(WireError, match="integer between"):
        decode(encode(envelope(message)))


def test_tags_are_those_of_the_released_protocol() -> None:
    """Append to this list; never change what is in it."""
    released = (
        "Join JoinRefused Sync Ping Ack PingRequest IndirectAck Gossip Prepare Promise Accept AcceptedVote Reject "
        "Decided ViewWanted Wanted Ended AppMessage StoreCall StoreResult Fence FenceAnswer Question Answer "
        "TableDigest AcceptDelta DecidedDelta"
    )
    assert [kind.__name__ for kind, _ in wire._MESSAGES] == released.split()


def test_message_without_receiver_survives() -> None:
    sent = Envelope("run", "", A.key, A.address, None, Join(A))
    assert decode(encode(sent)) == sent


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(frame: bytes) -> None:
    with contextlib.suppress(WireError):
        decode(frame)


@given(st.lists(plain, max_size=9) | plain)
def test_any_plain_value_is_a_message_or_a_wire_error(value: Any) -> None:
    with contextlib.suppress(WireError):
        decode(msgpack.packb(value))


def replaced(value: Any, at: int, by: Any) -> tuple[Any, int]:
    """`value` with its `at`-th node (depth first) replaced; -> (value, how many of `at` are left)."""
    if at == 0:
        return by, -1
    at -= 1
    if isinstance(value, list):
        copy = list(value)
        for index, item in enumerate(copy):
            copy[index], at = replaced(item, at, by)
            if at < 0:
                return copy, at
        return copy, at
    return value, at


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(MESSAGES), st.integers(0, 60), plain)
def test_message_with_one_field_replaced_is_a_message_or_a_wire_error(message: Message, at: int, by: Any) -> None:
    frame = msgpack.unpackb(encode(envelope(message)), strict_map_key=False)
    try:
        found = decode(msgpack.packb(replaced(frame, at, by)[0]))
    except WireError:
        return
    assert decode(encode(found)) is not None


@settings(max_examples=300)
@given(st.sampled_from(MESSAGES), st.integers(0, 2000), st.integers(0, 7))
def test_message_with_one_flipped_bit_is_a_message_or_a_wire_error(message: Message, at: int, bit: int) -> None:
    frame = bytearray(encode(envelope(message)))
    frame[at % len(frame)] ^= 1 << bit
    with contextlib.suppress(WireError):
        decode(bytes(frame))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({0: 2}, "protocol 2 instead of 1: all nodes must run the same version"),
        ({6: 0}, "not a message"),
        ({6: 28}, "a tag"),
        ({6: -1}, "a tag"),
        ({4: "localhost:1"}, "not a message"),
        ({4: "1.2.3.4:0"}, "port"),
        ({3: ["a", -1]}, "an incarnation"),
        ({1: "x" * 300}, "a run id"),
    ],
)
def test_frame_with_a_wrong_part_says_which(change: dict[int, Any], text: str) -> None:
    frame = msgpack.unpackb(encode(envelope(Join(A))))
    for index, value in change.items():
        frame[index] = value
    with pytest.raises(WireError, match=text):
        decode(msgpack.packb(frame))


@pytest.mark.parametrize(
    "view",
    [
        ["", 7, 3, [], [], [], "", {}],
        ["n", 7, 8, [], [], [], "", {}],
        ["n", 0, 0, [], [], [], "", {}],
        ["n", 7, 3, [A.to_plain()], [A.to_plain()], [], "", {}],
        ["n", 7, 3, [], [], [], "", {1: 2}],
    ],
)
def test_view_that_contradicts_itself_is_refused(view: list[Any]) -> None:
    with pytest.raises(ValueError, match="view"):
        View.from_plain(view)


def test_deep_nesting_is_refused_and_not_followed() -> None:
    frame = encode(envelope(AppMessage("k", 0)))
    deep = frame[:-1] + b"\x91" * 5000 + b"\x00"
    with pytest.raises(WireError):
        decode(deep)


def test_too_long_frames_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(WireError, match="more than a message may have"):
        decode(b"\x00" * 101)
    with pytest.raises(ValueError, match="a AppMessage message has"):
        encode(envelope(AppMessage("k", b"x" * 200)))


@pytest.mark.parametrize("body", [object(), {1, 2}, 2**70, {"k": object()}])
def test_body_that_is_not_plain_is_the_callers_mistake(body: Any) -> None:
    with pytest.raises(ValueError, match="must consist of plain MessagePack values"):
        encode(envelope(AppMessage("k", body)))
