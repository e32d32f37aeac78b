"""Who holds what a model on several mesh dimensions has: every one of eight ranks, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from holders_of_leaves import Holders, rank_of
from state_zoo import assert_same, bits, image_of, restore
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from p2pstate.state import TrainingState

MESH_NUMBERS = itertools.count()


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
    names = ("copies", "shards", f"tp {next(MESH_NUMBERS)}")
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
