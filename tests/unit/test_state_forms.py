"""Tensors that are made anew lie in memory as the captured ones did: strides, kind, what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_zoo import image_of, restore
from torch import Tensor, nn

from p2pstate.state import TrainingState
from p2pstate.state.encoding import encode
from p2pstate.state.forms import Maker, form_of


class Holding(torch.optim.Optimizer):
    """Its state is whatever ``make`` gives for each parameter, made once."""

    def __init__(self, parameters: Any, make: Callable[[Tensor, Any], dict[str, Any]]) -> None:
        super().__init__(parameters, {})
        self.make = make

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update(self.make(parameter, self.state))


def into_newcomer(make: Callable[[Tensor, Any], dict[str, Any]]) -> tuple[list[Tensor], Holding, Holding]:
    """The newcomer's parameters; the owner's optimizer and the newcomer's, which has made no state of its own."""
    owner, newcomer = (nn.Linear(3, 4) for _ in range(2))
    optimizers = [Holding(model.parameters(), make) for model in (owner, newcomer)]
    states = [TrainingState([m], [o], {}, rng=False) for m, o in zip((owner, newcomer), optimizers, strict=True)]
    optimizers[0].step()
    restore(states[1], image_of(states[0]))
    assert states[1].collect().values == states[0].collect().values
    return list(newcomer.parameters()), optimizers[0], optimizers[1]


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[1::3],
        torch.arange(32.0).view(2, 2, 2, 4).to(memory_format=torch.channels_last),
        torch.arange(3.0).expand(2, 3),
        torch.ones(2, requires_grad=True),
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2), requires_grad=False),
    ],
    ids=["transposed", "sliced", "channels_last", "expanded", "trained", "parameter", "frozen parameter"],
)
def test_new_tensor_has_the_strides_and_the_kind_of_the_captured_one(value: Tensor) -> None:
    _, _, newcomer = into_newcomer(lambda *_: {"value": value})  # one tensor for both
    for entry in newcomer.state.values():
        made = entry["value"]
        assert (made.stride(), type(made), made.requires_grad) == (value.stride(), type(value), value.requires_grad)
        assert torch.equal(made, value)
        assert made is not value


def test_state_over_a_parameter_is_over_the_newcomers_parameter() -> None:
    parameters, _, newcomer = into_newcomer(lambda p, _: {"view": p.detach().view(-1)[1:]})
    for parameter in parameters:
        newcomer.state[parameter]["view"].fill_(7.0)
        assert parameter.detach().view(-1)[1:].eq(7.0).all()
        assert parameter.detach().view(-1)[0] != 7.0


def test_views_of_one_buffer_and_the_buffer_share_memory_again() -> None:
    def make(parameter: Tensor, _: Any) -> dict[str, Any]:
        both = torch.ones(2, *parameter.shape)
        return {"second": both[1], "both": both, "first": both[0]}

    parameters, _, newcomer = into_newcomer(make)
    for entry in (newcomer.state[parameter] for parameter in parameters):
        entry["first"].fill_(3.0)
        entry["both"][1].fill_(4.0)
        assert entry["both"][0].eq(3.0).all()
        assert entry["second"].eq(4.0).all()


def test_one_tensor_in_many_places_is_one_tensor_again() -> None:
    count = torch.zeros(())
    parameters, _, newcomer = into_newcomer(lambda _, state: {"step": state["shared"].setdefault("step", count)})
    steps = [newcomer.state[parameter]["step"] for parameter in parameters] + [newcomer.state["shared"]["step"]]
    assert all(step is steps[0] for step in steps)


def test_parameter_that_is_state_is_the_newcomers_parameter() -> None:
    parameters, _, newcomer = into_newcomer(lambda p, _: {"of": p})
    assert all(newcomer.state[parameter]["of"] is parameter for parameter in parameters)


def test_survivors_keep_state_that_shares_memory() -> None:
    model = nn.Linear(3, 4)
    optimizer = Holding(model.parameters(), lambda p, _: {"view": p.detach().view(-1), "sum": torch.zeros(2)[::2]})
    state = TrainingState([model], [optimizer], {}, rng=False)
    optimizer.step()
    image = image_of(state)
    kept = [id(tensor) for entry in optimizer.state.values() for tensor in entry.values()]
    restore(state, image)
    assert [id(tensor) for entry in optimizer.state.values() for tensor in entry.values()] == kept


def test_most_tensors_have_no_form() -> None:
    assert form_of(torch.ones(3, 4)) == b""
    assert form_of(torch.empty(0, 5)) == b""


@pytest.mark.parametrize(
    "form",
    [
        encode([[1, 1], False, False, [], []]),
        encode([[1], False, False, [], []]),
        encode([[2, 1], False, False, ["base", 0, 1 << 40, 64, ""], []]),
        encode([[2, 1], False, False, ["base", 0, 3, 64, ""], []]),
        encode([[2, 1], False, False, ["base", 0, 0, 8, ""], []]),
    ],
    ids=["overlapping", "too few", "beyond", "odd offset", "too small"],
)
def test_form_that_does_not_fit_gives_memory_of_its_own(form: bytes) -> None:
    value = torch.arange(4.0).view(2, 2)
    made, is_empty = Maker({}).make("x", form, value, torch.device("cpu"))
    assert torch.equal(made, value)
    assert not is_empty
    assert made.stride() == (2, 1)
