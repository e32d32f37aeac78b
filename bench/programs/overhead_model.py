"""The job that is measured: DEPTH feed-forward blocks under one of four parallelisms on two nodes of two workers.

In: the name of a parallelism, a size. Out: model, optimizer, data and a step. Nothing here knows of p2pstate.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from overhead_numbers import DEPTH, width_for
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Data:
    """Batches that depend on the position and on which ranks are to see the same."""

    def __init__(self, seed: int, batch: int, width: int) -> None:
        self.seed, self.batch, self.width, self.position = seed, batch, width, 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.position += 1
            generator = torch.Generator().manual_seed(1000 * self.position + self.seed)
            yield torch.randn(self.batch, self.width, generator=generator)


@dataclass(slots=True)
class Job:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Data

    def train_step(self, batch: Tensor) -> Tensor:
        loss = self.model(batch).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: every rank's part, without a copy."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def build(form: str, num_parameters: int, batch: int, rank: int) -> Job:
    """Ranks 0 and 1 are on one node, 2 and 3 on the other."""
    torch.manual_seed(0)
    width = width_for(num_parameters)
    model, seed = _distribute(nn.Sequential(*(Block(width) for _ in range(DEPTH))), form, rank)
    return Job(model, torch.optim.AdamW(model.parameters(), lr=1e-4), Data(seed, batch, width))


def _distribute(model: nn.Sequential, form: str, rank: int) -> tuple[nn.Module, int]:
    """The model, and which data this rank sees."""
    if form == "ddp":
        return nn.parallel.DistributedDataParallel(model), rank
    if form == "fsdp2":
        for block in model:
            fully_shard(block)
        return fully_shard(model), rank
    if form == "hsdp":  # replicated between the nodes, sharded inside
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh), rank
    assert form == "fsdp_tp", form  # tensor parallel inside a node, sharded between the nodes
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["fsdp"])
    return fully_shard(model, mesh=mesh["fsdp"]), rank // 2
