"""Whether an optimizer steps on gradients that are older than its step, by how a loop resets them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from state_zoo import image_of, restore
from torch import nn
from torch.optim import SGD, Optimizer

from p2pstate.state import CarriedGradients, TrainingState


def nothing(_model: nn.Module, _optimizer: Optimizer) -> None:
    pass


def by_hand(model: nn.Module, _optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def zeros_by_hand(model: nn.Module, _optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def decay(model: nn.Module, _optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def half_of_it(model: nn.Module, _optimizer: Optimizer) -> None:
    model[0].zero_grad()  # type: ignore[operator, index]


# how a step begins, how it ends, whether gradients are carried, whether they are zeros between two steps
LOOPS: dict[str, tuple[Callable[[nn.Module, Optimizer], None], Callable[[nn.Module, Optimizer], None], bool, bool]] = {
    "never": (nothing, nothing, True, False),
    "decaying": (decay, nothing, True, False),
    "decaying at the end": (nothing, decay, True, False),
    "half of the model": (half_of_it, nothing, True, False),
    "by hand, to zeros: not seen": (zeros_by_hand, nothing, True, False),
    "at the beginning": (lambda _, o: o.zero_grad(), nothing, False, False),
    "at the beginning, to zeros": (lambda _, o: o.zero_grad(False), nothing, False, False),
    "model, at the beginning": (lambda m, _: m.zero_grad(), nothing, False, False),
    "model, at the beginning, to zeros": (lambda m, _: m.zero_grad(set_to_none=False), nothing, False, False),
    "model, at the end, to zeros": (nothing, lambda m, _: m.zero_grad(False), False, True),
    "by hand": (by_hand, nothing, False, False),
    "at the end": (nothing, lambda _, o: o.zero_grad(), False, True),
    "at the end, to zeros": (nothing, lambda _, o: o.zero_grad(set_to_none=False), False, True),
}


def train(
    model: nn.Module,
    optimizer: Optimizer,
    carried: CarriedGradients,
    begins: Callable[[nn.Module, Optimizer], None],
    ends: Callable[[nn.Module, Optimizer], None],
) -> None:
    """One step, as stepping.py goes through it."""
    carried.begin()
    begins(model, optimizer)
    model(torch.ones(2, 3)).sum().backward()
    carried.at_step()
    optimizer.step()
    ends(model, optimizer)


def job() -> tuple[nn.Module, Optimizer, TrainingState, CarriedGradients]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    state = TrainingState([model], [optimizer], {})
    state.carried[optimizer].watch()
    return model, optimizer, state, state.carried[optimizer]


def gradients_in(state: TrainingState) -> bool:
    return any(":gradients" in name for name in image_of(state).tensors)


@pytest.mark.parametrize("loop", LOOPS)
def test_carried_gradients_are_part_of_the_state_and_others_are_not(loop: str) -> None:
    begins, ends, is_carried, are_zeros = LOOPS[loop]
    model, optimizer, state, carried = job()
    for number in range(4):
        train(model, optimizer, carried, begins, ends)
        assert carried.carried == (is_carried and number > 0), f"step {number}"
        state.stepped({optimizer})
        assert carried.are_zeros() == are_zeros
        assert gradients_in(state) == (is_carried and number > 0)
    image = image_of(state)
    wanted = [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    newcomer, its_optimizer, its_state, its_carried = job()
    train(newcomer, its_optimizer, its_carried, begins, ends)
    restore(its_state, image)
    assert image_of(its_state).values == image.values  # captured again at once
    if is_carried:
        assert [p.grad.tolist() for p in newcomer.parameters()] == [g.tolist() for g in wanted if g is not None]  # type: ignore[union-attr]
    train(newcomer, its_optimizer, its_carried, begins, ends)
    train(model, optimizer, carried, begins, ends)
    assert not (its_carried.lost and its_carried.carried)
    assert all(map(torch.equal, newcomer.parameters(), model.parameters()))


@pytest.mark.parametrize("loop", [loop for loop, (_, _, is_carried, _) in LOOPS.items() if is_carried])
def test_a_version_from_before_it_was_known_lacks_the_gradients_and_is_known_to(loop: str) -> None:
    begins, ends, _, _ = LOOPS[loop]
    model, optimizer, state, carried = job()
    train(model, optimizer, carried, begins, ends)
    state.stepped({optimizer})
    image = image_of(state)

    newcomer, its_optimizer, its_state, its_carried = job()
    restore(its_state, image)
    train(newcomer, its_optimizer, its_carried, begins, ends)
    assert (its_carried.lost, its_carried.carried) == (True, True)


def test_gradients_of_a_window_of_several_blocks_are_carried_only_over_its_beginning() -> None:
    model, optimizer, state, carried = job()
    for step in range(3):
        for block in range(3):
            train_block = nothing if block else (lambda _, o: o.zero_grad())
            carried.begin()
            train_block(model, optimizer)
            model(torch.ones(2, 3)).sum().backward()
        carried.at_step()
        optimizer.step()
        assert not carried.carried, step
        state.stepped({optimizer})


def test_what_was_lost_stays_lost_while_the_optimizer_is_not_stepped() -> None:
    model, optimizer, state, carried = job()
    train(model, optimizer, carried, nothing, nothing)
    state.stepped({optimizer})
    newcomer, its_optimizer, its_state, its_carried = job()
    restore(its_state, image_of(state))
    its_carried.begin()
    newcomer(torch.ones(2, 3)).sum().backward()
    its_state.stepped(())  # another optimizer was
    later = image_of(its_state)

    another, its_optimizer, its_state, its_carried = job()
    restore(its_state, later)
    assert gradients_in(its_state)
    train(another, its_optimizer, its_carried, nothing, nothing)
    assert (its_carried.lost, its_carried.carried) == (True, True)


def test_gradients_that_are_views_of_buckets_count_as_carried_unless_zero_grad_is_called() -> None:
    model, optimizer, state, carried = job()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))

    def from_views() -> None:  # as DistributedDataParallel(gradient_as_bucket_view=True) does
        offset = 0
        for parameter in model.parameters():
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    from_views()
    for reset in (nothing, by_hand, lambda _, o: o.zero_grad()):
        carried.begin()
        reset(model, optimizer)
        from_views()
        carried.at_step()
        assert carried.carried == (reset in (nothing, by_hand))
        state.stepped({optimizer})


def test_zero_grad_that_is_watched_looks_as_before_and_a_copy_of_the_optimizer_has_its_own() -> None:
    _, optimizer, _, _ = job()
    assert inspect.signature(optimizer.zero_grad) == inspect.signature(SGD([torch.ones(1)]).zero_grad)
    assert "zero_grad" not in vars(copy.deepcopy(optimizer))
