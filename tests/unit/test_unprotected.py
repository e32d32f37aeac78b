"""unprotected: training that nothing keeps is named once, and nothing else is."""

from __future__ import annotations

import warnings
from typing import Any, cast

import pytest
import torch

from p2pstate import unprotected
from p2pstate.groups.status import STATUS


class Context:
    def __init__(self, rank: int = 0, rerunning: bool = False) -> None:
        self.rank, self.rerunning = rank, rerunning


def warned(
    monkeypatch: pytest.MonkeyPatch, context: Context, num_steps: int, loop_from: int | None = None
) -> list[str]:
    """What is said while so many steps are made; ``loop_from``: the number of the first in a Replicator's loop."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    unprotected.warn_of_unprotected_steps(cast(Any, context))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(num_steps):
            monkeypatch.setattr(STATUS, "loud", loop_from is None or number < loop_from)
            optimizer.step()
    return [str(warning.message) for warning in caught]


def test_steps_outside_of_a_loop_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = warned(monkeypatch, Context(), 3 * unprotected.MIN_STEPS)
    assert "outside of a Replicator's loop: nothing of them is protected" in text


def test_steps_that_prepare_an_optimizer_of_a_loop_and_of_a_restartable_function_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not warned(monkeypatch, Context(), 20, loop_from=unprotected.MIN_STEPS - 1)
    assert not warned(monkeypatch, Context(rerunning=True), 20)
    assert not warned(monkeypatch, Context(rank=1), 20)
