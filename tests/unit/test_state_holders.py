"""Who holds a leaf: computed by one rank after the other (collectives do nothing), and by ranks that train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups_in_processes import run_ranks
from state_zoo import Codes, assert_same, bits, image_of, restore
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from p2pstate.state import LeafError, TrainingState

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


# -- several dimensions: every one of eight ranks, one after the other


class Block(nn.Module):
    """Seven rows cannot be divided evenly; no two elements are equal, so equal bytes mean equal parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up, self.down, self.odd = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 7)
        self.sequence_norm, self.plain_norm, self.batch_norm = nn.LayerNorm(8), nn.LayerNorm(8), nn.BatchNorm1d(8)
        for parameter in self.parameters():
            nn.init.normal_(parameter)


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "odd": ColwiseParallel()}
    return parallelize_module(Block(), mesh, plan | {"sequence_norm": SequenceParallel()}, src_data_rank=None)


def hsdp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("copies", "shards"))
    return fully_shard(Block(), mesh=mesh)


def hsdp_of_modules() -> nn.Module:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("copies", "shards"))
    model = Block()
    for layer in (model.up, model.down, model.odd):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def fsdp2() -> nn.Module:
    return fully_shard(Block())


def fsdp2_in_halves() -> nn.Module:
    return fully_shard(Block(), mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("halves", "shards"))["shards"])


def replicated_by_fsdp() -> nn.Module:
    model = Block()
    replicate(model)
    return model


def tp() -> nn.Module:
    return tensor_parallel(init_device_mesh("cpu", (2, 4), mesh_dim_names=("copies", "tp"))["tp"])


def fsdp_tp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("shards", "tp"))
    return fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh["shards"])


def fsdp_tp_of_one() -> nn.Module:
    mesh = init_device_mesh("cpu", (4, 1, 2), mesh_dim_names=("copies", "shards", "tp"))
    return fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh["copies", "shards"])


def hsdp_tp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "shards", "tp"))
    return fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh["copies", "shards"])


def hsdp_within_one_mesh() -> nn.Module:
    """Every parameter spans the whole mesh before it is sharded."""
    # torch remembers equal meshes across simulated ranks, and fully_shard asks for this very one: so a new name each.
    names = ("copies", "shards", f"tp of {dist.get_rank()}")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    model = Block()
    for layer in (model.up, model.down, model.odd, model.sequence_norm, model.plain_norm, model.batch_norm):
        for key, parameter in list(layer.named_parameters()):
            placements = [Replicate(), Replicate(), Shard(0) if layer is model.up else Replicate()]
            whole = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            setattr(layer, key, nn.Parameter(whole))
    return fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="copies", shard="shards"))


def odd_order() -> nn.Module:
    """A mesh whose ranks are not in order, and a parameter split along its first dimension only."""
    mesh = DeviceMesh("cpu", [[7, 1, 4, 2], [0, 3, 6, 5]])
    model = Block()
    for layer, placements in ((model.up, [Shard(0), Replicate()]), (model.down, [Replicate(), Shard(1)])):
        full = layer.weight.detach()
        layer.weight = nn.Parameter(distribute_tensor(full, mesh, placements, src_data_rank=None))
    return model


ALL = tuple(range(8))
# make -> a leaf of each kind -> the holders of rank 6's part; any other leaf may be checked against these
CASES: dict[Callable[[], nn.Module], dict[str, tuple[int, ...]]] = {
    hsdp: {"up.weight": (2, 6), "odd.weight": (2, 6), "plain_norm.bias": (2, 6)},
    hsdp_of_modules: {"up.weight": (0, 2, 4, 6), "odd.weight": (0, 2, 4, 6), "plain_norm.bias": (0, 2, 4, 6)},
    fsdp2: {"up.weight": (6,), "odd.weight": (6,), "plain_norm.bias": (6,)},
    fsdp2_in_halves: {"up.weight": (6,), "odd.weight": (6,), "plain_norm.bias": (6,)},
    replicated_by_fsdp: {"up.weight": ALL, "odd.weight": ALL, "plain_norm.bias": ALL},
    tp: {
        "up.weight": (6,),
        "up.bias": (6,),
        "down.weight": (6,),
        "down.bias": (4, 5, 6, 7),
        "odd.weight": (6,),
        "sequence_norm.weight": (4, 5, 6, 7),
        "plain_norm.weight": (6,),
    },
    fsdp_tp: {
        "up.weight": (6,),
        "down.weight": (6,),
        "down.bias": (4, 5, 6, 7),
        "odd.weight": (6,),
        "sequence_norm.weight": (4, 5, 6, 7),
        "plain_norm.weight": (6,),
    },
    fsdp_tp_of_one: {
        "up.weight": (0, 2, 4, 6),
        "down.weight": (0, 2, 4, 6),
        "down.bias": ALL,
        "sequence_norm.weight": ALL,
        "plain_norm.weight": (0, 2, 4, 6),
    },
    hsdp_tp: {
        "up.weight": (2, 6),
        "down.weight": (2, 6),
        "down.bias": (2, 3, 6, 7),
        "odd.weight": (2, 6),
        "sequence_norm.weight": (2, 3, 6, 7),
        "plain_norm.weight": (2, 6),
    },
    hsdp_within_one_mesh: {"up.weight": (2, 6), "down.weight": (2, 3, 6, 7), "plain_norm.bias": (2, 3, 6, 7)},
    odd_order: {"up.weight": (0, 3, 5, 6), "down.weight": (4, 6), "odd.weight": (6,)},
}
# kinds in which every equal copy is known: what is not, is equal by the way the job is written and nothing says so
COMPLETE = (hsdp, hsdp_of_modules, fsdp2, replicated_by_fsdp, hsdp_within_one_mesh)


