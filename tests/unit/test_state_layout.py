"""Leaves of every dtype and stride lie in a region bit for bit, and a peer's table is checked before it is believed."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import pytest
import torch
from state_zoo import bits

from p2pstate.state import Layout, Leaf, LeafError
from p2pstate.state.layout import ALIGNMENT_BYTES

DTYPES = [
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


def leaf(name: str, tensor: torch.Tensor) -> Leaf:
    return Leaf(name, tensor, (0,))


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, so NaN payloads, denormals and negative zeros too."""
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    return raw.view(dtype)


def written(*leaves: Leaf) -> tuple[Layout, torch.Tensor]:
    layout = Layout.build(leaves)
    region = torch.full((layout.num_bytes + 7,), 0xAA, dtype=torch.uint8)
    layout.write(sorted(leaves, key=lambda one: one.name), region)
    return layout, region


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_write_of_any_dtype_keeps_every_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    full = noise(dtype, 6, 4)
    odd = {"column": full[:, 1], "empty": full[:0], "full": full, "scalar": full[0, 0], "transposed": full.t()}
    layout, region = written(*(leaf(name, tensor) for name, tensor in odd.items()))
    for name, tensor in layout.read(region).items():
        assert (tensor.dtype, tensor.shape) == (dtype, odd[name].shape)
        assert [bits(row) for row in tensor.reshape(-1, 1)] == [bits(row) for row in odd[name].reshape(-1, 1)]


def test_layout_write_of_conjugate_and_negative_views_stores_their_values() -> None:
    base = torch.randn(3, dtype=torch.complex64)
    layout, region = written(leaf("conj", base.conj()), leaf("neg", base.conj().imag))
    read = layout.read(region)
    assert base.conj().is_conj()
    assert base.conj().imag.is_neg()
    assert torch.equal(read["conj"], base.conj().resolve_conj())
    assert torch.equal(read["neg"], -base.imag)


def test_layout_write_of_strided_views_stores_values_in_order() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    image = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    expanded = torch.arange(3.0).expand(4, 3)
    views = {"a": base.permute(2, 0, 1), "b": image, "c": expanded, "d": base[:, ::2, 1:3]}
    layout, region = written(*(leaf(name, tensor) for name, tensor in views.items()))
    for name, tensor in layout.read(region).items():
        assert torch.equal(tensor, views[name])


def test_layout_offsets_are_aligned_and_apart() -> None:
    layout = Layout.build([leaf(f"x{i}", torch.zeros(i, dtype=torch.uint8)) for i in (0, 1, 63, 64, 65)])
    ends = [entry.offset_bytes + entry.num_bytes for entry in layout.entries]
    assert all(entry.offset_bytes % ALIGNMENT_BYTES == 0 for entry in layout.entries)
    assert all(end <= entry.offset_bytes for end, entry in zip(ends, layout.entries[1:], strict=False))
    assert layout.num_bytes >= ends[-1]
    assert layout.num_bytes % ALIGNMENT_BYTES == 0


def test_layout_write_zeroes_the_gaps_and_nothing_behind() -> None:
    layout, region = written(leaf("a", torch.ones(3, dtype=torch.uint8)), leaf("b", torch.ones(64, dtype=torch.uint8)))
    assert region[:3].tolist() == [1, 1, 1]
    assert region[3:64].sum() == 0
    assert region[64:128].tolist() == [1] * 64
    assert region[layout.num_bytes :].tolist() == [0xAA] * 7


def test_layout_of_no_leaves_is_empty() -> None:
    layout, region = written()
    assert layout.num_bytes == 0
    assert layout.read(region) == {}


def test_layout_order_of_leaves_does_not_matter() -> None:
    leaves = [leaf(name, torch.zeros(size)) for name, size in (("b", 3), ("a", 5), ("c", 0))]
    assert Layout.build(leaves).table() == Layout.build(leaves[::-1]).table()
    assert Layout.build(leaves).digest() == Layout.build(leaves[::-1]).digest()


@pytest.mark.parametrize(
    "other", [("a", torch.zeros(2, 2)), ("b", torch.zeros(4)), ("a", torch.zeros(4, dtype=torch.int32))]
)
def test_layout_digest_differs_with_name_shape_or_dtype(other: tuple[str, torch.Tensor]) -> None:
    assert Layout.build([leaf("a", torch.zeros(4))]).digest() != Layout.build([leaf(*other)]).digest()


def test_layout_from_its_table_is_the_same() -> None:
    layout = Layout.build([leaf(f"t{i}", noise(dtype, 3, i)) for i, dtype in enumerate(DTYPES)])
    again = Layout.from_table(layout.table())
    assert again.entries == layout.entries
    assert again.num_bytes == layout.num_bytes
    assert again.digest() == layout.digest()


