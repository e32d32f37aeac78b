"""What trackers are told, and when. TensorBoard and MLflow themselves: test_trainers_tracking.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from p2pstate.integrations.mlflow import MLflow
from p2pstate.integrations.tensorboard import TensorBoard
from p2pstate.observe.goodput import Goodput
from p2pstate.observe.tracking import Tracking, values_of

VALUES = {"p2pstate/goodput": 0.75, "p2pstate/step_s": 0.5}


def test_trackers_are_told_when_they_are_due() -> None:
    told: list[tuple[str, int]] = []
    tracking = Tracking()
    tracking.add(lambda step, values: told.append(("often", step)), every=2)
    tracking.add(lambda step, values: told.append(("seldom", step)), every=3)
    for step in range(1, 7):
        tracking.committed(step, lambda: VALUES)
    assert told == [("often", 2), ("seldom", 3), ("often", 4), ("often", 6), ("seldom", 6)]


def test_tracker_that_fails_is_left_out_and_the_others_are_told() -> None:
    told: list[int] = []

    def broken(step: int, values: Mapping[str, float]) -> None:
        raise OSError("no space")

    tracking = Tracking()
    tracking.add(broken, every=1)
    tracking.add(lambda step, values: told.append(step), every=1)
    with pytest.warns(RuntimeWarning, match="failed at step 1 and is told nothing any more: OSError: no space"):
        tracking.committed(1, lambda: VALUES)
    tracking.committed(2, lambda: VALUES)
    assert told == [1, 2]


def test_tracker_may_be_an_object_without_hash_and_equal_to_another() -> None:
    @dataclass
    class Table:
        fails: bool
        steps: list[int] = field(default_factory=list, compare=False)

        def __call__(self, step: int, values: Mapping[str, float]) -> None:
            self.steps.append(step)
            if self.fails and step == 1:
                raise OSError("no space")

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Table)

    failing, other = Table(fails=True), Table(fails=False)
    tracking = Tracking()
    tracking.add(failing, every=1)
    tracking.add(other, every=1)
    with pytest.warns(RuntimeWarning, match="no space"):
        tracking.committed(1, lambda: VALUES)
    tracking.committed(2, lambda: VALUES)
    assert (failing.steps, other.steps) == ([1], [1, 2])


def test_tracker_that_is_never_due_is_refused() -> None:
    with pytest.raises(ValueError, match="every=0"):
        Tracking().add(lambda step, values: None, every=0)


def test_values_are_in_base_units_and_leave_out_what_is_not_known() -> None:
    total = Goodput({"useful": 6.0, "recovery.pull": 1.0, "recovery.view": 1.0})
    values = values_of(total, step_s=0.5, lag_steps=None, copy_bytes=7, num_recoveries=1)
    assert values["p2pstate/goodput"] == 0.75
    assert values["p2pstate/recovery_s"] == 2.0
    assert "p2pstate/protected_lag_steps" not in values
    assert all(name.startswith("p2pstate/") and isinstance(value, float) for name, value in values.items())
    known = values_of(total, step_s=0.5, lag_steps=1, copy_bytes=7, num_recoveries=1)
    assert known["p2pstate/protected_lag_steps"] == 1


@pytest.mark.parametrize(("make", "module"), [(TensorBoard, "torch.utils.tensorboard"), (MLflow, "mlflow")])
def test_tracker_without_its_library_says_what_to_install(
    make: Any, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'p2pstate\["):
        make("x")
