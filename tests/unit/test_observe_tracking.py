"""What trackers are told, and TensorBoard and MLflow as trackers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
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


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="TensorBoard is not installed (p2pstate[tensorboard])")
def test_tensorboard_has_each_step_once_over_restarts(tmp_path: Path) -> None:
    """Steps 3 and 4 come again in another process, then step 4 in the same one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, second = TensorBoard(tmp_path), TensorBoard(tmp_path)
    for step in (1, 2, 3, 4):
        first(step, VALUES)
    for step in (3, 4, 5, 4):
        second(step, {**VALUES, "p2pstate/step_s": 1.5})
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    found = [(each.step, each.value) for each in read.Scalars("p2pstate/step_s")]
    assert found == [(1, 0.5), (2, 0.5), (3, 1.5), (4, 1.5)]


@pytest.mark.skipif(find_spec("mlflow") is None, reason="MLflow is not installed (p2pstate[mlflow])")
def test_mlflow_goes_on_with_the_run_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # needs no database
    mlflow.set_tracking_uri(tmp_path.as_uri())
    for step in (10, 20):
        MLflow("it's mine")(step, VALUES)  # another process each time
        mlflow.flush_async_logging()
    MLflow("other", experiment="more")(30, VALUES)
    mlflow.flush_async_logging()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    history = client.get_metric_history(run.info.run_id, "p2pstate/goodput")
    assert [(each.step, each.value) for each in history] == [(10, 0.75), (20, 0.75)]
    (other,) = client.search_runs([client.get_experiment_by_name("more").experiment_id])
    assert other.data.metrics == VALUES


@pytest.mark.parametrize(("make", "module"), [(TensorBoard, "torch.utils.tensorboard"), (MLflow, "mlflow")])
def test_tracker_without_its_library_says_what_to_install(
    make: Any, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'p2pstate\["):
        make("x")