@pytest.mark.parametrize(
    "table",
    [
        None,
        "abc",
        [["a", "float32"]],
        [["a", "float32", [2], 0]],
        [[1, "float32", [2]]],
        [["a", "nn", [2]]],
        [["a", "load", [2]]],
        [["a", 5, [2]]],
        [["a", "float32", [-1]]],
        [["a", "float32", [True]]],
        [["a", "float32", 3]],
        [["a", "float32", [2**40, 2**40]]],
        [["b", "int8", [1]], ["a", "int8", [1]]],
        [["a", "int8", [1]], ["a", "int8", [1]]],
    ],
    ids=repr,
)
def test_layout_from_a_malformed_table_is_refused(table: Any) -> None:
    with pytest.raises(ValueError, match=r"layout's table|dtype|str expected"):
        Layout.from_table(table)


def test_layout_of_two_leaves_with_one_name_is_refused() -> None:
    with pytest.raises(ValueError, match="same name"):
        Layout.build([leaf("a", torch.zeros(1)), leaf("a", torch.zeros(2))])


def test_layout_write_of_more_leaves_takes_only_its_own() -> None:
    leaves = [leaf(name, torch.full((2,), value)) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    layout = Layout.build([leaves[0], leaves[2]])
    region = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.write(leaves, region)
    assert {name: tensor.tolist() for name, tensor in layout.read(region).items()} == {"a": [1, 1], "c": [3, 3]}
    assert not layout.fits(leaves)
    assert layout.fits([leaves[0], leaves[2]])


@pytest.mark.parametrize(
    "leaves",
    [
        [leaf("a", torch.zeros(2))],
        [leaf("a", torch.zeros(2)), leaf("b", torch.zeros(3))],
        [leaf("a", torch.zeros(2)), leaf("b", torch.zeros(2, dtype=torch.int32))],
        [leaf("a", torch.zeros(2)), leaf("c", torch.zeros(2))],
        [leaf("a", torch.zeros(2)), leaf("c", torch.zeros(2)), leaf("d", torch.zeros(2))],
    ],
)
def test_layout_write_of_other_leaves_names_the_first_that_differs(leaves: list[Leaf]) -> None:
    layout = Layout.build([leaf("a", torch.zeros(2)), leaf("b", torch.zeros(2))])
    with pytest.raises(LeafError) as caught:
        layout.write(leaves, torch.zeros(layout.num_bytes, dtype=torch.uint8))
    assert caught.value.name == "b"


@pytest.mark.parametrize(
    "region", [torch.zeros(127, dtype=torch.uint8), torch.zeros(128), torch.zeros(2, 64, dtype=torch.uint8)]
)
def test_layout_read_of_an_unfit_region_is_refused(region: torch.Tensor) -> None:
    layout = Layout.build([leaf("a", torch.zeros(2)), leaf("b", torch.zeros(2))])
    with pytest.raises(ValueError, match="128 bytes"):
        layout.read(region)


def test_layout_write_again_stores_the_values_of_that_moment() -> None:
    live = torch.zeros(3)
    layout, region = written(leaf("a", live))
    live += 5
    layout.write([leaf("a", live)], region)
    assert layout.read(region)["a"].tolist() == [5, 5, 5]
    live += 1
    assert layout.read(region)["a"].tolist() == [5, 5, 5]


def test_layout_release_drops_the_last_hold_on_a_mapping() -> None:
    layout = Layout.build([leaf("a", torch.ones(4))])
    mapping = mmap.mmap(-1, layout.num_bytes)
    layout.write([leaf("a", torch.ones(4))], torch.frombuffer(mapping, dtype=torch.uint8))
    held = weakref.ref(mapping)
    del mapping
    assert held() is not None
    layout.release()
    assert held() is None


def test_layout_holds_only_the_regions_written_last() -> None:
    layout = Layout.build([leaf("a", torch.ones(4))])
    held = []
    for _ in range(20):
        mapping = mmap.mmap(-1, layout.num_bytes)
        layout.write([leaf("a", torch.ones(4))], torch.frombuffer(mapping, dtype=torch.uint8))
        held.append(weakref.ref(mapping))
        del mapping
    assert [one() is not None for one in held] == [False] * 12 + [True] * 8


def test_layout_write_into_many_regions_keeps_them_apart() -> None:
    layout = Layout.build([leaf("a", torch.zeros(1))])
    regions = [torch.zeros(64, dtype=torch.uint8) for _ in range(20)]
    for value, region in enumerate(regions * 2):
        layout.write([leaf("a", torch.tensor([float(value)]))], region)
    assert [layout.read(region)["a"].item() for region in regions] == list(range(20, 40))
