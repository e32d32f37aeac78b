"""Who holds a leaf: each rank computes it for itself, without asking the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from holders_of_leaves import holders, rank_of, shared
from state_zoo import Codes
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from p2pstate.state import LeafError, TrainingState


@pytest.fixture(params=[0, 3])
def fake(request: pytest.FixtureRequest) -> Iterator[int]:
    """Rank 0 or 3 of four."""
    with rank_of(request.param, 4):
        yield request.param


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


PARAMETERS = {"model/0.weight", "model/0.bias", "model/1.weight", "model/1.bias", "model/2.weight", "model/2.bias"}


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
    pairs = [dist.new_group(pair, sort_ranks=False) for pair in ([0, 1], [3, 2])]
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


# -- what follows a parameter


class Odd(torch.optim.Optimizer):
    """Keeps one tensor of each kind per parameter."""

    def __init__(self, parameters: Any, keep: Callable[[torch.Tensor], dict[str, Any]]) -> None:
        super().__init__(parameters, {})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = keep(parameter)


def test_holders_of_optimizer_tensors_of_other_shapes_are_this_rank_only(fake: int) -> None:
    def keep(parameter: torch.Tensor) -> dict[str, Any]:
        rows, columns = parameter.shape
        return {
            "moment": torch.zeros(rows, columns, dtype=torch.bfloat16),
            "step": torch.zeros((), dtype=torch.int64),
            "scale": torch.ones(1),
            "row": torch.zeros(rows),
            "history": [torch.zeros(rows, columns), torch.zeros(7)],
            "codes": Codes(torch.zeros(rows, columns, dtype=torch.int8), torch.ones(1)),
            "number": 3,
        }

    model = DistributedDataParallel(nn.Linear(3, 2, bias=False))
    found = holders(model, optimizers=[Odd(model.parameters(), keep)])
    of = {name.removeprefix("optimizer/model/weight/"): held for name, held in found.items()}
    everybody = ("model/weight", "moment", "step", "history/0", "codes/codes", "codes/scale")
    assert shared(of, (0, 1, 2, 3)) == set(everybody)
    assert of["row"] == of["scale"] == of["history/1"] == (fake,)


def test_holders_of_optimizer_tensors_split_unlike_their_parameter_are_this_rank_only(fake: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    other = init_device_mesh("cpu", (4, 1))
    full = torch.arange(16.0).reshape(4, 4)

    def split(*placements: Any, value: torch.Tensor = full, over: DeviceMesh = mesh) -> DTensor:
        return distribute_tensor(value, over, placements, src_data_rank=None)

    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(split(Replicate(), Shard(0)))
    number = torch.tensor(3.0)

    def keep(parameter: torch.Tensor) -> dict[str, Any]:
        return {
            "alike": torch.zeros_like(parameter),
            "whole": split(Replicate(), Replicate()),
            "other_dim": split(Replicate(), Shard(1)),
            "other_mesh": split(Replicate(), Shard(0), over=other),
            "gathered": full.clone(),
            "step": number.clone(),
            "dstep": split(Replicate(), Replicate(), value=number),
            "other_dstep": split(Replicate(), Replicate(), value=number, over=other),
        }

    found = holders(model, optimizers=[Odd(model.parameters(), keep)])
    of = {name.removeprefix("optimizer/model/weight/"): held for name, held in found.items()}
    pair = (0, 2) if fake == 0 else (1, 3)
    assert shared(of, pair) == {"model/weight", "alike", "step", "dstep"}
    assert of["gathered"] == of["whole"] == (fake,)


def test_holders_of_quantised_frozen_weights_under_data_parallel_are_all(fake: int) -> None:
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(Codes(torch.zeros(2, 3, dtype=torch.int8), torch.ones(1)), requires_grad=False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [])
    found = holders(nn.Sequential(DistributedDataParallel(model, init_sync=False)))
    assert shared(found, (0, 1, 2, 3)) == {"model/0.weight/codes", "model/0.weight/scale", "model/0.bias"}


class LookAlike(Codes):
    """Holds a local tensor, as a DTensor does; nobody knows of what."""

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> LookAlike:
        return torch.Tensor._make_wrapper_subclass(cls, local.shape, dtype=local.dtype)

    def __init__(self, local: torch.Tensor) -> None:
        self._local_tensor = local

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_local_tensor"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return LookAlike(args[0]._local_tensor) if func is torch.ops.aten.detach.default else NotImplemented


def test_holders_of_a_subclass_that_may_be_a_shard_are_this_rank_only(fake: int) -> None:
    inner = nn.Linear(3, 2)
    model = DistributedDataParallel(inner)
    state = TrainingState([model], [], {}, rng=False)
    assert {leaf.holders for leaf in state.collect().leaves} == {(0, 1, 2, 3)}
    inner.weight = nn.Parameter(LookAlike(torch.zeros(1, 3)), requires_grad=False)
    assert {leaf.name: leaf.holders for leaf in state.collect().leaves} == {
        "model/weight": (fake,),
        "model/bias": (0, 1, 2, 3),
    }


def test_holders_of_a_parameter_on_a_mesh_of_others_are_this_rank_only(fake: int) -> None:
    mesh = DeviceMesh("cpu", [1, 2])
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, [Replicate()], run_check=False))
    assert set(holders(model).values()) == {(fake,)}


# -- changes


def test_holders_after_a_parameter_was_redistributed_are_new(fake: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Linear(4, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState([model], [optimizer], {}, rng=False)
    assert [leaf.holders for leaf in state.collect().leaves] == [(fake,)]
    for placement, wanted in ((Replicate(), (0, 1, 2, 3)), (Shard(0), (fake,)), (Replicate(), (0, 1, 2, 3))):
        full = torch.arange(32.0).reshape(8, 4)
        model.weight = nn.Parameter(distribute_tensor(full, mesh, [placement], src_data_rank=None))
        optimizer.param_groups[0]["params"] = [model.weight]
        assert [leaf.holders for leaf in state.collect().leaves] == [wanted]


def test_holders_after_part_of_a_model_was_wrapped_are_new(fake: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = TrainingState([model], [], {}, rng=False)
    model[1] = DistributedDataParallel(model[1])
    found = {leaf.name: leaf.holders for leaf in state.collect().leaves}
    assert shared(found, (0, 1, 2, 3)) == {"model/1.weight", "model/1.bias"}
    assert found["model/0.weight"] == (fake,)


def test_holders_follow_the_rank_of_the_process() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(optimizer)
    state = TrainingState([model], [optimizer], {}, rng=False)
    for rank in (3, 1):
        with rank_of(rank, 4):
            assert {leaf.holders for leaf in state.collect().leaves} == {(rank,)}
    assert {leaf.holders for leaf in state.collect().leaves} == {(0,)}


def test_holders_of_a_distributed_parameter_follow_the_rank_of_the_process() -> None:
    model = nn.Linear(4, 8, bias=False)
    with rank_of(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        model.weight = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Replicate()], src_data_rank=None))
        optimizer = Odd(model.parameters(), lambda parameter: {"row": torch.zeros(8), "step": torch.zeros(())})
        state = TrainingState([model], [optimizer], {}, rng=False)

    def found() -> list[tuple[int, ...]]:
        return [leaf.holders for leaf in state.collect().leaves]  # the parameter, row, step

    for rank, pair in ((0, (0, 1)), (1, (0, 1)), (3, (2, 3))):
        with rank_of(rank, 4):
            assert found() == [pair, (rank,), pair]
    with rank_of(6, 8):  # not in the mesh
        assert found() == [(6,)] * 3
    assert found() == [(0,)] * 3


def test_holders_under_data_parallel_whose_group_is_gone_are_this_rank_only() -> None:
    with rank_of(2, 4):
        model = DistributedDataParallel(net())
        state = TrainingState([model], [], {}, rng=False)
        assert (0, 1, 2, 3) in {leaf.holders for leaf in state.collect().leaves}
    assert {leaf.holders for leaf in state.collect().leaves} == {(0,)}
    with rank_of(1, 4):
        assert {leaf.holders for leaf in state.collect().leaves} == {(1,)}


@pytest.mark.parametrize(
    ("hook", "in_step"),
    [
        (default_hooks.fp16_compress_hook, True),
        (post_localSGD_hook.post_localSGD_hook, False),
        (lambda state, bucket: None, False),  # nobody knows what a user's hook averages
    ],
)
def test_holders_under_data_parallel_with_a_communication_hook(fake: int, hook: Any, in_step: bool) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    step(optimizer)
    state = TrainingState([model], [optimizer], {}, rng=False)
    assert {leaf.holders for leaf in state.collect().leaves} == {(0, 1, 2, 3)}
    model.register_comm_hook(None, hook)
    assert {leaf.holders for leaf in state.collect().leaves} == {(0, 1, 2, 3) if in_step else (fake,)}


# -- what is refused


@pytest.mark.usefixtures("fake")
def test_capture_of_a_partial_placement_is_refused() -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Linear(2, 2)
    model.bias = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False))
    with pytest.raises(LeafError, match="summand") as caught:
        TrainingState([model], [], {}, rng=False)
    assert caught.value.name == "model/bias"

    def keep(parameter: torch.Tensor) -> dict[str, Any]:
        return {"row": DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)}

    model = nn.Linear(2, 2)
    with pytest.raises(LeafError, match="summand") as caught:
        TrainingState([model], [Odd(model.parameters(), keep)], {}, rng=False)
    assert caught.value.name == "optimizer/model/weight/row"


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("forwards", [0, 1])
def test_capture_of_tensor_parallelism_under_data_parallel_is_refused(forwards: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()}, src_data_rank=None)
    model = DistributedDataParallel(model, device_mesh=mesh["dp"])
    for _ in range(forwards):
        model(torch.ones(2, 4))
    with pytest.raises(LeafError, match="use fully_shard") as caught:
        TrainingState([model], [], {}, rng=False)
    assert caught.value.name == "model"


def test_data_parallel_in_a_mesh_without_tensor_parallelism_is_not_refused(fake: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
    model = DistributedDataParallel(nn.Linear(2, 2), device_mesh=mesh["dp"])
    assert set(holders(model).values()) == {(0, 2) if fake == 0 else (1, 3)}
