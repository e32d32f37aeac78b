"""MLflow as a tracker: ``state.track(MLflow("my-run"))``. Needs ``p2pstate[mlflow]``.

In: numbers of rank 0, by step. Out: metrics of one MLflow run, which a process that replaces rank 0 finds again by its
name and goes on with. They are sent by MLflow's own thread; the server is the one that MLflow is set up for.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["MLflow"]

TAG = "p2pstate.run"


class MLflow:
    """observe.tracking.Tracker. ``name``: the same whenever the training is started again. Nothing is asked of the
    server before the first numbers come, so any rank may make one. Raises ImportError, with what to install, when
    MLflow is missing."""

    def __init__(self, name: str, experiment: str = "Default") -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ImportError("MLflow is not installed: pip install 'p2pstate[mlflow]'") from error
        self._name, self._experiment, self._mlflow = name, experiment, mlflow
        self._run_id = ""

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        self._run_id = self._run_id or self._find_run()
        self._mlflow.log_metrics(dict(values), step=step, run_id=self._run_id, synchronous=False)

    def _find_run(self) -> str:
        client = self._mlflow.MlflowClient()
        experiment = client.get_experiment_by_name(self._experiment)
        of = client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
        name = self._name.replace("'", "")
        known = client.search_runs([of], f"tags.`{TAG}` = '{name}'", max_results=1)
        run = known[0] if known else client.create_run(of, tags={TAG: name}, run_name=self._name)
        return str(run.info.run_id)
