"""Batches on their way to a device."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from p2pstate.data import Loader
from p2pstate.data.device import Stager

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Record:
    tensor: torch.Tensor
    name: str


class Squares(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "pair": Pair(torch.full((1000,), float(index)), [torch.tensor(index**2)])}


def check(batches: list[Any], device: str) -> None:
    indices = torch.cat([batch["index"] for batch in batches])
    assert indices.device.type == device
    assert indices.tolist() == list(range(40))
    for batch in batches:
        assert isinstance(batch["pair"], Pair)
        assert torch.equal(batch["pair"].left[:, 7], batch["index"].float())
        assert torch.equal(batch["pair"].right[0], batch["index"] ** 2)


def test_stager_moves_tensors_in_any_structure_and_leaves_the_rest() -> None:
    stager = Stager(torch.device("meta"), pin_memory=False)
    batch = {"a": torch.ones(2), "b": [Pair(torch.ones(1), "text")], "c": (torch.ones(3), 5), "d": None}
    batch["e"] = record = Record(torch.ones(4), "text")
    moved = stager.finish(stager.start(batch))
    assert moved["a"].device.type == moved["b"][0].left.device.type == moved["c"][0].device.type == "meta"
    assert (moved["b"][0].right, moved["c"][1], moved["d"]) == ("text", 5, None)
    assert (moved["e"].tensor.device.type, moved["e"].name, record.tensor.device.type) == ("meta", "text", "cpu")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_with_a_device_delivers_there(num_workers: int) -> None:
    loader = Loader(Squares(), 4, num_workers=num_workers, device="cpu")
    check(list(loader), "cpu")
    loader.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_with_a_card_prefetches_to_it_and_delivers_the_same_bits(num_workers: int) -> None:
    loader = Loader(Squares(), 4, num_workers=num_workers, device="cuda")
    batches = []
    for batch in loader:
        torch.cuda._sleep(1_000_000)  # the step computes while the next batch comes
        batches.append(batch)
    check(batches, "cuda")
    loader.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_loader_pins_memory_where_there_is_a_card() -> None:
    loader = Loader(Squares(), 4, num_workers=1)
    assert all(batch["pair"].left.is_pinned() for batch in loader)
    loader.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_loader_set_back_delivers_unchanged_batches_to_a_card() -> None:
    loader = Loader(Squares(), 4, num_workers=1, device="cuda")
    batches = iter(loader)
    state = loader.state_dict()
    first = next(batches)
    kept = first["pair"].left.clone()
    first["pair"].left.zero_()
    loader.load_state_dict(state)
    assert torch.equal(next(iter(loader))["pair"].left, kept)
    loader.close()
