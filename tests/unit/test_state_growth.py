"""growth: what is expected of an optimizer's state is what its first step makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from p2pstate.state import TrainingState
from p2pstate.state.growth import expected_state_bytes


class Derived(torch.optim.AdamW):
    pass


class Unknown(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Muon, {}),
    (Derived, {}),
]


def large_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Without steps and other single numbers."""
    tensors = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1)


@pytest.mark.parametrize(("kind", "arguments"), CASES)
def test_expected_growth_is_what_the_first_step_makes(
    kind: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    model = nn.Linear(8, 4, bias=False)
    optimizer = kind(model.parameters(), **arguments)
    state = TrainingState([model], [optimizer], {}, rng=False)
    expected, before = sum(num_bytes for num_bytes, _, _ in state.expected_growth()), large_state_bytes(optimizer)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert expected == large_state_bytes(optimizer) - before
    assert list(state.expected_growth()) == []


def test_frozen_parameters_and_unknown_optimizers_are_expected_to_add_nothing() -> None:
    weight = nn.Parameter(torch.zeros(4))
    assert expected_state_bytes(Unknown([weight]), {}, weight) == 0
    weight.requires_grad_(False)
    assert expected_state_bytes(torch.optim.Adam([weight]), {}, weight) == 0
