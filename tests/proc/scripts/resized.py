"""A small model under one parallelism, on any number of ranks: writes what each resumed, holds at its end, has seen.

Arguments: form (ddp or fsdp; on four ranks hsdp or fsdp_tp), folder, steps, and how many seconds to rest
after each. The checkpoint is in the folder.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import p2pstate
from p2pstate.data import Loader, Sampler, Shuffled

NUM_SAMPLES, WIDTH = 4096, 13
GLOBAL_BATCH = 12


class Numbers(torch.utils.data.Dataset):
    """Index, features, and what an augmentation draws."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float]:
        return index, torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)), torch.rand(()).item()


def loader_of(rank: int, num_ranks: int) -> Loader:
    """The global batch is the same for any number of ranks."""
    sampler = Sampler(Shuffled(NUM_SAMPLES, seed=1), GLOBAL_BATCH // num_ranks, rank=rank, num_ranks=num_ranks)
    return Loader(Numbers(), batch_sampler=sampler, num_workers=0, epochs=2)


def main() -> None:
    form, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    p2pstate.init_process_group()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    net = distributed(form, model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = loader_of(rank, num_ranks)
    torch.manual_seed(100 + rank)
    state = p2pstate.Replicator(net, optimizer, data=loader, checkpoint=folder / "ck", checkpoint_every=1000)

    def holds() -> dict[str, torch.Tensor]:
        """Everything, whole, as it is now."""
        found = {name: whole(tensor) for name, tensor in model.named_parameters()}
        for name, parameter in model.named_parameters():
            found |= {f"{name} {k}": whole(optimizer.state[parameter][k]) for k in ("step", "exp_avg", "exp_avg_sq")}
        return found | {f"buffer {n}": b.clone() for n, b in model.named_buffers()} | {"rng": torch.get_rng_state()}

    begins: dict[str, torch.Tensor] = {}

    def train_step(batch: list[torch.Tensor]) -> list[tuple[int, float]]:
        if not state.rehearsing and not begins and optimizer.state:
            begins.update(holds())
        indices, inputs, drawn = batch
        loss = net(inputs + drawn[:, None].float() + 0.01 * torch.rand(())).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return list(zip(indices.tolist(), drawn.tolist(), strict=True))

    seen = {}
    for step, indices in state.run(train_step, steps=steps):
        seen[step] = indices
        time.sleep(float(sys.argv[4]) if len(sys.argv) > 4 else 0.0)
    torch.save({"seen": seen, "begins": begins, "ends": holds()}, folder / f"{num_ranks}-{rank}.pt")


def distributed(form: str, model: nn.Sequential) -> nn.Module:
    if form == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if form == "fsdp":
        return fully_shard(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if form == "hsdp":
        return fully_shard(model, mesh=mesh)
    plan = {"0": ColwiseParallel(output_layouts=Replicate()), "2": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(model, mesh["inner"], plan)
    return fully_shard(model, mesh=mesh["outer"])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


if __name__ == "__main__":
    main()
