"""Optimizers inside of an optimizer: each has a state of its own, or stands for the one inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_training import net, state_of, step
from state_zoo import assert_same, image_of, restore

from p2pstate.state import LeafError, with_inner


class Ascent(torch.optim.Optimizer):
    """Steps another optimizer, which has the momentum, from a point uphill (as SAM does)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["before"] = parameter.clone()
            parameter.grad.add_(parameter, alpha=self.param_groups[0]["rho"])
        self.base.step()


class Both(torch.optim.Optimizer):
    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__([p for each in optimizers for g in each.param_groups for p in g["params"]], {})
        self.optimizers = list(optimizers)

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda net: Ascent(net.parameters()), 2),
        (lambda net: Both(torch.optim.AdamW(net[0].parameters()), Ascent(net[2].parameters())), 4),
    ],
    ids=["attribute", "list"],
)
def test_restore_of_optimizers_inside_of_an_optimizer_continues_like_its_twin(make: Any, count: int) -> None:
    runs = []
    for _ in range(2):
        model = net()
        optimizer = make(model)
        found = with_inner([optimizer])
        assert len(found) == count
        runs.append((model, optimizer, state_of(model, *found)))
    (model, optimizer, state), (other, its_optimizer, its_state) = runs
    step(model, optimizer, 3)
    image = image_of(state)
    restore(its_state, image)
    assert_same(image_of(its_state), image)
    step(model, optimizer, 2)
    step(other, its_optimizer, 2)
    assert_same(image_of(its_state), image_of(state))


class Wrapper(torch.optim.Optimizer):
    """Passes everything on, as launchers' wrappers do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.more: dict[str, Any] = {}

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), **self.more}


def test_wrapper_without_a_state_of_its_own_stands_for_the_optimizer_inside() -> None:
    inner = torch.optim.SGD(net().parameters(), lr=0.1)
    wrapper = Wrapper(inner)
    assert with_inner([wrapper]) == with_inner([inner, Wrapper(wrapper)]) == [inner]
    wrapper.more["step"] = 3
    with pytest.raises(LeafError, match="keeps step besides"):
        with_inner([wrapper])
