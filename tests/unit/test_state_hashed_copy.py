"""state/hashed_copy.py: the same bytes and the same digest as copying first and hashing then."""

from __future__ import annotations

import pytest
import torch
import xxhash
from torch import Tensor

from p2pstate.state import Layout, Leaf
from p2pstate.state.hashed_copy import PIECE_BYTES, HashedCopy

LARGE = PIECE_BYTES + 24  # bytes: the last piece is small


def written(named: dict[str, Tensor], room: int = 0) -> tuple[Tensor, bytes, Tensor, bytes]:
    """Region and digest, of one pass and of two."""
    leaves = [Leaf(name, tensor, (0,), None) for name, tensor in sorted(named.items())]
    layout = Layout.build(leaves)
    one, two = (torch.full((layout.num_bytes + room,), 7, dtype=torch.uint8) for _ in range(2))
    hasher = xxhash.xxh3_128()
    HashedCopy(layout, [leaf.tensor for leaf in leaves]).write(one, hasher)
    layout.write(leaves, two)
    return one, hasher.digest(), two, xxhash.xxh3_128_digest(two[: layout.num_bytes].numpy())


def some(dtype: torch.dtype, num_bytes: int) -> Tensor:
    raw = torch.arange(num_bytes // 8, dtype=torch.int64).mul_(0x9E3779B97F4A7C15 - (1 << 64))
    return raw.view(torch.uint8).remainder(2).bool() if dtype is torch.bool else raw.view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.bool])
@pytest.mark.parametrize("size", [0, 16, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES + 16])
def test_hashed_copy_of_leaves_of_any_size_and_type(dtype: torch.dtype, size: int) -> None:
    one, digest, two, expected = written({"b": some(dtype, size), "a": torch.ones(3), "c": torch.tensor(5)})
    assert digest == expected
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(LARGE // 2).view(LARGE // 8, 4).t(),
        torch.arange(LARGE // 4)[::2],
        torch.ones(1).expand(LARGE // 4),
        torch.complex(torch.ones(LARGE // 8), torch.ones(LARGE // 8)).conj(),
        torch.nn.Parameter(torch.ones(2, LARGE // 8)),
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "parameter"],
)
def test_hashed_copy_of_a_large_leaf_however_it_lies(tensor: Tensor) -> None:
    one, digest, two, expected = written({"a": torch.ones(1), "b": tensor}, room=100)
    assert digest == expected
    assert torch.equal(one, two)


def test_hashed_copy_of_nothing_is_the_digest_of_nothing() -> None:
    assert written({})[1] == xxhash.xxh3_128_digest(b"")


def test_hashed_copy_follows_what_the_sources_hold_now() -> None:
    source = torch.zeros(LARGE // 4)
    layout = Layout.build([Leaf("a", source, (0,), None)])
    copy, region = HashedCopy(layout, [source]), torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for value in (1.0, 2.0):
        source.fill_(value)
        hasher = xxhash.xxh3_128()
        copy.write(region, hasher)
        assert layout.read(region)["a"].unique().tolist() == [value]
        assert hasher.digest() == xxhash.xxh3_128_digest(region.numpy())
