"""rehearsal: how long a newcomer trains alone, and how far its wrappers have come by then."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from p2pstate.plan_recovery import NUM_WARM_STEPS
from p2pstate.rehearsal import CHANGING, MAX_STEPS, MAX_TURNS, NEW, NUM_STEPS, SETTLED, Rehearsals


def train(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


@pytest.mark.usefixtures("gloo")
def test_stages_of_data_parallel_modules_follow_the_layout_of_their_buckets() -> None:
    model, other = DistributedDataParallel(nn.Linear(3, 2)), DistributedDataParallel(nn.Linear(3, 2))
    unused = DistributedDataParallel(nn.Linear(3, 2), find_unused_parameters=True)  # never laid out anew
    rehearsals = Rehearsals([nn.ModuleList([model, unused]), other])
    assert rehearsals.stages() == bytes([NEW, SETTLED, NEW])
    with torch.no_grad():
        model(torch.ones(2, 3))
    with model.no_sync():
        train(model)
    assert rehearsals.stages() == bytes([NEW, SETTLED, NEW])
    train(model)
    assert rehearsals.stages() == bytes([CHANGING, SETTLED, NEW])
    train(model)
    assert rehearsals.stages() == bytes([SETTLED, SETTLED, NEW])


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize(("trained_every", "num_steps"), [(1, 2), (3, 6), (5, MAX_STEPS)])
def test_rehearsals_go_on_until_every_module_is_settled(trained_every: int, num_steps: int) -> None:
    model, other = DistributedDataParallel(nn.Linear(3, 2)), DistributedDataParallel(nn.Linear(3, 2))
    rehearsals = Rehearsals([model, other])
    while rehearsals.go_on():
        train(model)
        if (rehearsals.num_steps + 1) % trained_every == 0:
            train(other)
        rehearsals.num_steps += 1
    assert rehearsals.num_steps == num_steps


def test_rehearsals_without_a_step_end() -> None:
    rehearsals = Rehearsals([nn.Linear(3, 2)])
    assert sum(iter(rehearsals.go_on, False)) == MAX_TURNS


def test_rehearsals_without_data_end() -> None:
    rehearsals = Rehearsals([nn.Linear(3, 2)])
    assert rehearsals.go_on()
    rehearsals.end()
    assert not rehearsals.go_on()
    rehearsals.begin_loop()
    assert rehearsals.go_on(), "another loop may have data"


def test_rehearsals_are_as_many_steps_as_a_round_right_after_them_asks_of_a_survivor() -> None:
    rehearsals = Rehearsals([model := nn.Linear(3, 2)])
    while rehearsals.go_on():
        train(model)
        rehearsals.num_steps += 1
    assert rehearsals.num_steps == NUM_STEPS == NUM_WARM_STEPS
