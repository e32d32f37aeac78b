"""The blocks of one Replicator, one after the other: what is watched in each, and what becomes of it.

In: a block's beginning and end, as the user writes them; what its code raises. Out: the newest committed step, on all
ranks; or the need to join the next round, for the step was discarded here.

A block ends in one of three ways. *Committed*: every rank voted yes before each change of the state, and no error was
seen up to the block's end (see stepping.py). *Discarded*: this rank saw an error or does not know a vote's outcome; it
joins the next round and resumes the version everybody resumes, whatever its optimizers have changed by then. *Open*: no
optimizer was stepped (a micro-batch of its own); nothing is captured and a later discard replays it.

Invariants: ``StepDiscarded`` never leaves this file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from torch import nn

from p2pstate.block import StepBlock
from p2pstate.counting import Counting
from p2pstate.errors import StepDiscarded, StepSkipped
from p2pstate.feed import Feed
from p2pstate.gradients import discard_gradients
from p2pstate.groups.gate import Ballot
from p2pstate.groups.status import STATUS
from p2pstate.interrupting import Interruption
from p2pstate.loop_end import LoopEnd
from p2pstate.observe.meter import METER
from p2pstate.protection import Protection
from p2pstate.rehearsal import NUM_STEPS, Rehearsals
from p2pstate.reports import StepReports
from p2pstate.state import TrainingState
from p2pstate.stepping import Stepping
from p2pstate.trace import Doing
from p2pstate.types import NOTHING_RAISED
from p2pstate.user_errors import UserErrors
from p2pstate.worker.context import WorkerContext
from p2pstate.worker.start_journal import end_journal

__all__ = ["Blocks"]

OF_RUN = "state.run"  # where a block is that no line of the user's opens


class Blocks:
    """``step``: the newest committed one, counted through all loops of the script. ``discarded``: a step was, and no
    round has been joined since."""

    def __init__(
        self,
        context: WorkerContext,
        state: TrainingState,
        models: Iterable[nn.Module],
        feed: Feed,
        stepping: Stepping,
        protection: Protection,
        end: LoopEnd,
    ) -> None:
        self._context, self._state, self._feed = context, state, feed
        self._stepping, self._protection, self._end = stepping, protection, end
        self._models = list(models)
        self._interruption = Interruption(self._models)
        self._user_errors = UserErrors(context, self._models)
        self.rehearsals = Rehearsals(self._models)
        self.counting = Counting(context)
        self.reports = StepReports(context.link, protection, stepping)
        self.step = 0
        self.discarded = False
        self.where = OF_RUN  # the newest block
        self._newest_committed = 0  # in this process, whatever a fault took back
        self._turn_is_open = False
        self._in_block = False
        self._began_at = 0.0  # monotonic seconds

    @property
    def committed_step(self) -> int:
        """The newest, as the user counts."""
        return self.step - self.counting.before

    def count_from(self, step: int) -> None:
        """Another Replicator has trained up to ``step``."""
        self.step = self._newest_committed = step

    def open_turn(self) -> None:
        """There is a batch for one block."""
        self._turn_is_open = True

    def close_turn(self) -> None:
        """The loop's body is over, whether there was a block in it or not."""
        self._turn_is_open = STATUS.between_steps = False

    def next(self, where: str) -> StepBlock:
        """The next block, not yet begun; ``where``: the user's line."""
        number = self.rehearsals.num_steps if self._context.must_join else self.committed_step
        return StepBlock(self, number + 1, where, num_before=self.counting.before)

    def enter(self, block: StepBlock) -> None:
        if self._in_block:
            raise RuntimeError("a step began inside another one: leave the first `with state.step():` block before")
        if not self._turn_is_open:
            raise RuntimeError(
                "`with state.step():` runs once per turn of `for batch in state.batches():`, which decides what is run "
                "again after a fault; here it ran outside of that loop, or a second time in one turn"
            )
        self._in_block = True
        self.where = block.where
        self._turn_is_open = False
        self._began_at = time.monotonic()
        STATUS.trace.do(Doing.STEPPING)
        STATUS.trace.waits.take()
        METER.step_begins()
        self._stepping.begin(block, rehearsing=self._context.must_join)
        if not self._context.must_join:
            self._interruption.begin(block)
            self._end.enter_block(block.step, self._feed.num_batches)

    def leave(self, block: StepBlock, error: BaseException | None) -> bool:
        """The end of a block. True swallows ``error``: the step was discarded."""
        if self._context.is_forked:
            return False
        self._in_block = False
        self._end.leave_block()
        STATUS.trace.do(Doing.BETWEEN)
        self._stepping.end()
        self._interruption.end()
        finished = error is None and not self._context.must_join and self._stepping.finish(block)
        METER.step_ends()
        if isinstance(error, StepSkipped):
            if not block.finite:
                self._context.link.send("event", kind="skipped", step=block.step)
            self._forget_gradients()
            return True
        if isinstance(error, StepDiscarded):
            self.discarded = True
            return True
        if error is not None:
            return self.raised(block.step, error)
        if self._context.must_join:
            self.rehearsals.num_steps += block.boundary  # a micro-batch of its own is no step
        elif not finished:
            self.discarded = True
        elif block.voted is not None and block.voted.boundary:
            self._commit(block, block.voted)
        if self.rehearsals.num_steps >= NUM_STEPS:
            end_journal(self._context.link)
        return False

    def raised(self, step: int, error: BaseException) -> bool:
        """The user's code has raised in ``step``. True: the step is discarded, and tried again."""
        discarded = self._user_errors.raised(step, error, first=step == self.counting.before + 1)
        self.discarded |= discarded
        return discarded

    def _commit(self, block: StepBlock, voted: Ballot) -> None:
        block.committed = STATUS.between_steps = True
        self._state.stepped(block.stepped)
        block.again = block.step <= self._newest_committed
        self.step = block.step
        STATUS.trace.commit(self.step)
        self.rehearsals.num_steps += 1
        if self._context.raised is not None and self._context.raised[0] == self.step:
            self._context.raised = NOTHING_RAISED
        seconds = time.monotonic() - self._began_at
        known_s = self._stepping.step_s
        METER.committed(known_s, repeated=block.again or self.reports.is_repeated(block.step))
        self._stepping.step_s = 0.9 * known_s + 0.1 * seconds if known_s else seconds
        self._newest_committed = max(self._newest_committed, block.step)
        with METER.inside("protection"):
            self._protection.committed(self.step, voted)
        if block.where != OF_RUN:
            self.report(block.step, None)

    def report(self, step: int, value: Any) -> None:
        """``step``, the newest committed one, has returned ``value``."""
        self.reports.committed(self._context.epoch, step, time.monotonic() - self._began_at, value)

    def forget_discarded(self) -> None:
        """Models and gradients as they are where a step begins. Call it when collectives echo."""
        self.discarded = False
        self._interruption.mend()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        discard_gradients(self._models, self._stepping.optimizers, self._stepping.scalers)
        self._stepping.forget_gradients()
