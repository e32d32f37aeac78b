"""TensorBoard and MLflow as trackers, over restarts of the process that tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pstate.integrations.mlflow import MLflow
from p2pstate.integrations.tensorboard import TensorBoard

pytestmark = pytest.mark.trainers

VALUES = {"p2pstate/goodput": 0.75, "p2pstate/step_s": 0.5}


def test_tensorboard_has_each_step_once_over_restarts(tmp_path: Path) -> None:
    """Steps 3 and 4 come again in another process, then step 4 in the same one."""
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed (p2pstate[tensorboard])")
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


def test_mlflow_goes_on_with_the_run_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed (p2pstate[mlflow])")
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
