"""How often a run may fail before it is given up. Pure: time and limits are arguments.

In: rounds that begin and workers that are replaced, with the newest committed step. Out: a sentence once a limit is
passed, else nothing. Each limit has its own sentence, which names the option that sets it.
"""

from __future__ import annotations

from collections import deque

from p2pstate.agent.job import Job

__all__ = ["Budget"]

LONG_ROUND_S = 60.0
HOUR_S = 3600.0


class Budget:
    """One per agent. Every agent counts for itself, and sees the same rounds."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._step_at_round = -1
        self._num_rounds = 0  # since there was progress
        self._progress_at = 0.0  # when the first of those rounds began
        self._num_restarts = 0
        self._round_at: float | None = None
        self._faults_at: deque[float] = deque()  # within the last hour

    def round_begins(self, step: int, reason: str, now: float, *, first: bool) -> str:
        """``step``: the newest one that anybody has committed, -1 where nobody counts steps (a long round is progress
        then); ``first``: of this node, which cannot be to blame.

        A step may fail several times, and may take long; a loop is who does both, or fails very often.
        """
        lasted_s = now - self._round_at if self._round_at is not None else 0.0
        self._round_at = now
        if first or step > self._step_at_round or (step < 0 and lasted_s > LONG_ROUND_S):
            self._num_rounds, self._progress_at = 0, now
        self._step_at_round = step
        self._num_rounds += 1
        if not first:
            self._faults_at.append(now)
        return self._step_used_up(step, reason, now) or self._hour_used_up(reason, now)

    def _step_used_up(self, step: int, reason: str, now: float) -> str:
        job, stuck_s = self._job, now - self._progress_at
        if step >= 0 and self._num_rounds >= job.max_tries_per_step:
            return (
                f"step {step + 1} failed {self._num_rounds} times in a row "
                f"(--max-tries-per-step {job.max_tries_per_step}); the last reason was: {reason}"
            )
        if self._num_rounds > job.max_rounds_without_progress and stuck_s > job.give_up_s:
            return (
                f"{self._num_rounds - 1} rounds in a row, in {stuck_s:.0f} s, brought no step beyond {step} "
                f"(--give-up-after {job.give_up_s:g}); the last reason was: {reason}"
            )
        return ""

    def _hour_used_up(self, reason: str, now: float) -> str:
        while self._faults_at and self._faults_at[0] <= now - HOUR_S:
            self._faults_at.popleft()
        if len(self._faults_at) <= self._job.max_faults_per_hour:
            return ""
        return (
            f"{len(self._faults_at)} faults within an hour (--max-faults-per-hour {self._job.max_faults_per_hour}); "
            f"the last reason was: {reason}"
        )

    def worker_replaced(self, reason: str) -> str:
        self._num_restarts += 1
        if self._num_restarts > self._job.max_restarts:
            return f"{reason}; --max-restarts {self._job.max_restarts} is used up"
        return ""
