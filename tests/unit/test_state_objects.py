"""Schedulers, scalers, loaders, generators and the user's own dict come back with exact types, in place if possible."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from state_zoo import assert_same, image_of, restore
from torch import nn
from torch.optim import lr_scheduler as lr

from p2pstate.state import LeafError, TrainingState, free_name


def made(scheduler: Callable[[Any], Any], rate: Any = 0.5) -> tuple[torch.optim.Optimizer, Any, TrainingState]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    schedule = scheduler(optimizer)
    return optimizer, schedule, TrainingState([model], [optimizer], {"scheduler": schedule})


class Half:
    """A callable schedule with state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.5**epoch


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr.LambdaLR(o, lambda epoch: 0.9**epoch),
    "lambda object": lambda o: lr.LambdaLR(o, Half()),
    "multiplicative": lambda o: lr.MultiplicativeLR(o, lambda epoch: 0.9),
    "step": lambda o: lr.StepLR(o, 2),
    "multistep": lambda o: lr.MultiStepLR(o, [2, 2, 4]),
    "constant": lambda o: lr.ConstantLR(o, total_iters=3),
    "linear": lambda o: lr.LinearLR(o, total_iters=4),
    "exponential": lambda o: lr.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr.PolynomialLR(o, 5),
    "cosine": lambda o: lr.CosineAnnealingLR(o, T_max=6),
    "warm restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=3),
    "one cycle": lambda o: lr.OneCycleLR(o, max_lr=1.0, total_steps=20),
    "cyclic": lambda o: lr.CyclicLR(o, base_lr=0.1, max_lr=1.0, step_size_up=2),
    "sequential": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, total_iters=2), lr.CosineAnnealingLR(o, T_max=4), lr.StepLR(o, 1)], milestones=[2, 5]
    ),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, total_iters=2), lr.ExponentialLR(o, 0.9)]),
}


def rates(optimizer: torch.optim.Optimizer, schedule: Any, count: int) -> list[list[Any]]:
    result = []
    for _ in range(count):
        optimizer.step()
        schedule.step()
        result.append([[float(g["lr"]), g["momentum"]] for g in optimizer.param_groups] + schedule.get_last_lr())
    return result


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_restore_of_a_scheduler_continues_its_rates(make: Any) -> None:
    optimizer, schedule, state = made(make)
    rates(optimizer, schedule, 3)
    image = image_of(state)
    wanted = rates(optimizer, schedule, 5)
    end = image_of(state)
    for fresh in (False, True):
        if fresh:
            optimizer, schedule, state = made(make)
            rates(optimizer, schedule, 1)
        restore(state, image)
        assert_same(image_of(state), image)
        assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
        assert rates(optimizer, schedule, 5) == wanted
        assert image_of(state).values == end.values


def test_restore_of_a_scheduler_over_a_tensor_rate_keeps_the_tensor() -> None:
    optimizer, schedule, state = made(lambda o: lr.ExponentialLR(o, 0.9), torch.tensor(0.5))
    rates(optimizer, schedule, 2)
    image = image_of(state)
    live, value = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["lr"].item()
    rates(optimizer, schedule, 2)
    restore(state, image)
    assert optimizer.param_groups[0]["lr"] is live
    assert live.item() == value == pytest.approx(0.405)
    assert_same(image_of(state), image)


def test_restore_of_a_plateau_scheduler_keeps_its_infinity() -> None:
    optimizer, schedule, state = made(lambda o: lr.ReduceLROnPlateau(o, patience=1))
    image = image_of(state)
    for loss in (3.0, 3.0, 3.0, 3.0):
        schedule.step(loss)
    assert optimizer.param_groups[0]["lr"] < 0.5
    restore(state, image)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert schedule.best == float("inf")


