"""Plain values keep their exact types and bits, and damaged bytes are refused without being believed."""

from __future__ import annotations

import math
import random
import struct
import tracemalloc
import zlib
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from pathlib import PosixPath, PurePosixPath
from typing import Any
from uuid import UUID

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_zoo import bits

from p2pstate.state import LeafError
from p2pstate.state.decoding import decode
from p2pstate.state.encoding import MAX_DEPTH, Extension, TensorRef, encode, lower, pack, squeeze

EXACT = [
    None,
    True,
    False,
    0,
    2**63 - 1,
    -(2**63),
    2**64,
    2**127,
    -(2**200),
    1.5,
    -0.0,
    math.inf,
    "",
    "a\ud800",
    b"\x00\xff",
    bytearray(b"q"),
    1 - 2j,
    [],
    [1, (2, [3.0, "4"]), ()],
    {},
    {1: 2, "1": 3, (1, "2"): 4, None: 5, 1.5: 6, b"b": 7, frozenset({1}): 8, False: 9},
    {"b": 1, "a": 2},
    set(),
    {1, 2, "a", (3, 4)},
    frozenset({frozenset(), 1}),
    OrderedDict(b=1, a=[2]),
    Counter("abca"),
    Counter({"x": -1, "y": 0}),
    defaultdict(None, {1: 2}),
    defaultdict(list, {1: [2]}),
    deque([1, 2, 3], maxlen=5),
    deque(),
    range(3, 20, 4),
    np.float32(1.25),
    np.float64(0.1),
    np.int64(-3),
    np.uint8(255),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.str_("a\0"),
    np.bytes_(b"a\0"),
    np.datetime64("2020-01-01"),
    torch.Size([1, 0, 3]),
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.device("cpu"),
    torch.device("cuda", 3),
    datetime(2026, 11, 30, 12, 1, 2, 3),
    datetime(2026, 11, 30, tzinfo=UTC),
    date(2026, 11, 30),
    time(1, 2, 3, 4),
    timedelta(days=-3, microseconds=5),
    Decimal("1.10"),
    Decimal("-Infinity"),
    PosixPath("a/b"),
    PurePosixPath("/a"),
    UUID(int=7),
]


@pytest.mark.parametrize("value", EXACT, ids=lambda value: f"{type(value).__name__}")
def test_codec_of_a_plain_value_gives_it_back_with_its_type(value: Any) -> None:
    result = decode(encode(value))
    assert type(result) is type(value)
    assert result == value
    assert encode(result) == encode(value)
    if isinstance(value, dict):
        assert list(result) == list(value)
        assert [type(key) for key in result] == [type(key) for key in value]
    if isinstance(value, defaultdict):
        assert result.default_factory is value.default_factory
    if isinstance(value, deque):
        assert result.maxlen == value.maxlen
    if isinstance(value, float):
        assert math.copysign(1, result) == math.copysign(1, value)


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0xFFF0000000000123, 0x7FF0000000000001])
def test_codec_of_a_nan_keeps_its_payload(bits: int) -> None:
    [value] = struct.unpack("<d", struct.pack("<Q", bits))
    result = decode(encode([value]))[0]
    assert struct.pack("<d", result) == struct.pack("<d", value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6, dtype=">u4"),
        np.empty((0, 3), np.float16),
        np.array(5.0),
        np.array(["ab", "c"]),
        np.array([b"ab"]),
        np.array([1 + 2j]),
        np.arange(10)[::2],
        np.array(["2020-01-01"], dtype="datetime64[D]"),
    ],
    ids=lambda array: f"{array.dtype.str}-{array.shape}",
)
def test_codec_of_an_array_keeps_type_shape_and_order(array: np.ndarray[Any, Any]) -> None:
    result = decode(encode(array))
    assert type(result) is np.ndarray
    assert (result.dtype.str, result.shape) == (array.dtype.str, array.shape)
    assert np.array_equal(result, array)
    assert result.flags.writeable
    assert result.flags.f_contiguous == (array.flags.f_contiguous or array.ndim < 2)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(4).reshape(2, 2),
        torch.tensor(1.5, dtype=torch.float8_e5m2),
        torch.empty(0, 5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([7], dtype=torch.uint64),
        torch.arange(6.0).reshape(2, 3)[:1, 1:2],
    ],
)
def test_codec_of_a_small_tensor_keeps_type_shape_and_bits(tensor: torch.Tensor) -> None:
    result = decode(encode({"t": tensor}))["t"]
    assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
    assert bits(result) == bits(tensor)


def test_codec_of_a_state_dict_keeps_the_versions_of_its_parts() -> None:
    saved = torch.nn.BatchNorm1d(2).state_dict()
    result = decode(encode(saved))
    assert result._metadata == saved._metadata
    assert result._metadata[""]["version"] == 2


def test_codec_of_a_reference_keeps_it() -> None:
    ref = TensorRef("Codes", "cuda", ("/codes", "/scale"))
    assert decode(msgpack.packb([ref.lowered()])) == [ref]


def plain_values() -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
    scalars = st.none() | st.booleans() | numbers | st.text() | st.binary()
    keys = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
    return st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.lists(inner, max_size=4).map(deque)
            | st.dictionaries(keys, inner, max_size=4)
            | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
            | st.sets(keys, max_size=4)
        ),
        max_leaves=20,
    )


