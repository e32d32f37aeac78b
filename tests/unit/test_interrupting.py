"""A step that is discarded anyway is left at its next collective; the one after it is as if nothing had been."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from groups_in_processes import run_alone
from torch import nn
from torch.distributed import HashStore
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from p2pstate.block import StepBlock
from p2pstate.errors import StepDiscarded
from p2pstate.groups.install import install
from p2pstate.groups.registry import REGISTRY
from p2pstate.groups.status import STATUS
from p2pstate.interrupting import Interruption
from p2pstate.user_errors import can_be_reset

NUM_LAYERS = 3


class Layer(nn.Linear):
    """Counts, and fails as the loss of a peer does."""

    num_forwards = num_backwards = 0
    lost_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        if self.lost_in == "forward":
            STATUS.fail(RuntimeError("a peer is lost"))
        y = super().forward(x)
        y.register_hook(self._backward)
        return y

    def _backward(self, grad: torch.Tensor) -> None:
        self.num_backwards += 1
        if self.lost_in == "backward":
            STATUS.fail(RuntimeError("a peer is lost"))


def connect_alone() -> None:
    """One rank of two, whose collectives are echoes."""
    REGISTRY.rank, REGISTRY.world_size = 0, 2
    STATUS.solo = True
    install(REGISTRY, HashStore)
    dist.init_process_group("p2p", store=HashStore(), rank=0, world_size=2)
    STATUS.loud = False
    STATUS.connect(1)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(4, 4) for _ in range(NUM_LAYERS)))


def sharded() -> nn.Sequential:
    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def step(model: nn.Module, interruption: Interruption, **block: Any) -> str:
    """One forward and backward in a block of its own."""
    nobody: Any = None
    this = StepBlock(nobody, 1, "here")
    for name, value in block.items():
        setattr(this, name, value)
    interruption.begin(this)
    try:
        model(torch.ones(2, 4)).square().sum().backward()
    except StepDiscarded:
        return "left"
    finally:
        interruption.end()
    return "whole"


def gradients(model: nn.Module) -> list[bytes]:
    found = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
    model.zero_grad()
    return [grad.numpy().tobytes() for grad in found if grad is not None]


def left_in(lost_in: str) -> dict[str, Any]:
    connect_alone()
    model = sharded()
    interruption = Interruption([model])
    found: dict[str, Any] = {"undisturbed": step(model, interruption)}
    expected = gradients(model)
    middle: Any = model[1]
    middle.lost_in = lost_in
    before = sum(layer.num_forwards + layer.num_backwards for layer in model)
    found["interrupted"] = step(model, interruption)
    found["num_done"] = sum(layer.num_forwards + layer.num_backwards for layer in model) - before
    interruption.mend()
    middle.lost_in = ""
    model.zero_grad()
    STATUS.connect(2)
    found["again"] = step(model, interruption)
    found["same"] = gradients(model) == expected
    return found


def test_step_lost_in_forward_or_backward_is_left_there_and_the_next_one_is_as_if_nothing_had_been() -> None:
    whole = {"undisturbed": "whole", "interrupted": "left", "again": "whole", "same": True}
    assert run_alone(left_in, "forward") == whole | {"num_done": 2}
    assert run_alone(left_in, "backward") == whole | {"num_done": NUM_LAYERS + 2}


def runs_on() -> dict[str, str]:
    connect_alone()
    model = sharded()
    interruption = Interruption([model])
    found = {}
    STATUS.fail(RuntimeError("a peer is lost"))
    found["after a vote"] = step(model, interruption, num_gates=1)
    found["whose user cannot be left"] = step(model, interruption, runs_to_its_end=True)
    with_ddp = layers()
    found["beside a DDP"] = step(model, Interruption([model, DistributedDataParallel(with_ddp)]))
    dist.isend(torch.ones(1), 1)
    found["of a pipeline"] = step(model, interruption)
    return found


def test_step_that_cannot_be_left_runs_to_its_end() -> None:
    assert set(run_alone(runs_on).values()) == {"whole"}


def test_model_without_sharding_cannot_be_reset() -> None:
    assert not can_be_reset([layers()])
