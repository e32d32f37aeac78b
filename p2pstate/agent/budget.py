"""How often a run may fail before it is given up. Pure: time and limits are arguments.

In: rounds that begin and workers that are replaced, with the newest committed step. Out: a sentence once a limit is
passed, else nothing.
"""

from __future__ import annotations

from p2pstate.agent.job import Job

__all__ = ["Budget"]

LONG_ROUND_S = 60.0


class Budget:
    """One per agent. Every agent counts for itself, and sees the same rounds."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._step_at_round = -1
        self._num_rounds = 0  # since there was progress
        self._progress_at = 0.0  # when the first of those rounds began
        self._num_restarts = 0
        self._round_at: float | None = None

    def round_begins(self, step: int, reason: str, now: float, *, first: bool) -> str:
        """``step``: the newest one that anybody has committed, -1 where nobody counts steps (a long round is progress
        then); ``first``: of this node, which cannot be to blame.

        Both limits must be passed: faults that come fast are survived, and so is one that takes long; only a loop is
        neither.
        """
        lasted_s = now - self._round_at if self._round_at is not None else 0.0
        self._round_at = now
        if first or step > self._step_at_round or (step < 0 and lasted_s > LONG_ROUND_S):
            self._num_rounds, self._progress_at = 0, now
        self._step_at_round = step
        self._num_rounds += 1
        stuck_s = now - self._progress_at
        if self._num_rounds > self._job.max_rounds_without_progress and stuck_s > self._job.give_up_s:
            return (
                f"{self._num_rounds - 1} rounds in a row, in {stuck_s:.0f} s, brought no step beyond {step} "
                f"(--give-up-after {self._job.give_up_s:g}); the last reason was: {reason}"
            )
        return ""

    def worker_replaced(self, reason: str) -> str:
        self._num_restarts += 1
        if self._num_restarts > self._job.max_restarts:
            return f"{reason}; --max-restarts {self._job.max_restarts} is used up"
        return ""
