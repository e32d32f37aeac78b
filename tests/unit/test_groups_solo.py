"""Groups of a process that is alone: what a newcomer does before it has peers.

Each installs the backend in a process of its own (see groups_in_processes.py), so that this one stays clean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_groups import RANK, WORLD, install_solo, net
from groups_in_processes import run_alone
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from p2pstate.errors import ConfigError
from p2pstate.groups.group import P2PGroup
from p2pstate.groups.install import installed


def solo_collectives() -> dict[str, Any]:
    install_solo()
    own = torch.tensor([1.0, 2.0])
    found: dict[str, Any] = {"installed": installed(), "is p2p": isinstance(dist.group.WORLD, P2PGroup)}
    found["size"] = (dist.get_world_size(), dist.get_rank(), dist.get_backend())
    dist.barrier()
    reduced = own.clone()
    dist.all_reduce(reduced, op=dist.ReduceOp.AVG)
    found["all_reduce"] = reduced.tolist()
    listed = [torch.full((2,), float("nan")) for _ in range(WORLD)]
    dist.all_gather(listed, own)
    found["all_gather"] = [each.tolist() for each in listed]
    flat = torch.full((2 * WORLD,), float("nan"))
    dist.all_gather_into_tensor(flat, own)
    found["all_gather_into_tensor"] = flat.tolist()
    piece = torch.full((2,), float("nan"))
    dist.reduce_scatter_tensor(piece, torch.arange(2.0 * WORLD))
    found["reduce_scatter_tensor"] = piece.tolist()
    exchanged = [torch.full((1,), float("nan")) for _ in range(WORLD)]
    dist.all_to_all(exchanged, list(torch.arange(float(WORLD)).split(1)))
    found["all_to_all"] = [each.item() for each in exchanged]
    single = torch.full((WORLD,), float("nan"))
    dist.all_to_all_single(single, torch.arange(float(WORLD)))
    found["all_to_all_single"] = single.tolist()
    told = own.clone()
    dist.broadcast(told, src=0)
    found["broadcast"] = told.tolist()
    received = torch.full((2,), float("nan"))
    found["recv"] = (dist.recv(received, src=0), dist.recv(received), received.tolist())
    dist.send(own, dst=0)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, own, 0), dist.P2POp(dist.irecv, received, 0)])
    found["batch_isend_irecv"] = [work.wait() for work in works]
    with dist.distributed_c10d._coalescing_manager():  # type: ignore[attr-defined]
        dist.all_reduce(reduced)
    objects: list[Any] = [None] * WORLD
    dist.all_gather_object(objects, {"rank": 1})
    found["all_gather_object"] = objects
    return found


def test_solo_collectives_have_defined_results() -> None:
    assert run_alone(solo_collectives) == {
        "installed": True,
        "is p2p": True,
        "size": (WORLD, RANK, "p2p"),
        "all_reduce": [1, 2],
        "all_gather": [[1, 2]] * WORLD,
        "all_gather_into_tensor": [1, 2] * WORLD,
        "reduce_scatter_tensor": [2, 3],
        "all_to_all": [0, 1, 2, 3],
        "all_to_all_single": [0, 1, 2, 3],
        "broadcast": [1, 2],
        "recv": (0, 0, [0, 0]),
        "batch_isend_irecv": [True, True],
        "all_gather_object": [{"rank": 1}] * WORLD,
    }


def solo_objects() -> tuple[str, list[float]]:
    install_solo()
    torch.use_deterministic_algorithms(True)  # memory that is not initialised is full of the largest numbers
    raised = ""
    try:
        dist.broadcast_object_list([None], src=(RANK + 1) % WORLD)
    except (EOFError, RuntimeError) as error:
        raised = type(error).__name__
    told = torch.ones(2)
    dist.broadcast(told, src=(RANK + 1) % WORLD)
    return raised, told.tolist()


def test_solo_broadcast_of_objects_takes_no_memory_for_what_it_does_not_receive() -> None:
    assert run_alone(solo_objects) == ("EOFError", [1, 1])


def train(model: nn.Module, num_steps: int = 3) -> bool:
    """Three steps: DDP lays its buckets out anew after the first. Whether every number stayed finite."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(num_steps):
        loss = model(torch.ones(4, 8) + torch.eye(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = [p.detach().to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    before = [p.to_local() if isinstance(p, DTensor) else p for p in before]
    changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return changed and bool(loss.isfinite()) and all(bool(p.isfinite().all()) for p in after)


def solo_data_parallel() -> bool:
    install_solo()
    return train(DistributedDataParallel(net()))


def solo_compiled() -> bool:
    install_solo()
    model = torch.compile(DistributedDataParallel(net()), backend="eager")
    return train(model)


def solo_sharded() -> tuple[bool, list[int]]:
    install_solo()
    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    shapes = [p.to_local().shape[0] for p in model.parameters() if isinstance(p, DTensor)]
    return train(model), shapes


def solo_hybrid_sharded() -> bool:
    install_solo()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train(fully_shard(net(), mesh=mesh))


@pytest.mark.parametrize("trains", [solo_data_parallel, solo_compiled, solo_hybrid_sharded])
def test_solo_training_runs_whole_steps(trains: Callable[[], bool]) -> None:
    assert run_alone(trains)


def test_solo_fully_sharded_training_runs_whole_steps_on_its_own_shards() -> None:
    assert run_alone(solo_sharded) == (True, [4, 4, 4, 4, 1, 1])


def solo_meshes_and_groups() -> dict[str, Any]:
    registry, _ = install_solo()
    line = init_device_mesh("cpu", (WORLD,))
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    # every process makes every group, also those that it is no member of
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    again = dist.new_group([0, 1], backend="gloo")
    named = dist.new_group([1, 3], backend="cpu:gloo,cuda:nccl")
    keys = [group.key for group in registry.groups]
    return {
        "line": line.get_local_rank(),
        "plane": plane.get_coordinate(),
        "members": [group.members for group in registry.groups],
        "unique": len(keys) == len(set(keys)),
        "ours": [isinstance(group, P2PGroup) for group in (halves[0], again, named)],
        "other half": halves[1] is dist.GroupMember.NON_GROUP_MEMBER,
        "ranks": dist.get_process_group_ranks(named),
    }


def test_solo_meshes_and_groups_are_ours_and_told_apart() -> None:
    found = run_alone(solo_meshes_and_groups)
    assert found["line"] == 1
    assert list(found["plane"]) == [0, 1]
    assert found["unique"]
    assert found["ours"] == [True, True, True]
    assert found["other half"]
    assert found["ranks"] == [1, 3]
    members = set(found["members"])
    assert {(0, 1, 2, 3), (1, 3), (0, 1)} <= members
    assert all(RANK in each for each in members), f"a group that this rank is no member of was registered: {members}"


def unknown_backend() -> str:
    install_solo()
    try:
        dist.new_group([0, 1], backend="mpi")
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_new_group_of_a_backend_that_cannot_be_repaired_is_refused_by_name() -> None:
    assert "'mpi'" in run_alone(unknown_backend)
