"""Modules and parameters that come, go or grow after the state was looked at first: captured, and never passed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_training import net, state_of
from state_zoo import assert_same, image_of, restore
from torch.nn.utils import prune

from p2pstate.state import LeafError, TrainingState

CHANGES: dict[str, tuple[Callable[[torch.nn.Module, torch.optim.Optimizer], None], str]] = {
    "pruned": (
        lambda m, o: prune.l1_unstructured(m[2], "weight", 0.5),
        r"group 0: held model/2\.weight_orig when captured and does not now; holds model/2\.weight now",
    ),
    "a module and a group": (
        lambda m, o: (m.append(torch.nn.Linear(2, 2)), o.add_param_group({"params": m[3].parameters()})),
        r"group 1: held model/3\.bias, model/3\.weight when captured and does not now",
    ),
    "a module that is not trained": (
        lambda m, o: m.append(torch.nn.Linear(2, 2)),
        r"only in the captured state: model/3\.bias, model/3\.weight",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_change_later_are_captured_and_a_process_without_them_is_told_which(change: str) -> None:
    make, sentence = CHANGES[change]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = state_of(model, optimizer)
    before = image_of(state)
    make(model, optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    image = image_of(state)
    assert {*image.tensors} >= {f"model/{name}" for name, _ in model.named_parameters()}
    newcomer = net()
    its_state = state_of(newcomer, torch.optim.SGD(newcomer.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(LeafError, match=sentence):
        restore(its_state, image)
    restore(its_state, before)
    with pytest.raises(LeafError, match="before the Replicator is made"):
        restore(state, before)
    assert_same(image_of(state), image)


def test_an_embedding_that_is_replaced_by_a_larger_one_is_restored_with_its_size() -> None:
    def trained() -> tuple[Any, torch.optim.Optimizer, TrainingState]:
        model = torch.nn.Sequential(torch.nn.Embedding(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, state_of(model, optimizer)

    model, optimizer, state = trained()
    before = image_of(state)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    old = model[0].weight
    model[0] = torch.nn.Embedding(6, 3)
    with pytest.raises(LeafError, match=r"shape \[4, 3\] \(it was model/0.weight\) that is in none"):
        image_of(state)
    optimizer.param_groups[0]["params"] = [model[0].weight]
    with pytest.raises(LeafError, match=r"shape \[4, 3\] \(model/0.weight\) .*optimizer.state.pop"):
        image_of(state)
    del optimizer.state[old]
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    image = image_of(state)
    assert image.tensors["model/0.weight"].shape == (6, 3)

    newcomer, _, its_state = trained()
    restore(its_state, image)
    assert_same(image_of(its_state), image)
    assert torch.equal(newcomer[0].weight, model[0].weight)
    restore(state, before)
    assert model[0].weight.shape == (4, 3)
    assert_same(image_of(state), before)
