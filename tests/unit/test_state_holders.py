"""Who holds a leaf: computed by one rank after the other over groups whose collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from p2pstate.state import Leaf, Scope, TrainingState

Holders = dict[str, tuple[int, ...]]


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(params=[0, 3])
def fake(request: pytest.FixtureRequest) -> Iterator[int]:
    """Rank 0 or 3 of four."""
    with rank_of(request.param, 4):
        yield request.param


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


PARAMETERS = {"model/0.weight", "model/0.bias", "model/1.weight", "model/1.bias", "model/2.weight", "model/2.bias"}


def holders(*models: nn.Module, optimizers: Any = (), **objects: Any) -> Holders:
    state = TrainingState(models, optimizers, objects, rng=False)
    return {leaf.name: leaf.holders for leaf in state.collect().leaves}


def shared(found: Holders, with_ranks: tuple[int, ...]) -> set[str]:
    """Names held by these ranks; all others must be held by one rank only."""
    assert {len(ranks) for ranks in found.values()} <= {1, len(with_ranks)}
    return {name for name, ranks in found.items() if ranks == with_ranks}


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_holders_under_data_parallel_are_all_for_parameters_and_their_state_only(fake: int) -> None:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    step(optimizer)
    found = holders(model, optimizers=[optimizer])
    wanted = set(PARAMETERS)
    for parameter in PARAMETERS:
        wanted |= {f"optimizer/{parameter}/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert shared(found, (0, 1, 2, 3)) == wanted
    assert found["model/1.running_mean"] == (fake,)
    assert found["model/1.num_batches_tracked"] == (fake,)
    assert found["optimizer/:groups/0/lr"] == (fake,)


def test_holders_of_frozen_parameters_under_data_parallel_are_all(fake: int) -> None:
    model = net()
    model[0].requires_grad_(False)
    assert shared(holders(DistributedDataParallel(model)), (0, 1, 2, 3)) == PARAMETERS


def test_holders_of_a_wholly_frozen_copy_are_this_rank_only(fake: int) -> None:
    model = DistributedDataParallel(net())
    assert set(holders(model.requires_grad_(False)).values()) == {(fake,)}


def test_holders_of_an_object_are_this_rank_only(fake: int) -> None:
    assert set(holders(ema=DistributedDataParallel(net())).values()) == {(fake,)}


def test_holders_of_ignored_parameters_are_this_rank_only(fake: int) -> None:
    model = net()
    model[2] = checkpoint_wrapper(model[2])
    ignored = ["0.weight", "2._checkpoint_wrapped_module.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    found = holders(DistributedDataParallel(model))
    assert shared(found, (0, 1, 2, 3)) == PARAMETERS - {"model/0.weight", "model/2.bias"}
    assert found["model/0.weight"] == (fake,)


def test_holders_outside_of_an_inner_data_parallel_are_this_rank_only(fake: int) -> None:
    model = nn.ModuleDict({"tower": DistributedDataParallel(nn.Linear(2, 2)), "head": nn.Linear(2, 1)})
    found = holders(model)
    assert shared(found, (0, 1, 2, 3)) == {"model/tower.weight", "model/tower.bias"}
    assert found["model/head.bias"] == (fake,)


def test_holders_under_data_parallel_of_some_ranks_are_those(fake: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=pairs[fake // 2])
    pair = (0, 1) if fake == 0 else (2, 3)
    assert shared(holders(model), pair) == {"model/weight", "model/bias"}


def test_holders_under_data_parallel_in_a_mesh_are_its_column(fake: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=mesh.get_group("dp"))
    assert set(holders(model).values()) == {(0, 2) if fake == 0 else (1, 3)}


def test_holders_without_any_wrapper_are_this_rank_only(fake: int) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(optimizer)
    assert set(holders(model, optimizers=[optimizer]).values()) == {(fake,)}


def test_holders_without_process_groups_are_rank_0() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(optimizer)
    assert set(holders(model, optimizers=[optimizer], extra_net=net()).values()) == {(0,)}


def test_holders_of_fsdp2_shards_are_this_rank_only(fake: int) -> None:
    model = net()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    step(optimizer)
    assert set(holders(model, optimizers=[optimizer]).values()) == {(fake,)}


def test_scope_of_a_leaf_is_replicated_only_if_all_of_several_ranks_hold_it() -> None:
    one = torch.zeros(1)
    assert Leaf("a", one, (0,)).scope is Scope.RANK
    assert Leaf("a", one, (0, 1)).scope is Scope.RANK  # no process group: nobody to be equal to
    with rank_of(0, 1):
        assert Leaf("a", one, (0,)).scope is Scope.RANK
    with rank_of(1, 2):
        assert Leaf("a", one, (1,)).scope is Scope.RANK
        assert Leaf("a", one, (0, 1)).scope is Scope.REPLICATED
    with rank_of(0, 3):
        assert Leaf("a", one, (0, 1)).scope is Scope.RANK
