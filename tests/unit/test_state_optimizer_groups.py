"""Parameter groups come back as they were, and what does not fit the live optimizer is named and changes nothing."""

from __future__ import annotations

import pytest
import torch
from small_training import OPTIMIZERS, net, same, state_of, step
from state_zoo import assert_same, image_of, restore
from torch import nn

from p2pstate.state import LeafError


def groups_of(model: nn.Sequential) -> torch.optim.Optimizer:
    groups = [
        {"params": [model[0].weight], "lr": torch.tensor(0.1), "betas": (0.8, 0.9), "tag": "first"},
        {"params": [], "lr": 0.5},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0, "extra": {"a": [1, None]}},
    ]
    return torch.optim.AdamW(groups, lr=0.01, foreach=False)


def test_restore_of_groups_keeps_keys_order_types_and_tensors() -> None:
    model = net()
    optimizer = groups_of(model)
    optimizer.param_groups[2]["initial_lr"] = 0.02
    state = state_of(model, optimizer)
    wanted = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    wanted[0]["lr"] = wanted[0]["lr"].clone()
    image = image_of(state)
    assert "optimizer/:groups/0/lr" in image.tensors
    live = optimizer.param_groups[0]["lr"]
    live.fill_(9)
    optimizer.param_groups[0].update(betas=[0.1, 0.2], tag="other", more=1)
    optimizer.param_groups[1]["lr"] = torch.tensor(3.0)
    del optimizer.param_groups[2]["initial_lr"], optimizer.param_groups[2]["extra"]
    restore(state, image)
    now = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert same(now, wanted)
    assert optimizer.param_groups[0]["lr"] is live
    assert optimizer.param_groups[0]["params"] == [model[0].weight]
    assert type(optimizer.param_groups[1]["lr"]) is float


@pytest.mark.parametrize("named", [False, True])
def test_restore_into_fewer_groups_adds_the_missing_ones(named: bool) -> None:
    def build(model: nn.Sequential) -> torch.optim.Optimizer:
        first = model[0].named_parameters() if named else model[0].parameters()
        return torch.optim.AdamW(first, lr=0.1)

    def grow(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        more = model[2].named_parameters(prefix="2") if named else model[2].parameters()
        optimizer.add_param_group({"params": list(more), "lr": torch.tensor(0.3), "betas": (0.8, 0.9), "tag": "late"})

    model = net()
    optimizer = build(model)
    state = state_of(model, optimizer)
    step(model, optimizer)
    early = image_of(state)
    grow(model, optimizer)
    step(model, optimizer, 2)
    late = image_of(state)
    step(model, optimizer)
    end = image_of(state)

    model = net()
    optimizer = build(model)
    state = state_of(model, optimizer)
    restore(state, late)
    assert_same(image_of(state), late)
    assert optimizer.param_groups[1]["tag"] == "late"
    assert ("param_names" in optimizer.param_groups[1]) == named
    step(model, optimizer)
    assert_same(image_of(state), end)

    restore(state, early)  # back behind the moment when the group was added
    assert_same(image_of(state), early)
    grow(model, optimizer)
    step(model, optimizer, 2)
    assert_same(image_of(state), late)


def test_restore_of_a_group_whose_parameters_do_not_exist_here_names_it_and_writes_nothing() -> None:
    model = nn.Sequential(*net(), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer.add_param_group({"params": model[3].parameters()})
    image = image_of(state_of(model, optimizer))
    model = nn.Sequential(*net())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    state = state_of(model, optimizer)
    before = image_of(state)
    with pytest.raises(LeafError, match=r"model/3.weight") as caught:
        restore(state, image)
    assert caught.value.name == "optimizer group 1"
    assert_same(image_of(state), before)


def test_restore_into_an_optimizer_built_with_more_groups_names_the_first_too_many() -> None:
    model = net()
    image = image_of(state_of(model, torch.optim.SGD(model[0].parameters(), lr=0.1)))
    more = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
    with pytest.raises(LeafError) as caught:
        restore(state_of(model, more), image)
    assert caught.value.name == "optimizer group 1"


@pytest.mark.parametrize("saved", ["adamw", "sgd"])
def test_restore_into_another_kind_of_optimizer_names_what_differs(saved: str) -> None:
    model = net()
    other = OPTIMIZERS["sgd" if saved == "adamw" else "adamw"](model.parameters())
    image = image_of(state_of(model, OPTIMIZERS[saved](model.parameters())))
    with pytest.raises(LeafError, match=r"optimizer group 0: of this .* captured was another kind of optimizer"):
        restore(state_of(model, other), image)


def test_restore_into_a_newer_optimizer_keeps_the_settings_that_it_needs() -> None:
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    del optimizer.param_groups[0]["foreach"]
    image = image_of(state_of(model, optimizer))
    newer = OPTIMIZERS["sgd"](model.parameters())
    restore(state_of(model, newer), image)
    assert newer.param_groups[0]["foreach"] is None


def test_restore_with_parameters_in_another_order_names_the_group() -> None:
    model = net()
    image = image_of(state_of(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    turned = state_of(model, torch.optim.SGD(list(model.parameters())[::-1], lr=0.1))
    with pytest.raises(LeafError) as caught:
        restore(turned, image)
    assert caught.value.name == "optimizer group 0"


def test_restore_into_an_optimizer_with_named_parameters_ignores_their_names() -> None:
    model = net()
    image = image_of(state_of(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    optimizer = torch.optim.SGD(model.named_parameters(prefix="module"), lr=0.7)
    restore(state_of(model, optimizer), image)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["param_names"][0] == "module.0.weight"
