"""What an optimizer of the user's own keeps in attributes: state if it changes, a setting if it doesn't."""

from __future__ import annotations

from typing import Any

import torch
from state_zoo import image_of, restore
from torch import nn

from p2pstate.state import TrainingState


class Averaging(torch.optim.Optimizer):
    def __init__(self, parameters: Any, where: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.num_steps = 0
        self.norms: list[float] = []
        self.average = torch.zeros(6)
        self.where = where
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.flat = torch.zeros(12)
        for index, parameter in enumerate(self.parameters):
            self.state[parameter]["sum"] = self.flat[6 * index : 6 * index + 6].view_as(parameter)
        self.size_of = len

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        self.newest = self.num_steps * 10
        self.average.lerp_(self.parameters[0].grad.flatten(), 0.5)
        self.norms = [*self.norms, float(self.average.norm())][-2:]
        for parameter in self.parameters:
            parameter -= 0.1 / self.num_steps * parameter.grad + 0.1 * self.average.norm()


def job(where: str = "here") -> tuple[Averaging, TrainingState]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False))
    optimizer = Averaging(model.parameters(), where)
    return optimizer, TrainingState([model], [optimizer], {}, rng=False)


def train(optimizer: Averaging, count: int) -> None:
    first, second = optimizer.parameters
    for index in range(count):
        optimizer.zero_grad()
        (second @ first @ torch.full((3,), 0.3 + index)).square().sum().backward()
        optimizer.step()


def seen(optimizer: Averaging) -> list[Any]:
    numbers = [optimizer.num_steps, optimizer.norms, getattr(optimizer, "newest", None)]
    return [*numbers, *(t.tolist() for t in (optimizer.average, *optimizer.parameters))]


def test_attributes_that_changed_continue_in_a_newcomer_and_in_a_survivor() -> None:
    owner, state = job()
    train(owner, 3)
    image = image_of(state)
    at_three = seen(owner)
    average = owner.average
    train(owner, 2)
    at_five = seen(owner)
    newcomer, its_state = job("there")
    train(newcomer, 1)
    for optimizer, target in ((owner, state), (newcomer, its_state)):
        restore(target, image)
        assert seen(optimizer) == at_three
        assert target.collect().values == image.values or optimizer is newcomer
        train(optimizer, 2)
        assert seen(optimizer) == at_five
    assert owner.average is average
    assert newcomer.where == "there"


def test_going_back_to_before_the_first_step_undoes_attributes() -> None:
    owner, state = job()
    image = image_of(state)
    train(owner, 2)
    state.collect()
    restore(state, image)
    assert (owner.num_steps, owner.norms, hasattr(owner, "newest")) == (0, [], False)


def test_memory_that_is_captured_already_and_parameters_are_not_captured_twice() -> None:
    owner, state = job()
    train(owner, 1)
    names = [leaf.name for leaf in state.collect().leaves if ":attributes" in leaf.name]
    assert names == ["optimizer/:attributes/average"]


def test_torchs_own_optimizers_have_no_attributes_in_the_state() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.note = "not seen"  # type: ignore[attr-defined]
    assert b"not seen" not in TrainingState([model], [optimizer], {}, rng=False).collect().values
