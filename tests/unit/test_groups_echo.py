"""groups/echo.py: what each kind of collective returns when nobody is there: shapes kept, every number defined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from p2pstate.groups import echo

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Case:
    """Outputs begin as NaN (or -1), as if nobody had written them. ``expected``: nested lists of numbers."""

    name: str
    function: Callable[[int, Any], Any]
    args: Callable[[], tuple[Any, ...]]
    expected: Any
    rank: int = 0


def unset(*shape: int) -> Tensor:
    return torch.full(shape, NAN)


def t(*values: float) -> Tensor:
    return torch.tensor(values)


CASES = [
    Case("recv", echo.zeros, lambda: ([unset(2)], 1, 0), [[0, 0]]),
    Case("recv of several", echo.zeros, lambda: ([unset(1), unset(2, 1)], 1, 0), [[0], [[0], [0]]]),
    Case("recv of integers", echo.zeros, lambda: ([torch.full((2,), -1)], 1, 0), [[0, 0]]),
    Case("recv of one tensor", echo.zeros, lambda: (unset(2), 1, 0), [0, 0]),
    Case("allgather", echo.gather, lambda: ([[unset(2), unset(2)]], [t(1, 2)]), [[[1, 2], [1, 2]]]),
    Case("allgather of another shape", echo.gather, lambda: ([[unset(2, 1)]], [t(1, 2)]), [[[[1], [2]]]]),
    Case("allgather of uneven sizes", echo.gather, lambda: ([[unset(2), unset(3)]], [t(1, 2)]), [[[1, 2], [0, 0, 0]]]),
    Case("allgather, a flat list", echo.gather, lambda: ([unset(1), unset(1)], t(5)), [[5], [5]]),
    Case("gather at the root", echo.gather, lambda: ([[unset(1), unset(1)]], [t(7)], None), [[[7], [7]]]),
    Case("gather elsewhere", echo.gather, lambda: ([], [t(7)], None), []),
    Case(
        "allgather_coalesced",
        echo.gather_lists,
        lambda: ([[unset(2), unset(1)] for _ in range(3)], [t(1, 2), t(3)], None),
        [[[1, 2], [3]]] * 3,
    ),
    Case("all_gather_single", echo.gather_flat, lambda: (unset(6), t(1, 2)), [1, 2, 1, 2, 1, 2]),
    Case("all_gather_single, rows", echo.gather_flat, lambda: (unset(4, 2), t(1, 2, 3, 4)), [[1, 2], [3, 4]] * 2),
    Case("all_gather_single of a matrix", echo.gather_flat, lambda: (unset(2, 2), t(1, 2)[None].mT.mT), [[1, 2]] * 2),
    Case("all_gather_single of nothing", echo.gather_flat, lambda: (torch.empty(0), torch.empty(0)), []),
    Case(
        "all_gather_single of a strided tensor",
        echo.gather_flat,
        lambda: (unset(8), torch.arange(4.0).reshape(2, 2).mT),
        [0, 2, 1, 3] * 2,
    ),
    Case("all_gather_single, more than whole inputs", echo.gather_flat, lambda: (unset(3), t(1, 2)), [1, 2, 1]),
    Case(
        "all_gather_single_coalesced",
        echo.gather_coalesced,
        lambda: ([unset(2), unset(4)], [t(1), t(2, 3)]),
        [[1, 1], [2, 3, 2, 3]],
    ),
    Case("reduce_scatter_single, rank 0", echo.reduce_scatter, lambda: (unset(2), t(1, 2, 3, 4)), [1, 2]),
    Case("reduce_scatter_single, rank 1", echo.reduce_scatter, lambda: (unset(2), t(1, 2, 3, 4)), [3, 4], rank=1),
    Case(
        "reduce_scatter_single of rows",
        echo.reduce_scatter,
        lambda: (unset(1, 2), torch.arange(4.0).reshape(2, 2)),
        [[2, 3]],
        rank=1,
    ),
    Case("reduce_scatter_single, too little", echo.reduce_scatter, lambda: (unset(3), t(1, 2, 3, 4)), [0] * 3, rank=1),
    Case("reduce_scatter", echo.reduce_scatter, lambda: ([unset(1)], [[t(1), t(2)]]), [[2]], rank=1),
    Case("reduce_scatter, one output", echo.reduce_scatter, lambda: (unset(1), [t(1), t(2)]), [2], rank=1),
    Case(
        "reduce_scatter_single_coalesced",
        echo.reduce_scatter,
        lambda: ([unset(1), unset(2)], [t(1, 2), t(3, 4, 5, 6)]),
        [[2], [5, 6]],
        rank=1,
    ),
    Case("alltoall", echo.all_to_all, lambda: ([unset(1), unset(1)], [t(1), t(2)]), [[1], [2]]),
    Case("alltoall of uneven sizes", echo.all_to_all, lambda: ([unset(1), unset(3)], [t(1), t(2)]), [[1], [0] * 3]),
    Case("all_to_all_single", echo.all_to_all, lambda: (unset(2), t(1, 2), [], []), [1, 2]),
    Case("all_to_all_single of uneven sizes", echo.all_to_all, lambda: (unset(3), t(1, 2), [1, 2], [1, 1]), [0] * 3),
    Case("scatter at the root", echo.scatter, lambda: ([unset(1)], [[t(1), t(2)]], None), [[2]], rank=1),
    Case("scatter elsewhere", echo.scatter, lambda: ([unset(2)], [], None), [[0, 0]]),
    Case("scatter, a flat list", echo.scatter, lambda: (unset(1), [t(1), t(2)]), [2], rank=1),
]


def numbers(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else [numbers(each) for each in value]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_echo_without_peers_fills_its_outputs_in_place(case: Case) -> None:
    args = case.args()
    returned = case.function(case.rank, args)
    assert returned is args[0]
    assert numbers(args[0]) == case.expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_echo_of_any_dtype_keeps_it(dtype: torch.dtype) -> None:
    own = torch.ones(2, dtype=dtype)
    out = torch.zeros(4, dtype=dtype)
    echo.gather_flat(0, (out, own))
    assert out.dtype == dtype
    assert torch.equal(out, torch.ones(4, dtype=dtype))


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        (([torch.ones(2)], object()), [[1, 1]]),
        ((torch.ones(2), 3), [1, 1]),
    ],
    ids=["a list of tensors", "one tensor"],
)
def test_echo_of_a_reduction_or_broadcast_keeps_its_input(args: tuple[Any, ...], kept: Any) -> None:
    assert numbers(echo.keep(1, args)) == kept
    assert echo.keep(1, args) is args[0]


@pytest.mark.parametrize("args", [(), (object(),)], ids=["without options", "with options"])
def test_echo_of_a_barrier_has_no_value(args: tuple[Any, ...]) -> None:
    assert echo.keep(0, args) is None