@dataclass(frozen=True)
class Looked:
    holders: Holders
    bits: dict[str, bytes]


def look(make: Callable[[], nn.Module], rank: int) -> Looked:
    with rank_of(rank, 8):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        leaves = TrainingState([model], [optimizer], {}, rng=False).collect().leaves
        return Looked({leaf.name: leaf.holders for leaf in leaves}, {leaf.name: bits(leaf.tensor) for leaf in leaves})


@pytest.fixture(scope="module", params=list(CASES), ids=lambda make: make.__name__)
def case(request: pytest.FixtureRequest) -> tuple[Callable[[], nn.Module], list[Looked]]:
    return request.param, [look(request.param, rank) for rank in range(8)]


Case = tuple[Callable[[], nn.Module], list[Looked]]


def test_holders_of_each_kind_of_leaf_are_the_ranks_of_the_mesh_that_share_its_shards(case: Case) -> None:
    make, ranks = case
    for name, wanted in CASES[make].items():
        assert ranks[6].holders[f"model/{name}"] == wanted, name
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert ranks[6].holders[f"optimizer/model/{name}/{key}"] == wanted, (name, key)


def test_holders_agree_between_all_that_they_name(case: Case) -> None:
    for rank, looked in enumerate(case[1]):
        for name, held in looked.holders.items():
            assert rank in held
            assert list(held) == sorted(set(held))
            assert {case[1][holder].holders[name] for holder in held} == {held}, name


def test_holders_have_the_same_bytes(case: Case) -> None:
    make, ranks = case
    for looked in ranks:
        for name, held in looked.holders.items():
            equal = tuple(rank for rank in range(8) if ranks[rank].bits[name] == looked.bits[name])
            assert set(held) <= set(equal), name
            if make in COMPLETE and looked.bits[name] and name.endswith(("weight", "bias", "exp_avg")):
                assert held == equal, name


def test_holders_of_buffers_are_this_rank_only(case: Case) -> None:
    for rank, looked in enumerate(case[1]):
        assert {looked.holders[f"model/batch_norm.{key}"] for key in ("running_mean", "num_batches_tracked")} == {
            (rank,)
        }


@pytest.mark.parametrize("make", [hsdp, hsdp_of_modules, tp, fsdp_tp, hsdp_tp], ids=lambda make: make.__name__)
@pytest.mark.parametrize("rank", [0, 6])
@pytest.mark.parametrize("stepped", [False, True])
def test_restore_of_several_dimensions_round_trips(make: Callable[[], nn.Module], rank: int, stepped: bool) -> None:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
        model = make()
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter._local_tensor if isinstance(parameter, DTensor) else parameter)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, TrainingState([model], [optimizer], {}, rng=False)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()

    with rank_of(rank, 8):
        model, optimizer, state = build(1)
        train(model, optimizer)
        image = image_of(state)
        train(model, optimizer)
        end = image_of(state)
        model, optimizer, state = build(2)
        if stepped:
            train(model, optimizer)
        assert bits(image.tensors["model/down.weight"]) != bits(image_of(state).tensors["model/down.weight"])
        restore(state, image)
        assert_same(image_of(state), image)
        for parameter in model.parameters():
            moment = optimizer.state[parameter]["exp_avg"]
            assert type(moment) is (DTensor if isinstance(parameter, DTensor) else torch.Tensor)
            if isinstance(parameter, DTensor):
                assert (moment.placements, moment.device_mesh) == (parameter.placements, parameter.device_mesh)
                assert moment.shape == parameter.shape
        train(model, optimizer)
        assert_same(image_of(state), end)


# -- four ranks that train


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
