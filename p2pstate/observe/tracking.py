"""A run's numbers for experiment trackers, behind one type of callback.

In: committed steps of rank 0, the meter, what protection has cost. Out: calls ``tracker(step, values)``, every so many
steps; p2pstate.integrations has such callbacks for TensorBoard and MLflow.

Invariants: rehearsed and discarded steps are not told; a tracker that raises is left out from then on, with a warning,
and never ends a run. Known limit: a tracker is called on the training thread; what it takes counts as other time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

from p2pstate.observe.goodput import Goodput

__all__ = ["Tracker", "Tracking", "values_of"]

Tracker = Callable[[int, Mapping[str, float]], None]  # (step, name -> value)


class Tracking:
    def __init__(self) -> None:
        self._trackers: list[tuple[Tracker, int]] = []  # every so many steps

    def add(self, tracker: Tracker, every: int) -> None:
        if every < 1:
            raise ValueError(f"every={every}: a tracker is told every 1 or more steps")
        self._trackers.append((tracker, every))

    def committed(self, step: int, values: Callable[[], Mapping[str, float]]) -> None:
        due = [tracker for tracker, every in self._trackers if step % every == 0]
        if not due:
            return
        found = values()
        for tracker in due:
            try:
                tracker(step, found)
            except Exception as error:
                self._trackers = [kept for kept in self._trackers if kept[0] is not tracker]
                text = (
                    f"{tracker!r} failed at step {step} and is told nothing any more: {type(error).__name__}: {error}"
                )
                warnings.warn(text, RuntimeWarning, stacklevel=2)


def values_of(
    total: Goodput, *, step_s: float, lag_steps: int | None, copy_bytes: int, num_recoveries: int
) -> dict[str, float]:
    """Base units. ``lag_steps``: committed steps that are not protected; left out while nothing is."""
    values = {
        "p2pstate/goodput": total.ratio,
        "p2pstate/step_s": step_s,
        "p2pstate/copy_bytes": float(copy_bytes),
        "p2pstate/recoveries": float(num_recoveries),
        **{f"p2pstate/{category}_s": seconds for category, seconds in total.by_category().items()},
    }
    return values if lag_steps is None else {**values, "p2pstate/protected_lag_steps": float(lag_steps)}