def test_restore_of_a_loss_scaler_keeps_scale_and_growth() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    state = TrainingState([model], [optimizer], {"scaler": scaler})

    def step(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    image = image_of(state)
    step(float("inf"))  # an overflow in the very first step: skipped, so there is no optimizer state
    assert scaler.state_dict()["scale"] == 4
    step(1.0)
    overflowed = image_of(state)
    assert scaler.state_dict()["_growth_tracker"] == 1
    step(1.0)
    step(1.0)
    assert scaler.get_scale() == 8
    restore(state, overflowed)
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (4, 1)
    assert_same(image_of(state), overflowed)
    restore(state, image)
    assert scaler.get_scale() == 8


class Average:
    """An exponential average that keeps its tensors in a dict, and keeps what it is given."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self.num_updates = 0

    def update(self, model: nn.Module) -> None:
        self.num_updates += 1
        for name, tensor in model.named_parameters():
            self.shadow[name].lerp_(tensor.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.num_updates = state["shadow"], state["num_updates"]


def test_restore_of_an_average_gives_it_tensors_of_its_own() -> None:
    model = nn.Linear(2, 1)
    average = Average(model)
    state = TrainingState([model], [], {"ema": average})
    average.update(model)
    image = image_of(state)
    assert sorted(name for name in image.tensors if name.startswith("ema/")) == ["ema/shadow/bias", "ema/shadow/weight"]
    average.shadow["weight"].fill_(9)
    average.num_updates = 77
    restore(state, image)
    assert average.num_updates == 1
    image.region.fill_(1)
    assert torch.equal(average.shadow["weight"], model.weight)


class Loader:
    """A loader with a NumPy generator, a window and a snapshot of nested, changing shape."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(4)
        self.legacy = np.random.Generator(np.random.MT19937(4))
        self.recent: deque[int] = deque(maxlen=2)
        self.position = 0

    def draw(self) -> tuple[int, float, list[int]]:
        self.position += 1
        self.recent.append(self.position)
        return int(self.generator.integers(1 << 40)), float(self.legacy.random()), list(self.recent)

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self.generator.bit_generator.state,
            "legacy": self.legacy.bit_generator.state,
            "recent": self.recent,
            "workers": {rank: OrderedDict(position=self.position, seen=(rank, None)) for rank in range(self.position)},
            "pending": [torch.arange(n) for n in range(self.position)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.bit_generator.state = state["generator"]
        self.legacy.bit_generator.state = state["legacy"]
        self.recent = state["recent"]
        self.position = len(state["workers"])
        assert [tensor.tolist() for tensor in state["pending"]] == [list(range(n)) for n in range(self.position)]
        assert all(type(key) is int and type(one) is OrderedDict for key, one in state["workers"].items())


def test_restore_of_a_loader_continues_its_streams_and_window() -> None:
    loader = Loader()
    state = TrainingState([], [], {"data": loader})
    for _ in range(3):
        loader.draw()
    image = image_of(state)
    wanted = [loader.draw() for _ in range(3)]
    loader = Loader()
    state = TrainingState([], [], {"data": loader})
    restore(state, image)
    assert_same(image_of(state), image)
    assert [loader.draw() for _ in range(3)] == wanted
    assert loader.recent.maxlen == 2


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(3, generator=g).tolist()),
    "numpy": (lambda: np.random.default_rng(3), lambda g: g.random(3).tolist()),
    "numpy legacy": (lambda: np.random.RandomState(3), lambda g: g.randn(3).tolist()),
    "python": (lambda: random.Random(3), lambda g: [g.gauss(0, 1) for _ in range(3)]),
}


@pytest.mark.parametrize(("make", "draw"), GENERATORS.values(), ids=GENERATORS)
@pytest.mark.parametrize("place", ["object", "extra"])
def test_restore_of_a_generator_object_continues_it_in_place(make: Any, draw: Any, place: str) -> None:
    generator = make()
    extra = {"mine": generator, "n": 1} if place == "extra" else None
    state = TrainingState([], [], {} if extra else {"mine": generator}, extra=extra)
    draw(generator)
    image = image_of(state)
    wanted = draw(generator)
    restore(state, image)
    assert draw(generator) == wanted
    if extra is not None:
        assert extra["mine"] is generator


