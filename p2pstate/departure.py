"""A worker that is asked to go: it leaves after a step that becomes a version, so that the others lose none.

In: the request, the newest committed step. Out: whether to leave now; the process, with nothing lost.
"""

from __future__ import annotations

import time

from p2pstate.groups.status import STATUS
from p2pstate.protection import Protection
from p2pstate.stepping import Stepping
from p2pstate.trace import Doing
from p2pstate.worker.context import WorkerContext
from p2pstate.worker.farewell import GRACE_S

__all__ = ["Departure"]


class Departure:
    """Of one process, from its training thread."""

    def __init__(self, context: WorkerContext, protection: Protection, stepping: Stepping) -> None:
        self._context, self._protection, self._stepping = context, protection, stepping
        self._asked_at = 0.0  # when it was seen that this process is to go; 0: it is not

    def is_due(self, step: int) -> bool:
        """Whether to go, and a step later is no better: ``step`` becomes a version, or the next may take too long."""
        if not self._context.asked_to_leave or self._context.must_join:
            return False
        now = time.monotonic()
        self._asked_at = self._asked_at or now
        return self._protection.covers(step) or now - self._asked_at + self._stepping.step_s > GRACE_S

    def go(self, step: int) -> None:
        """Leave once the version of ``step`` is with the buddies."""
        STATUS.trace.do(Doing.ENDING)
        self._protection.capture_if_due(self._context.epoch, step)
        self._protection.drain(GRACE_S)
        self._context.go()
