"""Real groups of several processes: swapped under a model, given up when a peer does not come."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fake_groups import TIMEOUT, net
from groups_in_processes import run_ranks
from torch import nn
from torch.distributed import HashStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from p2pstate.groups import waiting
from p2pstate.groups.group import P2PGroup
from p2pstate.groups.install import install
from p2pstate.groups.status import Status


def swap(_line: Any, rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Train connected, cut everything, step on echoes, connect again in round 2: the model never notices."""
    from groups_in_processes import registry_of

    status = Status()
    status.loud = False
    status.connect(1)
    registry = registry_of(rank, num_ranks, folder, status)
    install(registry, HashStore)
    dist.init_process_group("p2p", store=HashStore(), rank=rank, world_size=num_ranks)
    model = DistributedDataParallel(nn.Linear(2, 2, bias=False))

    def gradient() -> list[list[float]]:
        model.zero_grad()
        model(torch.full((1, 2), float(rank + 1))).sum().backward()
        grad = next(model.parameters()).grad
        assert grad is not None
        return grad.tolist()

    found: dict[str, Any] = {"together": gradient()}
    gradient()
    dist.barrier()
    registry.attach(registry.build(1, own_only=True))
    status.fail(RuntimeError("a peer died"))
    found["alone"] = gradient()
    registry.cut(1)
    registry.release()
    registry.attach(registry.build(2))
    found["before connect"] = gradient()
    status.connect(2)
    found["together again"] = gradient()
    found["error"] = status.error
    return found


def test_swapped_group_reduces_again_under_a_model_that_was_not_rebuilt(tmp_path: Any) -> None:
    for rank, found in enumerate(run_ranks(swap, tmp_path, 2)):
        assert found["together"] == found["together again"] == [[1.5, 1.5], [1.5, 1.5]]
        alone = [[(rank + 1) / 2] * 2] * 2  # DDP divides by two ranks, and echoes keep its own part
        assert found["alone"] == found["before connect"] == alone
        assert found["error"] is None


def load(_line: Any, rank: int, num_ranks: int, folder: str) -> list[float]:
    """Weights that only rank 0 has, into a sharded model. Returns the values of all its elements."""
    from groups_in_processes import registry_of

    status = Status()
    status.connect(1)
    install(registry_of(rank, num_ranks, folder, status), HashStore)
    dist.init_process_group("p2p", store=HashStore(), rank=rank, world_size=num_ranks)
    model = net()
    weights = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights if rank == 0 else {}, options=options)
    whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in model.state_dict().values()]
    return sorted({float(element) for value in whole for element in value.flatten()})


def test_weights_that_one_rank_has_are_loaded_into_a_sharded_model(tmp_path: Any) -> None:
    for found in run_ranks(load, tmp_path, 2):
        assert found == [2.0]


def give_up(_line: Any, rank: int, num_ranks: int, folder: str) -> list[str]:
    """Rank 0 calls every collective while rank 1, alive and connected, takes part in none; then an error is recorded,
    but no connection is cut. Returns those that were waited for longer than an error takes."""
    from groups_in_processes import registry_of

    status = Status()
    registry = registry_of(rank, num_ranks, folder, status)
    status.on_first_error = lambda error, epoch: None
    waiting.ABANDON_AFTER_S = 0.0
    patient = []
    for epoch, (name, arguments) in enumerate(collectives(num_ranks).items(), 1):
        built = registry.build(epoch, own_only=True)
        if rank > 0:
            continue
        group = P2PGroup("all", tuple(range(num_ranks)), rank, TIMEOUT, status)
        group.attach(built.gate)
        status.connect(epoch)
        work = getattr(group, name)(*arguments)
        threading.Timer(0.05, status.fail, [RuntimeError("rank 1 died")]).start()
        began = time.monotonic()
        work.wait()
        if time.monotonic() - began > TIMEOUT.total_seconds() / 3:
            patient.append(name)
    assert registry.make_store is not None
    store = registry.make_store(0)
    if rank == 0:
        store.set("done", "")
    store.wait(["done"], timedelta(seconds=60))
    return patient


def collectives(num_ranks: int) -> dict[str, tuple[Any, ...]]:
    """Arguments for one call of each, as rank 0 makes it."""
    one, all_ = [torch.ones(2)], torch.ones(2 * num_ranks)
    many = [torch.ones(2) for _ in range(num_ranks)]
    return {
        "allreduce": (one,),
        "allreduce_coalesced": (one,),
        "broadcast": (one,),
        "reduce": (one,),
        "barrier": (),
        "allgather": ([many], one),
        "allgather_coalesced": ([one for _ in range(num_ranks)], one),
        "gather": ([many], one),
        "_allgather_base": (all_, *one),
        "allgather_into_tensor_coalesced": ([all_], one),
        "reduce_scatter": (one, [many]),
        "_reduce_scatter_base": (*one, all_),
        "reduce_scatter_tensor_coalesced": (one, [all_]),
        "alltoall": (many, [tensor.clone() for tensor in many]),
        "alltoall_base": (all_, all_.clone(), [], []),
        "recv": (one, 1, 0),
        "recv_anysource": (one, 0),
    }


def test_group_collectives_whose_peer_does_not_come_are_all_given_up_after_an_error(tmp_path: Any) -> None:
    assert run_ranks(give_up, tmp_path, 2)[0] == []
