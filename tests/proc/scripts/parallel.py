"""A small model under one of several parallelisms; kills itself once at a given step, leaves its final state.

Arguments: form (see FORMS), folder, steps, where to die ("STEP:RANKS" or
"STEP:RANKS:node", ranks with commas, or "-"), and for the Replicator NAME=VALUE (JSON).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import p2pstate

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench" / "programs"))

from overhead_model import Block, Data

BATCH = 4

# -- the forms: the wrapped model, and which data a rank sees


def ddp(body: nn.Sequential, rank: int) -> tuple[nn.Module, int]:
    return DistributedDataParallel(body), rank


def ddp_compiled(body: nn.Sequential, rank: int) -> tuple[nn.Module, int]:
    model: nn.Module = torch.compile(DistributedDataParallel(body), backend="eager")  # type: ignore[assignment]
    return model, rank


def ddp_subgroup(body: nn.Sequential, rank: int) -> tuple[nn.Module, int]:
    """Two independent replicas, each over both nodes: ranks 0 and 2, 1 and 3."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return DistributedDataParallel(body, process_group=groups[rank % 2]), rank


def fsdp_uneven(body: nn.Sequential, rank: int, **options: Any) -> tuple[nn.Module, int]:
    for block in body:
        fully_shard(block, **options)
    return fully_shard(body, **options), rank


def fsdp_offload(body: nn.Sequential, rank: int) -> tuple[nn.Module, int]:
    return fsdp_uneven(body, rank, offload_policy=CPUOffloadPolicy(pin_memory=False))


def hsdp(body: nn.Sequential, rank: int) -> tuple[nn.Module, int]:
    """Replicated between the two nodes, sharded inside."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp_uneven(body, rank, mesh=mesh)


def hsdp_apart(body: nn.Sequential, rank: int) -> tuple[nn.Module, int]:
    """The same, with other values on each node: replicas in name only."""
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.add_(rank // 2)
    return hsdp(body, rank)


def tp(body: nn.Sequential, _rank: int) -> tuple[nn.Module, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in body:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return body, 0


def fsdp_tp(body: nn.Sequential, rank: int) -> tuple[nn.Module, int]:
    """Tensor parallel inside a node, sharded between the nodes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for block in body:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fsdp_uneven(body, rank // 2, mesh=mesh["fsdp"])


def fsdp1(body: nn.Sequential, rank: int) -> tuple[nn.Module, int]:
    return flat(body, use_orig_params=True), rank


def fsdp1_flat(body: nn.Sequential, rank: int) -> tuple[nn.Module, int]:
    return flat(body, use_orig_params=False), rank


def flat(body: nn.Sequential, **options: Any) -> nn.Module:
    here = torch.device("cpu")
    blocks = [FullyShardedDataParallel(block, device_id=here, **options) for block in body]
    return FullyShardedDataParallel(nn.Sequential(*blocks), device_id=here, **options)


def plain(body: nn.Sequential, rank: int) -> tuple[nn.Module, int]:
    """Replicated by hand: the loop averages all gradients."""
    return body, rank


FORMS: dict[str, Callable[[nn.Sequential, int], tuple[nn.Module, int]]] = {
    form.__name__: form
    for form in (
        *(ddp, ddp_compiled, ddp_subgroup, fsdp_uneven, fsdp_offload, hsdp, hsdp_apart),
        *(tp, fsdp_tp, fsdp1, fsdp1_flat, plain),
    )
}
# Every byte of the big layers and their optimizer is on the other node anyway
SHARED = ("ddp", "ddp_compiled", "ddp_subgroup", "hsdp")


def width_of(form: str) -> int:
    """One that does not divide where that is possible."""
    return 16 if "tp" in form else 13


def build(form: str, rank: int) -> tuple[nn.Module, int]:
    """The model, and which data this rank sees."""
    torch.manual_seed(0)
    return FORMS[form](nn.Sequential(*(Block(width_of(form)) for _ in range(3))), rank)


def final_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *(optimizer.state[parameter][k] for k in ("step", "exp_avg", "exp_avg_sq"))):
            found.append((tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone())
    return [*found, torch.get_rng_state()]


def main() -> None:
    form, folder, steps, kill = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    p2pstate.init_process_group()
    rank = dist.get_rank()
    model, seed = build(form, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Data(seed, BATCH, width_of(form))
    settings = {name: json.loads(value) for name, _, value in (text.partition("=") for text in sys.argv[5:])}
    state = p2pstate.Replicator(model, optimizer, data=data, **settings)

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(()).expand(1) if "tp" not in form else torch.zeros(1)
        loss = (model(batch).pow(2).mean() * (1 + noise)).sum()
        loss.backward()
        if kill != "-" and not state.rehearsing:
            die_once(kill, state.committed_step + 1, rank, folder)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in state.run(train_step, steps=steps):
        pass
    sizes = [state.stats.num_own_bytes, state.stats.num_shared_bytes]
    found = {"state": final_state(model, optimizer), "sizes": sizes, "described": str(state.describe())}
    torch.save(found, folder / f"final-{rank}.pt")


def die_once(kill: str, step: int, rank: int, folder: Path) -> None:
    parts = kill.split(":")
    if step != int(parts[0]) or str(rank) not in parts[1].split(","):
        return
    try:
        os.close(os.open(folder / f"killed-{rank}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if parts[2:] == ["node"]:
        os.kill(int(os.environ["P2PSTATE_AGENT_PID"]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