def same(one: Any, other: Any) -> bool:
    """Equality that tells 1, 1.0 and True apart at every level."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(same(a, b) for a, b in pairs)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    return bool(one == other)


@settings(max_examples=150, deadline=None)
@given(plain_values())
def test_codec_of_any_plain_value_round_trips(value: Any) -> None:
    data = encode(value)
    result = decode(data)
    assert same(result, value)
    assert encode(result) == data


def test_codec_of_equal_sets_gives_equal_bytes() -> None:
    words = [f"word{i}" for i in range(50)]
    shuffled = words[:]
    random.Random(1).shuffle(shuffled)
    assert encode(set(words)) == encode(set(shuffled))
    assert encode(set(words)) != encode(set(words[1:]))


class Color(IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b/c": object()}]}, "state/a/1/b~1c"),
        ((1, len), "state/1"),
        ([Color.RED], "state/0"),
        ([Point(1, 2)], "state/0"),
        ({"g": defaultdict(lambda: 0)}, "state/g"),
        (np.array([object()]), "state"),
        (np.zeros(2, dtype=[("a", "i4")]), "state"),
        (np.ma.masked_array([1, 2]), "state"),
        ({"big": torch.zeros(1 << 20)}, "state/big"),
        ({5: {"5": lambda: 0}}, "state/5/'5'"),
        ({"dice": [random.Random(1)]}, "state/dice/0"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_codec_of_anything_else_names_its_path(value: Any, path: str) -> None:
    with pytest.raises(LeafError) as caught:
        encode(value, "state")
    assert caught.value.name == path


@pytest.mark.parametrize(
    "value",
    [datetime(2026, 11, 30, tzinfo=timezone(timedelta(hours=1), "local")), datetime(2026, 11, 30, fold=1), range],
    ids=["named zone", "fold", "class"],
)
def test_codec_of_what_its_text_does_not_say_is_refused(value: Any) -> None:
    with pytest.raises(LeafError, match="is not a plain value"):
        encode(value)


def test_codec_of_standard_values_that_are_none_is_refused() -> None:
    for kind, text in (("Decimal", "x"), ("date", "yesterday"), ("timedelta", "1 2"), ("system", "ls"), ("UUID", "7")):
        with pytest.raises(LeafError, match="cannot be decoded"):
            decode(msgpack.packb(msgpack.ExtType(Extension.STANDARD, msgpack.packb([kind, text]))))


def test_codec_of_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(LeafError, match="contains itself"):
        encode(loop)


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [(value,), defaultdict(None, {1: value}), {"k": value}][level % 3]
        value = [value] if level % 3 == 2 else value
    return value


def test_codec_of_deep_nesting_within_the_limit_round_trips() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = (value,)
    assert decode(encode(value)) == value
    with pytest.raises(LeafError, match="nested deeper"):
        encode((value,))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x01\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffabc",
        b"\xc6\x00\x00\x00\x10abc",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xd9",
        b"\xcb\x00",
        b"\x81\x90\x01",  # a list as a key
        msgpack.packb(msgpack.ExtType(99, b"\xc0")),
        msgpack.packb(msgpack.ExtType(10, msgpack.packb(["<f8", [2**40], "C", b""]))),
        msgpack.packb(msgpack.ExtType(10, msgpack.packb(["|O", [0], "C", b""]))),
        msgpack.packb(msgpack.ExtType(10, msgpack.packb(["<f8", [-1], "C", b""]))),
        msgpack.packb(msgpack.ExtType(16, msgpack.packb(["float32", [2**40, 2**40], b""]))),
        msgpack.packb(msgpack.ExtType(16, msgpack.packb(["load", [1], b"abcd"]))),
        msgpack.packb(msgpack.ExtType(14, msgpack.packb("nn"))),
        msgpack.packb(msgpack.ExtType(9, msgpack.packb(["eval", {}]))),
        msgpack.packb(msgpack.ExtType(1, b"\x01")),
        msgpack.packb(msgpack.Timestamp(1, 2)),
        msgpack.packb(msgpack.ExtType(20, b"\x78\x01")),
        msgpack.packb(msgpack.ExtType(20, zlib.compress(pack("x"))[:-1])),
        msgpack.packb(msgpack.ExtType(20, zlib.compress(pack("x")) + b"y")),
        msgpack.packb(msgpack.ExtType(20, zlib.compress(b"\0" * (1 << 27)))),
    ],
)
def test_codec_of_bytes_that_are_no_value_is_refused(data: bytes) -> None:
    with pytest.raises(LeafError, match="damaged"):
        decode(data)


def test_codec_of_a_squeezed_value_gives_the_value() -> None:
    names = [f"layers.{number}.weight" for number in range(500)]
    value = {"names": names, "few": ["a"], "pairs": dict.fromkeys(names, (1, 2.5))}
    lowered = {key: squeeze(lower(each, key)) for key, each in value.items()}
    assert lowered["few"] == ["a"], "what is small stays readable"
    assert decode(pack(lowered)) == value
    assert len(pack(lowered)) < len(encode(value)) / 4


def test_codec_of_nested_claims_allocates_no_more_than_the_bytes_can_hold() -> None:
    size = 200_000
    bomb = b"\xdd" + size.to_bytes(4, "big")  # a list that claims as many elements as there are bytes
    data = bomb * 40 + b"\xc0" * (size - 5 * 40)
    tracemalloc.start()
    try:
        with pytest.raises(LeafError, match="damaged"):
            decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * size


def test_codec_of_damaged_bytes_raises_nothing_but_a_leaf_error() -> None:
    source = random.Random(7)
    whole = bytearray(encode(EXACT[:-1]))
    outcomes = Counter[str]()
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(source.choice([1, 1, 2, 8])):
            data[source.randrange(len(data))] = source.randrange(256)
        if source.random() < 0.2:
            del data[source.randrange(len(data)) :]
        try:
            decode(bytes(data))
            outcomes["read"] += 1
        except LeafError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 300
    assert outcomes.total() == 1500
