"""Names under DistributedDataParallel, shards under FSDP2: in one process, over a store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_zoo import assert_same, bits, image_of, restore
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from p2pstate.state import LeafError, TrainingState


@pytest.fixture(params=[0, 3])
def fake(request: pytest.FixtureRequest) -> Iterator[int]:
    """Rank 0 or 3 of four, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    dist.destroy_process_group()


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def names(*models: nn.Module) -> set[str]:
    return {leaf.name for leaf in TrainingState(models, (), {}, rng=False).collect().leaves}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    for index in range(count):
        model(torch.full((4, 3), 0.3 * index).addcmul(torch.eye(4, 3), torch.eye(4, 3))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("gloo")
def test_names_under_data_parallel_and_compile_are_those_of_the_model() -> None:
    plain = names(net())
    assert names(DistributedDataParallel(net())) == plain
    assert names(DistributedDataParallel(torch.compile(net(), backend="eager"))) == plain
    assert names(torch.compile(DistributedDataParallel(net()), backend="eager")) == plain


def sharded(**kwargs: Any) -> tuple[nn.Sequential, torch.optim.Optimizer, TrainingState]:
    model = net()
    for layer in model:
        fully_shard(layer)
    fully_shard(model, **kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, TrainingState([model], [optimizer], {}, rng=False)


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_restore_under_fsdp2_continues_like_its_twin(num_steps_before: int) -> None:
    model, optimizer, state = sharded()
    train(model, optimizer, 3)
    image = image_of(state)
    train(model, optimizer, 2)
    end = image_of(state)
    model, optimizer, state = sharded()
    train(model, optimizer, num_steps_before)
    restore(state, image)
    assert_same(image_of(state), image)
    moment = optimizer.state[model[0].weight]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert (moment.placements, moment.device_mesh) == (model[0].weight.placements, model[0].weight.device_mesh)
    assert type(optimizer.state[model[0].weight]["step"]) is torch.Tensor
    train(model, optimizer, 2)
    assert_same(image_of(state), end)


class Average:
    """Holds DTensors, from its first update on."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow: dict[str, torch.Tensor] = {}

    def update(self) -> None:
        self.shadow = {name: p.detach() * 0.5 for name, p in self.model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


@pytest.mark.parametrize("updated", [False, True])
def test_restore_of_an_object_that_holds_distributed_tensors_spreads_them_as_captured(fake: int, updated: bool) -> None:
    def build() -> tuple[Average, TrainingState]:
        model = net()
        fully_shard(model)
        average = Average(model)
        return average, TrainingState([model], [], {"average": average}, rng=False)

    average, state = build()
    average.update()
    average.shadow["all"] = distribute_tensor(torch.arange(3.0), model_mesh(average.model), [Replicate()])
    image = image_of(state)
    restore(state, image)
    assert_same(image_of(state), image)
    newcomer, its_state = build()
    if updated:
        newcomer.update()
    restore(its_state, image)
    assert_same(image_of(its_state), image)
    for name, tensor in average.shadow.items():
        restored = newcomer.shadow[name]
        assert isinstance(tensor, DTensor)
        assert isinstance(restored, DTensor)
        assert (restored._spec.placements, restored.shape) == (tensor._spec.placements, tensor.shape)
        assert restored.device_mesh == tensor.device_mesh


def model_mesh(model: nn.Module) -> DeviceMesh:
    return next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))


@pytest.mark.usefixtures("gloo")
def test_fsdp2_leaves_are_plain_live_shards() -> None:
    model, optimizer, state = sharded()
    train(model, optimizer)
    leaves = {leaf.name: leaf for leaf in state.collect().leaves}
    assert leaves["model/0.weight"].tensor.data_ptr() == model[0].weight._local_tensor.data_ptr()
    assert all(type(leaf.tensor) is torch.Tensor for leaf in leaves.values())


@pytest.mark.usefixtures("gloo")
def test_fsdp2_parameters_that_are_gathered_now_are_captured_as_shards() -> None:
    model = net().eval()
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState([model], [optimizer], {}, rng=False)
    before = image_of(state)
    with torch.no_grad():
        model(torch.ones(2, 3))  # evaluation leaves them gathered
    assert type(model[0].weight) is nn.Parameter
    assert_same(image_of(state), before)
    assert type(model[0].weight) is nn.Parameter  # looking changed nothing


@pytest.mark.usefixtures("gloo")
def test_restore_while_fsdp2_parameters_are_gathered_reaches_the_next_forward() -> None:
    model = net().eval()
    fully_shard(model, reshard_after_forward=False)
    state = TrainingState([model], [], {}, rng=False)
    x = torch.ones(2, 3)
    with torch.no_grad():
        wanted = model(x)
    image = image_of(state)
    model.reshard()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
        assert not torch.equal(model(x), wanted)
    assert type(model[0].weight) is nn.Parameter
    restore(state, image)
    with torch.no_grad():
        assert torch.equal(model(x), wanted)


def test_fsdp2_uneven_and_empty_shards_round_trip(fake: int) -> None:
    def make() -> tuple[FSDPModule, torch.optim.Optimizer, TrainingState]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))  # 6 rows over 4 ranks: 2, 2, 2, 0
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, TrainingState([model], [optimizer], {}, rng=False)

    model, optimizer, state = make()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    image = image_of(state)
    tensors = image.tensors
    rows = 2 if fake == 0 else 0
    assert tensors["model/0.weight"].shape == (rows, 4)
    assert tensors["optimizer/model/0.weight/exp_avg"].shape == (rows, 4)
    assert tensors["model/1.weight"].shape == (1 if fake == 0 else 0, 6)
    model, optimizer, state = make()
    restore(state, image)
    assert_same(image_of(state), image)
    moment = optimizer.state[model[0].weight]["exp_avg"]
    assert (moment.shape, moment.to_local().shape) == ((6, 4), (rows, 4))


def test_restore_of_a_shard_of_another_size_names_it(fake: int) -> None:
    def make(rows: int) -> TrainingState:
        model = nn.Linear(2, rows, bias=False)
        fully_shard(model)
        return TrainingState([model], [], {}, rng=False)

    with pytest.raises(LeafError, match="here and") as caught:
        restore(make(12 if fake == 0 else 16), image_of(make(4)))
    assert caught.value.name == "model/weight"


def test_leaf_of_a_distributed_parameter_is_its_local_tensor(fake: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Linear(4, 8, bias=False)
    full = torch.arange(32.0).reshape(8, 4)
    model.weight = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None))
    state = TrainingState([model], [], {}, rng=False)
    [leaf] = state.collect().leaves
    assert bits(leaf.tensor) == bits(full[2 * fake : 2 * fake + 2])


def zero_redundancy() -> tuple[nn.Sequential, Any, TrainingState]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    groups = [
        {"params": [*model[0].parameters(), *model[1].parameters()], "lr": 0.3},
        {"params": model[2].parameters()},
    ]
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.1, parameters_as_bucket_view=True)
    return model, optimizer, TrainingState([model], [optimizer], {}, rng=False)


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_restore_of_a_zero_redundancy_optimizer_continues_like_its_twin(num_steps_before: int) -> None:
    model, optimizer, state = zero_redundancy()
    train(model, optimizer, 3)
    optimizer.param_groups[1]["lr"] = 0.2
    image = image_of(state)
    train(model, optimizer, 2)
    end = image_of(state)
    model, optimizer, state = zero_redundancy()
    train(model, optimizer, num_steps_before)
    restore(state, image)
    assert_same(image_of(state), image)
    assert optimizer.optim.param_groups[1]["lr"] == 0.2
    train(model, optimizer, 2)
    assert_same(image_of(state), end)


def test_state_of_a_zero_redundancy_optimizer_is_held_by_this_rank_only(fake: int) -> None:
    model, optimizer, state = zero_redundancy()
    train(model, optimizer)
    leaves = [leaf for leaf in state.collect().leaves if leaf.name.startswith("optimizer/")]
    assert 0 < len(leaves) < 3 * len(list(model.parameters())), "nothing was divided"
    assert {leaf.holders for leaf in leaves} == {(fake,)}


@pytest.mark.usefixtures("gloo")
def test_capture_of_a_zero_redundancy_optimizer_that_steps_in_hooks_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    with pytest.raises(LeafError, match="without overlap_with_ddp"):
        TrainingState([model], [optimizer], {}, rng=False)


def fully_sharded(use_orig_params: bool) -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    layers = [FullyShardedDataParallel(layer, **options) for layer in net()]
    model = FullyShardedDataParallel(nn.Sequential(*layers), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, TrainingState([model], [optimizer], {}, rng=False)


@pytest.mark.usefixtures("gloo")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_restore_under_fsdp1_continues_like_its_twin(use_orig_params: bool) -> None:
    model, optimizer, state = fully_sharded(use_orig_params)
    train(model, optimizer, 3)
    image = image_of(state)
    name = "model/0.weight" if use_orig_params else "model/0._flat_param"
    assert {name, f"optimizer/{name}/exp_avg"} <= image.tensors.keys()
    train(model, optimizer, 2)
    end = image_of(state)
    model, optimizer, state = fully_sharded(use_orig_params)
    train(model, optimizer, 2)
    with torch.no_grad():
        model(torch.ones(2, 3))  # its root's parameters stay gathered
    restore(state, image)
    assert_same(image_of(state), image)
    train(model, optimizer, 2)
    assert_same(image_of(state), end)
