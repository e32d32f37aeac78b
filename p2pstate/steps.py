"""The training loop of one worker: turns, blocks, and recovery between them.

In: the user's blocks (``with state.step():`` or ``train_step(batch)``), the data, the process's error flag. Out: each
committed step, and, after a fault, the same loop going on from the newest whole version. A committed step that was lost
is done again, and so is the code after it, whose effects on the state were lost with it.

A block ends in one of three ways. *Committed*: every rank voted yes before each change of the state, and no error was
seen up to the block's end (see stepping.py). *Discarded*: this rank saw an error or does not know a vote's outcome; it
joins the next round and resumes the version everybody resumes, whatever its optimizers have changed by then. *Open*: no
optimizer was stepped (a micro-batch of its own); nothing is captured and a later discard replays it.

Invariants: a version is captured between two blocks, when the next one begins (so that whatever runs between them, a
scheduler or an average, is part of it) and before its batch is fetched; ``StepDiscarded`` never leaves this file;
inside the loop a lost peer is an error value, outside it an exception.
Collectives between steps are refused, but for those of hooks (hooks.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch

from p2pstate.block import StepBlock
from p2pstate.counting import Counting
from p2pstate.departure import Departure
from p2pstate.errors import P2PStateError, StepDiscarded, StepSkipped
from p2pstate.feed import Feed, LoopPosition
from p2pstate.gradients import discard_gradients
from p2pstate.groups.gate import Ballot
from p2pstate.groups.journal import Recording
from p2pstate.groups.status import STATUS
from p2pstate.hooks import Hooks
from p2pstate.interrupting import Interruption
from p2pstate.joined import OtherLoop
from p2pstate.loop_end import LoopEnd
from p2pstate.loop_exit import LoopIterator, leaves_by_exception, looping_code
from p2pstate.observe.meter import METER
from p2pstate.plan_recovery import RankReport
from p2pstate.protection import Protection
from p2pstate.rehearsal import NUM_STEPS, Rehearsals
from p2pstate.reports import StepReports
from p2pstate.resume import Disk
from p2pstate.rounds import Rounds
from p2pstate.state import TrainingState
from p2pstate.stepping import Stepping
from p2pstate.trace import Doing
from p2pstate.types import NOTHING_RAISED
from p2pstate.user_errors import UserErrors
from p2pstate.worker.context import WorkerContext

__all__ = ["Loop"]

NOT_RESTORED_BETWEEN = (
    "a second training loop begins. A process that takes a rank over passes by the loops that are over, and runs what "
    "stands between them with a model that is not restored yet: write files there only `if not state.rehearsing`"
)


class Loop:
    """Owned by a Replicator; used from the training thread only."""

    def __init__(
        self,
        context: WorkerContext,
        state: TrainingState,
        models: Iterable[torch.nn.Module],
        data: Any,
        position: LoopPosition,
        protection: Protection,
        *,
        recovery_timeout_s: float,
        on_nan: str,
        vote_timeout_s: float,
        save_timeout_s: float,
        disk: Disk | None,
    ) -> None:
        self._context = context
        self._link = context.link
        self._state = state
        self._models = list(models)
        self._feed = Feed(data, position)
        self._counting = Counting(context)
        self._stepping = Stepping(state.carried, protection, vote_timeout_s, on_nan)
        self._interruption = Interruption(self._models)
        self._user_errors = UserErrors(context, self._models)
        self._rounds = Rounds(context, state, protection, recovery_timeout_s, disk)
        self.protection = protection
        self._departure = Departure(context, protection, self._stepping)
        self._end = LoopEnd(
            context,
            self._stepping,
            protection,
            drain_timeout_s=recovery_timeout_s,
            save_timeout_s=save_timeout_s,
        )
        # Where this process is
        self.step = 0  # newest committed step, counted through all loops of the script
        self._rehearsals = Rehearsals(self._models)
        self._hooks = Hooks(context, self._models)
        self.reports = StepReports(self._link, protection, self._stepping)
        self._newest_yielded = 0
        self.replaying = False  # what run() has yielded is a step that this process had committed before
        # The block
        self._in_block = False
        self._turn_open = False
        self._where = ""
        self._closing = False  # the user has called close() of what the loop runs on
        self._discard_pending = False
        self._block_began = 0.0

    @property
    def rehearsing(self) -> bool:
        return self._context.must_join

    @property
    def committed_step(self) -> int:
        """The newest, as the user counts."""
        return self.step - self._counting.before

    def watch_scaler(self, scaler: Any) -> None:
        """See Stepping.watch_scaler."""
        self._stepping.watch_scaler(scaler)

    def every(self, steps: int, function: Callable[[int], Any]) -> None:
        """See Replicator.every."""
        self._hooks.add(steps, function)

    # -- what the user's loop runs on

    def run(self, train_step: Callable[..., Any], steps: int | None) -> Iterator[tuple[int, Any]]:
        """See Replicator.run."""
        self._feed.check(train_step)
        return LoopIterator(self._run(train_step, steps), self._close)

    def batches(self, steps: int | None) -> Iterator[Any]:
        """See Replicator.batches."""
        return LoopIterator((batch[0] if batch else None for batch in self._turns(steps)), self._close)

    def _close(self) -> None:
        self._closing = True

    def _run(self, train_step: Callable[..., Any], steps: int | None) -> Generator[tuple[int, Any], None, None]:
        for batch in self._turns(steps):
            block = self.block("state.run")
            value: Any = None
            with block:
                value = train_step(*batch)
            if block.committed:
                self._report(block.step, value)
                self.replaying = block.again
                yield block.number, value

    def block(self, where: str) -> StepBlock:
        """The next block, not yet begun."""
        number = self._rehearsals.num_steps if self._context.must_join else self.committed_step
        return StepBlock(self, number + 1, where, num_before=self._counting.before)

    def _turns(self, steps: int | None) -> Iterator[tuple[Any, ...]]:
        """The arguments of one block per turn, until ``steps`` steps are committed or the data ends."""
        context = self._context
        self._enter_loop()
        if context.must_join and not context.passes_by:
            self._feed.rehearsal_begins()
        last = None if steps is None else self._counting.before + steps
        done, code, self._closing = context.passes_by, looping_code(), False
        begins = not context.must_join  # here and in every other rank: nothing of this loop is behind them
        try:
            while not done:
                faulted = STATUS.error is not None or self._discard_pending
                if faulted or (context.must_join and self._rounds.in_all_ranks(not self._rehearsals.go_on())):
                    self._recover()
                    begins = False
                    if done := context.passes_by:
                        continue
                if not context.must_join and self._hooks.due(self.committed_step) and not self._run_hooks():
                    continue
                if self._departure.is_due(self.step):
                    self._departure.go(self.step)
                if not context.must_join and self._end.is_reached(self.step, last):
                    is_empty = context.loop in context.ends.empty
                    by_data = self._end.is_by_data(last) and (is_empty or self.step not in context.ends.left)
                    done = self._finish()
                    if done and by_data:
                        self._feed.end_pass()
                    continue
                STATUS.trace.do(Doing.FETCHING)
                if not context.must_join:
                    self.protection.capture_if_due(context.epoch, self.step)
                try:
                    with METER.inside("data"):
                        batch = self._feed.next_or_none()
                except BaseException as error:  # sys.exit() and torch.distributed.checkpoint's own as well
                    if not self._raised(self.step + 1, error):
                        raise
                    continue
                if context.must_join:
                    if not self._rounds.in_all_ranks(batch is not None):
                        self._rehearse_again()
                        continue
                elif begins:
                    begins = False
                    if not self._end.begins(self.step, has_batch=batch is not None):
                        continue
                elif batch is None:
                    done = self._end.data_ended(context.epoch, self.step, self._feed.num_batches)
                    continue
                assert batch is not None
                self._turn_open = True
                yield batch
                self._turn_open = STATUS.between_steps = False
        except GeneratorExit:
            self._turn_open = STATUS.between_steps = False
            if context.is_forked:
                raise
            if context.failing or (leaves_by_exception(code) and not self._closing):
                context.unfinished = self._left
            else:
                self._left()
            raise
        if context.passes_by:
            self._pass_by()

    def _left(self) -> None:
        """The user left by break or return: every rank has to do so at the same step."""
        done = not self._discard_pending and not self._context.must_join and self._finish(left=True)
        if not done:
            self._context.left_early = self._where or "state.run"

    def _rehearse_again(self) -> None:
        """Here, or in a rank that rehearses together with this one, there is no batch for another turn."""
        self._feed.ended()
        if not self._rounds.in_all_ranks(self._feed.rewind()):
            self._rehearsals.end()

    # -- blocks

    def enter(self, block: StepBlock) -> None:
        if self._in_block:
            raise RuntimeError("a step began inside another one: leave the first `with state.step():` block before")
        if not self._turn_open:
            raise RuntimeError(
                "`with state.step():` runs once per turn of `for batch in state.batches():`, which decides what is run "
                "again after a fault; here it ran outside of that loop, or a second time in one turn"
            )
        self._in_block = True
        self._where = block.where
        self._turn_open = False
        self._block_began = time.monotonic()
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
                self._link.send("event", kind="skipped", step=block.step)
            self._forget_gradients()
            return True
        if isinstance(error, StepDiscarded):
            self._discard_pending = True
            return True
        if error is not None:
            return self._raised(block.step, error)
        if self._context.must_join:
            self._rehearsals.num_steps += block.boundary  # a micro-batch of its own is no step
        elif not finished:
            self._discard_pending = True
        elif block.voted is not None and block.voted.boundary:
            self._commit(block, block.voted)
        if self._rehearsals.num_steps >= NUM_STEPS:
            self._end_journal()
        return False

    def _run_hooks(self) -> bool:
        """See Replicator.every. False: a fault came meanwhile."""
        self.protection.capture_if_due(self._context.epoch, self.step)
        self.protection.fence()
        try:
            self._hooks.run(self.committed_step)
        except BaseException as error:
            if not self._raised(self.step + 1, error):
                raise
        return STATUS.error is None

    def _raised(self, step: int, error: BaseException) -> bool:
        """The user's code has raised in ``step``. True: the step is discarded, and tried again."""
        discarded = self._user_errors.raised(step, error, first=step == self._counting.before + 1)
        self._discard_pending |= discarded
        return discarded

    def _commit(self, block: StepBlock, voted: Ballot) -> None:
        block.committed = STATUS.between_steps = True
        self._state.stepped(block.stepped)
        block.again = block.step <= self._newest_yielded
        self.step = block.step
        STATUS.trace.commit(self.step)
        self._rehearsals.num_steps += 1
        if self._context.raised is not None and self._context.raised[0] == self.step:
            self._context.raised = NOTHING_RAISED
        seconds = time.monotonic() - self._block_began
        known_s = self._stepping.step_s
        METER.committed(known_s, repeated=block.again or self.reports.is_repeated(block.step))
        self._stepping.step_s = 0.9 * known_s + 0.1 * seconds if known_s else seconds
        self._newest_yielded = max(self._newest_yielded, block.step)
        with METER.inside("protection"):
            self.protection.committed(self.step, voted)
        if block.where != "state.run":
            self._report(block.step, None)

    def _report(self, step: int, value: Any) -> None:
        self.reports.committed(self._context.epoch, step, time.monotonic() - self._block_began, value)

    # -- beginning and end

    def _enter_loop(self) -> None:
        context = self._context
        context.begin_loop()
        if context.loop == 2 and context.rank == 0 and not context.must_join:
            print(f"p2pstate: {NOT_RESTORED_BETWEEN}", file=sys.stderr)
        if self._counting.begin(self):
            self.step = self._newest_yielded = self._counting.before
            self.protection.follow(context.kept)
        if context.loop in context.ends.empty and not context.passes_by:
            self._end.agreed_step = self.step
        self._feed.begin_loop(context.ends)
        self._rehearsals.begin_loop()
        STATUS.loud = False
        self._hand_over_journal()
        METER.enter("other")
        if context.epoch or STATUS.solo:
            if not context.passes_by:
                self._link.send("in_loop")
            return
        with METER.inside("startup"):
            self._rounds.connect()
            if not context.must_join and self._rounds.find_checkpoint():
                METER.hold("startup")
        if not context.must_join:
            self._link.send("in_loop")
            self.protection.begin()

    def _pass_by(self) -> None:
        """This loop was over before this process began, or is left for the one that the others are in."""
        self.step = max(self.step, self._context.ends.end_of(self._context.loop))
        self._context.leave_loop()
        STATUS.loud = True

    def _hand_over_journal(self) -> None:
        """What collectives returned up to here is for newcomers, who do the same alone."""
        journal = STATUS.journal
        if isinstance(journal, Recording):
            journal.in_steps = True
            if STATUS.error is None and (packed := journal.pack()):
                self._link.send("journal", packed=packed)

    def _end_journal(self) -> None:
        """From here on newcomers are with the others."""
        if STATUS.journal is not None:
            self._hand_over_journal()
            STATUS.journal = None

    def _finish(self, *, left: bool = False) -> bool:
        return self._end.finish(self._context.epoch, self.step, left=left)

    def _forget_gradients(self) -> None:
        discard_gradients(self._models, self._stepping.optimizers, self._stepping.scalers)
        self._stepping.forget_gradients()

    def _recover(self) -> None:
        """Forget the discarded step, and go on from the version that everybody resumes; or in a later loop."""
        context = self._context
        newcomer = context.must_join
        self._end_journal()
        METER.release()
        if not newcomer:
            STATUS.fail(P2PStateError("this rank discarded its step"))
            assert STATUS.error_at is not None
            METER.discarded(self._stepping.step_s, time.monotonic() - STATUS.error_at)
        self._discard_pending = False
        self.protection.fence()
        num_batches = self._feed.num_batches
        self._feed.drop()
        self._interruption.mend()
        self._forget_gradients()
        report = RankReport(
            rank=context.rank,
            newcomer=newcomer,
            num_warm_steps=self._rehearsals.num_steps,
            committed_step=0 if newcomer else self.step,
            ended_at=self._end.data_ended_at,
            wrappers=self._rehearsals.stages(),
            spoilt_step=self._stepping.spoilt_step,
            num_batches=num_batches,
            loop=context.loop,
            ends=context.ends,
        )
        try:
            with METER.inside("recovery.agree"):
                joined = self._rounds.recover(report, failed_step=self.step + 1)
        except OtherLoop as error:
            context.loop_to_join, context.ends = error.loop, error.ends
            return
        METER.enter("other")
        METER.recovered()
        context.must_join = False
        self.step = joined.version.step
        self.reports.recovered(joined.version.step + joined.steps_lost)
        self._end.agreed_step = joined.end_step
        self._hooks.forget()
        self._feed.begin_loop(context.ends)
        self._feed.resume()
        self._feed.skip_to(joined.num_batches)
        self._stepping.spoilt_step = 0
