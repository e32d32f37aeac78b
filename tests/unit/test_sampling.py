"""sampling.py: the balances of all ranks add up to 0 exactly while sets of ranks are alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from p2pstate.sampling import MAX_LEAVES, Sample
from p2pstate.state import Leaf

ALL, EVEN, ODD = (0, 1, 2, 3), (0, 2), (1, 3)


def leaves(members: tuple[int, ...]) -> list[Leaf]:
    torch.manual_seed(len(members))
    tensors = {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "column": torch.randn(40, 3).t()[:, 1:],
        "empty": torch.empty(0, 5),
        "half": torch.randn(7, 9).bfloat16(),
        "mirrored": torch.randn(3, dtype=torch.complex64).conj(),
        "number": torch.tensor(3.0),
    }
    return [Leaf(name, tensor, members) for name, tensor in tensors.items()]


def ranks(change: Callable[[int, dict[str, torch.Tensor]], None] = lambda rank, tensors: None) -> int:
    """The sum of the balances of four ranks in three sets, after ``change`` of what each of them has."""
    total = 0
    for rank in range(4):
        shared = {members: leaves(members) for members in (ALL, EVEN, ODD) if rank in members}
        sample = Sample(rank, shared)
        change(rank, {leaf.name: leaf.tensor for leaf in shared[ALL]})
        total += sample.balance()
    return total


def test_balances_of_ranks_that_are_alike_add_up_to_nothing() -> None:
    assert ranks() == 0
    assert Sample(0, {}).balance() == 0


@pytest.mark.parametrize("name", ["bytes", "column", "half", "number"])
@pytest.mark.parametrize("different", [{0}, {3}, {1, 3}, {0, 1}, {0, 1, 2, 3}])
def test_balances_of_ranks_that_changed_something_since_do_not(name: str, different: set[int]) -> None:
    def change(rank: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].add_(rank + 1 if rank in different else 0)

    assert ranks(change) != 0


def test_sample_of_a_tensor_is_the_same_whatever_its_strides() -> None:
    wide = torch.arange(60.0).view(6, 10)
    for tensor in (wide.t().contiguous().t(), wide.clone(memory_format=torch.contiguous_format)):
        sums = [Sample(rank, {(0, 1): [Leaf("a", [wide, tensor][rank], (0, 1))]}).balance() for rank in range(2)]
        assert sum(sums) == 0


def test_sample_of_many_leaves_looks_at_some_of_everywhere() -> None:
    many = [Leaf(str(number), torch.zeros(2), (0, 1)) for number in range(3 * MAX_LEAVES)]
    sample = Sample(0, {(0, 1): many})
    before = sample.balance()
    for each in (many[:2], many[-3:]):
        kept = [leaf.tensor.clone() for leaf in each]
        for leaf in each:
            leaf.tensor.add_(1)
        assert sample.balance() != before
        for leaf, value in zip(each, kept, strict=True):
            leaf.tensor.copy_(value)
    assert sample.balance() == before


def test_memory_that_was_sampled_can_be_freed_afterwards() -> None:
    shared = {ALL: leaves(ALL)}
    Sample(0, shared).balance()
    for leaf in shared[ALL]:
        leaf.tensor.untyped_storage().resize_(0)
