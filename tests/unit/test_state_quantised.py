"""quantised: tensors of torch.quantize_* come back with their codes, scales, zero points and axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state_zoo import assert_same, image_of, restore
from torch import nn

from p2pstate.state import LeafError, TrainingState

X = torch.linspace(-3, 3, 12).reshape(4, 3)


def per_tensor(factor: float, dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    return torch.quantize_per_tensor(X * factor, 0.05 * factor, 3, dtype)


def per_channel(factor: float, zero_points: torch.Tensor, axis: int = 1) -> torch.Tensor:
    scales = factor * torch.tensor([0.05, 0.07, 0.11, 0.13])[: X.shape[axis]]
    return torch.quantize_per_channel(X * factor, scales, zero_points[: X.shape[axis]], axis, torch.quint8)


WHOLE, BROKEN = torch.tensor([100, 120, 128, 130]), torch.tensor([100.5, 120.0, 127.25, 130.0])
KINDS = {
    "per tensor, 8 bits": lambda factor: per_tensor(factor),
    "per tensor, unsigned": lambda factor: per_tensor(factor, torch.quint8),
    "per tensor, 32 bits": lambda factor: per_tensor(factor, torch.qint32),
    "per channel": lambda factor: per_channel(factor, WHOLE),
    "per channel, first axis": lambda factor: per_channel(factor, WHOLE, axis=0),
    "per channel, broken zero points": lambda factor: per_channel(factor, BROKEN),
    "transposed": lambda factor: per_tensor(factor).t(),
    "empty": lambda factor: torch.quantize_per_tensor(X[:0], 0.5 * factor, 7, torch.qint8),
}


def told(tensor: torch.Tensor) -> list[Any]:
    if tensor.qscheme() == torch.per_tensor_affine:
        how: list[Any] = [tensor.q_scale(), tensor.q_zero_point()]
    else:
        how = [tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist()]
        how.append(tensor.q_per_channel_axis())
    return [tensor.dtype, tensor.qscheme(), tensor.int_repr().tolist(), how]


class Job:
    """Has a quantised tensor as a buffer, as state of an optimizer, and among values of its own."""

    def __init__(self, kind: str, factor: float) -> None:
        self.model = nn.Linear(3, 4)
        self.model.register_buffer("table", KINDS[kind](factor))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer.state[self.model.weight]["kept"] = KINDS[kind](2 * factor)
        self.extra = {"mine": KINDS[kind](3 * factor)}
        self.state = TrainingState([self.model], [self.optimizer], {}, extra=self.extra, rng=False)

    @property
    def tensors(self) -> list[torch.Tensor]:
        kept: torch.Tensor = self.optimizer.state[self.model.weight]["kept"]
        table: Any = self.model.table
        return [table, kept, self.extra["mine"]]


@pytest.mark.parametrize("kind", KINDS)
def test_restore_of_a_quantised_tensor_is_exact_and_in_place(kind: str) -> None:
    owner, other = Job(kind, 1.0), Job(kind, 1.7)
    image = image_of(owner.state)
    assert list(map(told, other.tensors)) != list(map(told, owner.tensors))
    places = [(tensor.data_ptr(), tensor.stride()) for tensor in other.tensors]
    restore(other.state, image)
    assert list(map(told, other.tensors)) == list(map(told, owner.tensors))
    assert [(tensor.data_ptr(), tensor.stride()) for tensor in other.tensors] == places
    assert_same(image_of(other.state), image)


def test_restore_where_there_is_no_quantised_tensor_makes_one() -> None:
    owner, other = Job("per channel", 1.0), Job("per channel", 1.0)
    other.optimizer.state.clear()
    other.extra["mine"] = per_tensor(1.0)
    restore(other.state, image_of(owner.state))
    assert list(map(told, other.tensors)) == list(map(told, owner.tensors))


def test_restore_into_a_buffer_that_is_quantised_otherwise_names_it_and_writes_nothing() -> None:
    owner, other = Job("per tensor, 8 bits", 1.0), Job("per tensor, unsigned", 1.0)
    before = told(other.tensors[0])
    with pytest.raises(LeafError, match=r"model/table/qu?int8"):
        restore(other.state, image_of(owner.state))
    assert told(other.tensors[0]) == before


def test_capture_after_a_quantised_buffer_changed_its_scale_has_the_new_one() -> None:
    job = Job("per tensor, 8 bits", 1.0)
    before = image_of(job.state)
    job.tensors[0].copy_(per_tensor(4.0))
    after = image_of(job.state)
    assert before.tensors["model/table/scale"].item() == 0.05
    assert after.tensors["model/table/scale"].item() == 0.2
    assert torch.equal(after.tensors["model/table/qint8"], job.tensors[0].int_repr())
