"""Every random stream of the process continues exactly, and reading one draws nothing from it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from state_zoo import image_of, restore

from p2pstate.state import LeafError, TrainingState
from p2pstate.state import rng as streams
from p2pstate.state.decoding import decode
from p2pstate.state.encoding import encode


def draws() -> list[Any]:
    python = [random.random(), random.gauss(0, 1), random.randrange(10**30)]
    numpy = [np.random.rand(), np.random.randn(), np.random.permutation(5).tolist()]
    return [python, numpy, torch.rand(3).tolist(), torch.randn(2).tolist(), torch.nn.Dropout()(torch.ones(20)).tolist()]


@pytest.fixture(autouse=True)
def _streams_left_as_they_were() -> Any:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def test_streams_kept_over_a_block_go_on_as_if_it_had_not_been() -> None:
    before = streams.capture()
    with streams.kept():
        draws()
    assert encode(streams.capture()) == encode(before)


def test_restore_of_all_streams_repeats_the_draws() -> None:
    state = TrainingState([], [], {})
    draws()  # leaves the second half of a pair of normal numbers behind in each stream
    image = image_of(state)
    wanted = [draws() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    restore(state, image)
    assert [draws() for _ in range(3)] == wanted


def test_collect_and_restore_draw_nothing() -> None:
    state = TrainingState([torch.nn.Linear(2, 2)], [], {})
    image = image_of(state)
    before = encode(streams.capture())
    state.collect()
    assert encode(streams.capture()) == before
    restore(state, image)
    assert encode(streams.capture()) == before
    draws()
    assert encode(streams.capture()) != before


def test_equal_streams_give_equal_bytes() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    one = encode(streams.capture())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert encode(streams.capture()) == one


def test_capture_is_plain_and_restores_after_its_round_trip() -> None:
    value = decode(encode(streams.capture()))
    wanted = draws()
    streams.restore(value)
    assert draws() == wanted


def test_state_without_rng_leaves_the_streams_alone() -> None:
    state = TrainingState([], [], {}, rng=False)
    image = image_of(state)
    torch.manual_seed(9)
    wanted = torch.rand(2).tolist()
    torch.manual_seed(9)
    restore(state, image)
    assert torch.rand(2).tolist() == wanted


@pytest.mark.parametrize("owner_has_rng", [True, False])
def test_restore_with_rng_on_one_side_only_is_refused(owner_has_rng: bool) -> None:
    image = image_of(TrainingState([], [], {}, rng=owner_has_rng))
    with pytest.raises(LeafError) as caught:
        restore(TrainingState([], [], {}, rng=not owner_has_rng), image)
    assert caught.value.name == "rng"


@pytest.mark.parametrize("part", ["python", "numpy", "torch"])
@pytest.mark.parametrize("damage", [None, b"", (3, b"abc", None), {"bit_generator": "PCG64"}])
def test_restore_of_a_damaged_stream_is_an_error(part: str, damage: Any) -> None:
    with pytest.raises(LeafError, match="cannot be set"):
        streams.restore({**streams.capture(), part: damage})


class Device:
    """Stands for the generator of one CUDA device: (seed, offset) of Philox, 16 bytes."""

    def __init__(self, seed: int, offset: int = 0) -> None:
        self.state = torch.tensor([seed, offset]).view(torch.uint8)

    def get_state(self) -> torch.Tensor:
        return self.state

    def set_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """Three CUDA devices, of which number 1 is the current one."""
    made = [Device(5, 12), Device(6, 8), Device(7)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return made


def test_restore_of_cuda_streams_gives_the_current_device_that_of_the_current_one(
    devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = decode(encode(streams.capture()))
    for device in devices:
        device.state = torch.zeros(16, dtype=torch.uint8)
    streams.restore(state)
    assert [device.state.view(torch.int64).tolist() for device in devices] == [[5, 12], [6, 8], [7, 0]]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # on another node it may have another number
    streams.restore(state)
    assert [device.state.view(torch.int64).tolist() for device in devices] == [[6, 8], [5, 12], [7, 0]]


def test_restore_of_cuda_streams_where_fewer_devices_are_needs_only_those_that_were_drawn_from(
    devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = streams.capture()
    monkeypatch.setattr(torch.cuda, "default_generators", devices[:2])
    streams.check(state)
    streams.restore(state)
    monkeypatch.setattr(torch.cuda, "default_generators", devices[:1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(LeafError, match="3 devices"):
        streams.check(state)
    with pytest.raises(LeafError, match="damaged"):
        streams.check({**state, "cuda": b"abc"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_restore_of_a_cuda_stream_without_a_device_is_refused_before_any_write() -> None:
    with pytest.raises(LeafError) as caught:
        streams.check({**streams.capture(), "cuda": [b"\0" * 16]})
    assert caught.value.name == "rng/cuda"


GENERATORS = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "python": lambda: random.Random(3),
    "numpy": lambda: np.random.default_rng(3),
    "philox": lambda: np.random.Generator(np.random.Philox(3)),
    "legacy": lambda: np.random.RandomState(3),
}


def draw(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return generator.gauss(0, 1)
    return generator.normal(size=3).tolist()


class Noisy(torch.optim.Optimizer):
    """Keeps one generator in an attribute, one in its group, and makes one for each parameter in its first step."""

    def __init__(self, parameters: Any, make: Any) -> None:
        super().__init__(parameters, {"noise": make()})
        self.make = make
        self.own = make()

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                entry.setdefault("noise", [self.make()])
        return [
            draw(self.own),
            draw(self.param_groups[0]["noise"]),
            *(draw(e["noise"][0]) for e in self.state.values()),
        ]


class Remembering:
    def __init__(self, make: Any) -> None:
        self.kept = make()

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
@pytest.mark.parametrize("num_rehearsals", [0, 1])
def test_generators_inside_of_the_state_go_on_in_a_newcomer_and_in_a_survivor(make: Any, num_rehearsals: int) -> None:
    def job() -> tuple[Noisy, Remembering, TrainingState]:
        model = torch.nn.Linear(2, 2)
        optimizer, thing = Noisy(model.parameters(), make), Remembering(make)
        return optimizer, thing, TrainingState([model], [optimizer], {"thing": thing}, rng=False)

    owner, its_thing, state = job()
    owner.step()
    draw(its_thing.kept)
    image = image_of(state)
    kept = owner.own
    expected = owner.step(), draw(its_thing.kept)
    newcomer, thing, its_state = job()
    for _ in range(num_rehearsals):
        newcomer.step()
    restore(state, image)
    restore(its_state, image)
    assert (owner.step(), draw(its_thing.kept)) == expected
    assert (newcomer.step(), draw(thing.kept)) == expected
    assert owner.own is kept


def test_generator_of_a_class_of_the_programs_own_has_to_be_there() -> None:
    class Own(random.Random):
        pass

    def job(value: Any) -> TrainingState:
        model = torch.nn.Linear(2, 2)
        return TrainingState(
            [model], [torch.optim.SGD(model.parameters(), lr=0.1)], {}, rng=False, extra={"a": [value]}
        )

    image = image_of(job(Own(1)))
    restore(job(Own(2)), image)
    with pytest.raises(LeafError, match=r"extra/a/0: is a .*Own, and none is here"):
        restore(job(None), image)