def test_restore_of_a_generator_object_of_another_kind_is_refused() -> None:
    image = image_of(TrainingState([], [], {"mine": random.Random(1)}))
    with pytest.raises(LeafError, match="does not fit a Generator"):
        restore(TrainingState([], [], {"mine": torch.Generator()}), image)
    image = image_of(TrainingState([], [], {}, extra={"mine": random.Random(1)}))
    extra: dict[str, Any] = {"mine": 5}
    restore(TrainingState([], [], {}, extra=extra), image)  # what stands in extra is replaced
    assert extra["mine"].random() == random.Random(1).random()


def test_restore_of_extra_is_in_place_with_order_types_and_tensors() -> None:
    kept = torch.zeros(3)
    extra: dict[str, Any] = {"z": 1, "a": (1, [2.0, None]), "best": kept, "set": {1, 2}, "list": [torch.ones(2), 5]}
    state = TrainingState([], [], {}, extra=extra)
    wanted = {"z": 1, "a": (1, [2.0, None]), "set": {1, 2}}
    image = image_of(state)
    extra.pop("a")
    extra.update(z=1.0, new=5, set=None)
    kept.fill_(4)
    restore(state, image)
    assert list(extra) == ["z", "a", "best", "set", "list"]
    assert {key: extra[key] for key in wanted} == wanted
    assert type(extra["z"]) is int
    assert extra["best"] is kept
    assert kept.tolist() == [0, 0, 0]
    assert extra["list"][0].tolist() == [1, 1]
    assert_same(image_of(state), image)


def test_collect_of_extra_sees_a_plain_int_of_this_moment() -> None:
    extra = {"n": 1, "deep": {"m": [1]}}
    state = TrainingState([], [], {}, extra=extra)
    collected = state.collect()
    extra["n"] = 2
    extra["deep"]["m"].append(2)  # type: ignore[index]
    state.restore({}, collected.values)
    assert extra == {"n": 1, "deep": {"m": [1]}}


@pytest.mark.parametrize(
    ("objects", "extra", "name", "what"),
    [
        ({"loader": iter([])}, None, "loader", "no state_dict and load_state_dict"),
        ({"model": Loader()}, None, "model", "cannot be the name"),
        ({"optimizer3": Loader()}, None, "optimizer3", "cannot be the name"),
        ({"rng": Loader()}, None, "rng", "cannot be the name"),
        ({"a/b": Loader()}, None, "a/b", "cannot be the name"),
        ({"": Loader()}, None, "''", "cannot be the name"),
        ({"dice": random.SystemRandom()}, None, "dice", "no state_dict and load_state_dict"),
        ({"opt": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, None, "opt", "is an optimizer"),
        ({}, {"f": {"g": print}}, "extra/f/g", "not a plain value"),
    ],
)
def test_capture_of_an_impossible_object_is_refused(objects: Any, extra: Any, name: str, what: str) -> None:
    with pytest.raises(LeafError, match=what) as caught:
        TrainingState([], [], objects, extra=extra)
    assert caught.value.name == name


def test_name_of_an_object_is_its_class_and_a_number_that_is_free() -> None:
    class Model(Loader):
        """Called like something else."""

    taken: dict[str, Any] = {}
    for thing in (Loader(), Model(), Loader(), Model(), random.Random(1)):
        taken[free_name(thing, taken)] = thing
    assert list(taken) == ["loader0", "model_0", "loader1", "model_1", "random0"]
    TrainingState([], [], taken)


def test_capture_of_two_leaves_with_one_name_is_refused() -> None:
    odd = {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}, (1, 2): torch.ones(1), "(1, 2)": torch.ones(1)}
    with pytest.raises(LeafError, match="two different leaves"):
        TrainingState([], [], {}, extra={"odd": odd})
    del odd["(1, 2)"]
    assert len(TrainingState([], [], {}, extra={"odd": odd}).collect().leaves) == 3
