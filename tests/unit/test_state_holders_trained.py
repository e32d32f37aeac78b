"""Who holds what: four ranks that train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups_in_processes import run_ranks
from state_zoo import assert_same, bits, image_of, restore
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from p2pstate.state import TrainingState


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())


def distributed_mlp(kind: str) -> nn.Module:
    """Wrapped for four ranks."""
    if kind == "ddp":
        return DistributedDataParallel(Mlp())
    if kind == "ddp of pairs":
        pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        return DistributedDataParallel(Mlp(), process_group=pairs.get_group("a"))
    if kind == "hsdp":
        return fully_shard(Mlp(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()}
    model = parallelize_module(Mlp(), mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["data"]) if kind == "fsdp x tp" else model


KINDS: dict[str, dict[str, tuple[int, ...]]] = {  # leaf -> the holders of rank 1's part
    "ddp": {"up.weight": (0, 1, 2, 3), "norm.bias": (0, 1, 2, 3)},
    "ddp of pairs": {"up.weight": (1, 3), "norm.bias": (1, 3)},
    "hsdp": {"up.weight": (1, 3), "norm.bias": (1, 3)},
    "tp": {"up.weight": (1,), "norm.bias": (0, 1), "down.bias": (0, 1)},
    "fsdp x tp": {"up.weight": (1,), "norm.bias": (0, 1), "down.bias": (0, 1)},
}


def train_in_process(_line: Any, rank: int, num_ranks: int, folder: str) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    # The groups end with the process: torch's destructors can wait for a thread that waits for the interpreter.
    return {kind: train_one(kind, rank) for kind in KINDS}


def train_one(kind: str, rank: int) -> dict[str, Any]:
    """(holders, bytes) of every leaf of a trained model that was also restored once, which changed nothing."""

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
        torch.manual_seed(seed)
        model = distributed_mlp(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
        return model, optimizer, TrainingState([model], [optimizer], {}, rng=False)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
        # Ranks of one tensor-parallel group must see the same data, the others different data.
        source = rank // 2 if "tp" in kind else rank
        for index in range(first, first + 2):
            x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(100 * index + source))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, state = build(1)
    train(model, optimizer, 0)
    image = image_of(state)
    found = {leaf.name: (leaf.holders, bits(leaf.tensor)) for leaf in state.collect().leaves}
    train(model, optimizer, 2)
    end = image_of(state)
    model, optimizer, state = build(2)
    train(model, optimizer, 7)  # DistributedDataParallel divides its reductions anew after the first step
    restore(state, image)
    train(model, optimizer, 2)
    assert_same(image_of(state), end)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(train_in_process, tmp_path_factory.mktemp("job"), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_holders_of_a_trained_model_have_its_bytes(kind: str, trained: list[dict[str, dict[str, Any]]]) -> None:
    ranks = [found[kind] for found in trained]
    wanted = KINDS[kind]
    assert {name: ranks[1][f"model/{name}"][0] for name in wanted} == wanted
    for rank, found in enumerate(ranks):
        assert found.keys() == ranks[0].keys()
        for name, mine in found.items():
            assert rank in mine[0]
            assert {ranks[holder][name] for holder in mine[0]} == {mine}, name
