"""Whether gradients are numbers, in the forms in which optimizers get them."""

from __future__ import annotations

import math

import pytest
import torch

from p2pstate.finite import all_finite


def optimizer(*grads: torch.Tensor | None) -> torch.optim.Optimizer:
    parameters = [
        torch.nn.Parameter(torch.zeros_like(grad.to_dense()) if grad is not None else torch.zeros(2)) for grad in grads
    ]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    return torch.optim.SGD(parameters, lr=0.1)


SPARSE = torch.tensor([0.0, math.nan, 1.0]).to_sparse()


@pytest.mark.parametrize(
    ("grads", "finite"),
    [
        ([None, None], True),
        ([torch.ones(3), None, torch.empty(0, 5), torch.tensor(2.0)], True),
        ([torch.full((3,), 6e4, dtype=torch.float16), torch.full((2,), 1e38, dtype=torch.bfloat16)], True),
        ([torch.full((9,), torch.finfo(torch.float32).max)], True),
        ([torch.ones(3), torch.tensor([1.0, math.nan])], False),
        ([torch.tensor(-math.inf, dtype=torch.bfloat16)], False),
        ([torch.ones(3, dtype=torch.complex64) * complex(0, math.inf)], False),
        ([SPARSE], False),
    ],
)
def test_gradients_are_finite_if_all_their_values_are(grads: list[torch.Tensor | None], finite: bool) -> None:
    assert all_finite(optimizer(*grads)) is finite
