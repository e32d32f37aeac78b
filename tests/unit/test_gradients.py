"""gradients.discard_gradients: a step that is tried again sees the gradients of a first try."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from p2pstate.gradients import discard_gradients


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_discard_in_an_accumulation_window_of_fsdp2_forgets_the_micro_batch(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)} if dtype else {}
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4)

    def gradients() -> list[torch.Tensor]:
        model.set_requires_gradient_sync(True)
        model(x).pow(2).mean().backward()
        found = [parameter.grad.to_local().clone() for parameter in model.parameters()]
        optimizer.zero_grad(set_to_none=True)
        return found

    expected = gradients()
    model.set_requires_gradient_sync(False)
    model(x).pow(2).mean().backward()
    discard_gradients([model], [optimizer], [])
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


def test_discard_after_unscale_lets_a_scaler_unscale_again() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    discard_gradients([], [optimizer], [scaler])
    assert parameter.grad is None
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(parameter.detach(), torch.zeros(2))
