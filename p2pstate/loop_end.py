"""How a loop ends: all ranks at the same step, its state protected and, where it goes to disk, there.

In: the step after which this rank wants to end (so many were asked for, its data ends, the user leaves), what other
ranks say in a round, and, as soon as their data ends, through the agents. Out: whether all have agreed and the loop is
over. Before the first step of a loop all ranks say whether they have a batch: where
one has none the loop ends there, for nobody has anything to go back to yet.

Invariants: nobody leaves before all ranks have voted that they do, at one step; a fault before that is a fault of the
loop, and the rank goes on as after any other. A rank in a step that another one has no batch for gives it up at once,
and all end, in a round, at the step before.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from p2pstate.errors import P2PStateError
from p2pstate.groups.gate import Ballot, all_say
from p2pstate.groups.registry import REGISTRY
from p2pstate.groups.status import STATUS
from p2pstate.observe.meter import METER
from p2pstate.protection import Protection
from p2pstate.stepping import Stepping
from p2pstate.trace import Doing
from p2pstate.types import Version
from p2pstate.worker.context import WorkerContext

__all__ = ["LoopEnd"]

END_OF_LOOP = 1 << 40  # votes at the end of the loop cannot meet votes of a step
BEGIN_OF_LOOP = 2 * END_OF_LOOP
# How long a rank without data waits for the others to run out as well. Who has a batch more says so before, unless the
# word of the end does not reach it.
MIN_DATA_END_WAIT_S = 5.0
NO_FIRST_BATCH = (
    "p2pstate: rank {rank} has no batch for the first step of training loop {loop}, which ends on all ranks without a "
    "step: look how the data is divided"
)


@dataclass(frozen=True, slots=True)
class _DataEnd:
    """The data of ``rank`` ended in ``loop`` after ``step``, when it had taken ``num_batches`` in all."""

    rank: int
    step: int
    num_batches: int
    epoch: int
    loop: int


class LoopEnd:
    """``data_ended_at``: the step after which this rank's data ended, -1 while it has data. ``agreed_step``: all ranks
    end there, because somebody's data does; None: nobody's has."""

    def __init__(
        self,
        context: WorkerContext,
        stepping: Stepping,
        protection: Protection,
        *,
        drain_timeout_s: float,
        save_timeout_s: float,
    ) -> None:
        self._context, self._stepping, self._protection = context, stepping, protection
        self._drain_timeout_s, self._save_timeout_s = drain_timeout_s, save_timeout_s
        self.data_ended_at = -1
        self.agreed_step: int | None = None
        self._told: _DataEnd | None = None  # by another rank
        self._block: tuple[int, int] | None = None  # that this rank is in: its step, how many batches with its own
        context.link.on_data_ended = self._on_data_ended

    def enter_block(self, step: int, num_batches: int) -> None:
        self._block = step, num_batches
        self._look_for_end()

    def leave_block(self) -> None:
        self._block = None

    def _on_data_ended(self, epoch: int, rank: int, step: int, num_batches: int, loop: int) -> None:
        self._told = _DataEnd(rank, step, num_batches, epoch, loop)
        self._look_for_end()

    def _look_for_end(self) -> None:
        """On the thread that comes second: of the one that enters a block, and the one that hears of an end.

        A block with no more batches than the other rank has had may be the last one here as well, without a step.
        """
        told, block = self._told, self._block
        if told is None or block is None or told.loop != self._context.loop:
            return
        if block[0] > told.step and block[1] > told.num_batches:
            STATUS.fail(P2PStateError(f"the data of rank {told.rank} ended after step {told.step}"), told.epoch)

    def begins(self, step: int, *, has_batch: bool) -> bool:
        """Before the first step of a loop, which comes after ``step``: whether every rank has a batch for it. If not,
        all end here. False as well after an error."""
        everybody = all_say(REGISTRY, STATUS, has_batch, about=BEGIN_OF_LOOP + step)
        if everybody is False:
            self.agreed_step = step
            if not has_batch:
                print(NO_FIRST_BATCH.format(rank=self._context.rank, loop=self._context.loop), file=sys.stderr)
        return bool(everybody)

    def is_reached(self, step: int, steps: int | None) -> bool:
        """``steps``: how many were asked for."""
        limits = [limit for limit in (steps, self.agreed_step) if limit is not None]
        return bool(limits) and step >= min(limits)

    def is_by_data(self, steps: int | None) -> bool:
        """Whether what all ranks have agreed on comes before ``steps``."""
        return self.agreed_step is not None and (steps is None or self.agreed_step < steps)

    def finish(self, epoch: int, step: int, timeout_s: float | None = None, *, left: bool = False) -> bool:
        """All ranks have committed the last step: protect it, agree, and leave. ``left``: the user's code did, by break
        or return. False: a fault came first."""
        if STATUS.error is not None:
            return False
        STATUS.trace.do(Doing.ENDING)
        self._protection.capture_if_due(epoch, step)
        self._protection.fence()
        self._protection.drain(self._drain_timeout_s)
        voted = self._vote(step, timeout_s)
        if voted is None or not self._save_last(epoch, step, voted):
            return False
        self.data_ended_at, self.agreed_step = -1, None
        if step == 0 and self._stepping.num_open_blocks:
            self._stepping.warn_of_open_blocks()
        self._protection.loop_ended(Version(epoch, step), voted)
        self._context.end_loop(step, left=left)
        STATUS.loud = True
        METER.enter("shutdown")
        return True

    def data_ended(self, epoch: int, step: int, num_batches: int) -> bool:
        """This rank has no batch any more. If others have, all end at this step, after a round of its own."""
        context = self._context
        context.link.send("data_ended", epoch=epoch, step=step, num_batches=num_batches, loop=context.loop)
        if self.finish(epoch, step, max(MIN_DATA_END_WAIT_S, 10 * self._stepping.step_s)):
            return True
        self.data_ended_at = step
        STATUS.fail(P2PStateError(f"the data of rank {context.rank} ended after step {step}"))
        return False

    def _vote(self, step: int, timeout_s: float | None = None) -> Ballot | None:
        return self._stepping.ballot(END_OF_LOOP + step, boundary=False, ended=True, timeout_s=timeout_s)

    def _save_last(self, epoch: int, step: int, voted: Ballot) -> bool:
        """The last state goes to disk, if there is a checkpoint path. False: a fault came first."""
        problem = self._protection.save_last(epoch, step, voted, self._save_timeout_s)
        if problem is None:  # training ended between two versions
            self._protection.capture_if_due(epoch, step)
            self._protection.drain(self._drain_timeout_s)
            again = self._vote(step)
            if again is None:
                return False
            problem = self._protection.save_last(epoch, step, again, self._save_timeout_s)
        if problem:
            print(f"p2pstate: the last step, {step}, is not on disk: {problem}", file=sys.stderr)
        return STATUS.error is None
