"""What this rank tells of its committed steps: to its agent, and to trackers.

In: committed steps, what they returned, recoveries. Out: one message per step (seconds, loss, how far copies are, the
meter's clock), one for the first step beyond those that a fault took back, the numbers that trackers ask for.

Invariants: a loss is read only where that costs no synchronisation with a card.
"""

from __future__ import annotations

from typing import Any

import torch

from p2pstate.groups.status import STATUS
from p2pstate.observe.goodput import Goodput
from p2pstate.observe.meter import METER
from p2pstate.observe.tracking import Tracking, values_of
from p2pstate.protection import Protection
from p2pstate.stepping import Stepping
from p2pstate.worker.link import Link

__all__ = ["StepReports"]


class StepReports:
    def __init__(self, link: Link, protection: Protection, stepping: Stepping) -> None:
        self._link, self._protection, self._stepping = link, protection, stepping
        self.tracking = Tracking()
        self._num_recoveries = 0  # of this process
        self._beyond: int | None = None  # the first commit past this step is told

    def recovered(self, newest_step: int) -> None:
        """The run goes on from a version of ``newest_step`` or before it."""
        self._num_recoveries += 1
        self._beyond = newest_step

    def is_repeated(self, step: int) -> bool:
        """Some rank had committed it before the newest fault."""
        return self._beyond is not None and step <= self._beyond

    def committed(self, epoch: int, step: int, seconds: float, value: Any) -> None:
        """``seconds``: of the whole step; ``value``: what it returned, a loss or anything else."""
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        protected = self._protection.protected
        # What is kept from the round before may be on one node only.
        of_this_round = protected is not None and protected.epoch == epoch
        self._link.send(
            "step",
            step=step,
            seconds=seconds,
            protected=protected.step if protected is not None and of_this_round else None,
            loss=float(value) if isinstance(value, int | float) else None,
            clock=METER.report(),
            waited_s=round(STATUS.trace.waits.take(), 6),
            shipped_bytes=self._protection.stats.num_shipped_bytes,
        )
        if self._beyond is not None and step > self._beyond:
            self._beyond = None
            self._link.send("event", kind="first_step", epoch=epoch, step=step)
        self.tracking.committed(step, lambda: self._numbers(step))

    def _numbers(self, step: int) -> dict[str, float]:
        protected = self._protection.protected
        return values_of(
            Goodput(METER.totals()),
            step_s=self._stepping.step_s,
            lag_steps=None if protected is None else step - protected.step,
            copy_bytes=self._protection.stats.num_shipped_bytes,
            num_recoveries=self._num_recoveries,
        )
