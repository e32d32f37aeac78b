"""The training loop of one worker: turns, each with one block, and recovery between them.

In: the user's loop (over ``batches`` or ``run``), the data, the process's error flag. Out: each committed step, and,
after a fault, the same loop going on from the newest whole version. A committed step that was lost is done again, and
so is the code after it, whose effects on the state were lost with it. What a block is, and how it ends: blocks.py.

Invariants: a version is captured between two blocks, when the next one begins (so that whatever runs between them, a
scheduler or an average, is part of it) and before its batch is fetched; inside the loop a lost peer is an error value,
outside it an exception. Collectives between steps are refused, but for those of hooks (hooks.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from p2pstate.block import StepBlock
from p2pstate.blocks import OF_RUN, Blocks
from p2pstate.departure import Departure
from p2pstate.errors import P2PStateError
from p2pstate.feed import Feed
from p2pstate.groups.status import STATUS
from p2pstate.hooks import Hooks
from p2pstate.joined import Joined, OtherLoop
from p2pstate.loop_end import LoopEnd
from p2pstate.loop_exit import LoopIterator, leaves_by_exception, looping_code
from p2pstate.observe.meter import METER
from p2pstate.plan_recovery import RankReport
from p2pstate.protection import Protection
from p2pstate.resume import Disk
from p2pstate.rounds import Rounds
from p2pstate.state import TrainingState
from p2pstate.stepping import Stepping
from p2pstate.trace import Doing
from p2pstate.worker.context import WorkerContext
from p2pstate.worker.start_journal import end_journal, hand_over_journal

__all__ = ["Loop", "Timeouts"]

NOT_RESTORED_BETWEEN = (
    "a second training loop begins. A process that takes a rank over passes by the loops that are over, and runs what "
    "stands between them with a model that is not restored yet: write files there only `if not state.rehearsing`"
)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long this rank waits: ``vote_s`` in a step, for the others' votes; ``recovery_s`` in a recovery, for each
    thing that all ranks do, and at a loop's end for copies; ``save_s`` there for the last checkpoint."""

    vote_s: float
    recovery_s: float
    save_s: float


class Loop:
    """Owned by a Replicator; used from the training thread only. ``replaying``: what :meth:`run` has yielded is a step
    that this process had committed before."""

    def __init__(
        self,
        context: WorkerContext,
        state: TrainingState,
        models: Iterable[torch.nn.Module],
        feed: Feed,
        protection: Protection,
        timeouts: Timeouts,
        disk: Disk | None,
    ) -> None:
        models = list(models)
        self._context = context
        self._feed = feed
        self.protection = protection
        self._stepping = Stepping(state.carried, protection, timeouts.vote_s, protection.settings.on_nan)
        self._end = LoopEnd(
            context,
            self._stepping,
            protection,
            drain_timeout_s=timeouts.recovery_s,
            save_timeout_s=timeouts.save_s,
        )
        self._blocks = Blocks(context, state, models, feed, self._stepping, protection, self._end)
        self._hooks = Hooks(context, models)
        self._departure = Departure(context, protection, self._stepping)
        self._rounds = Rounds(context, state, protection, timeouts.recovery_s, disk)
        self.replaying = False
        self._over = False  # the loop that this process is in: by agreement of all ranks, or before it came here
        self._begins = False  # this loop, here and in every other rank: nothing of it is behind them
        self._closing = False  # the user has called close() of what the loop runs on

    @property
    def rehearsing(self) -> bool:
        return self._context.must_join

    @property
    def step(self) -> int:
        """See Blocks."""
        return self._blocks.step

    @property
    def committed_step(self) -> int:
        """The newest, as the user counts."""
        return self._blocks.committed_step

    def watch_scaler(self, scaler: Any) -> None:
        """See Stepping.watch_scaler."""
        self._stepping.watch_scaler(scaler)

    def track(self, tracker: Any, every: int) -> None:
        """See Replicator.track."""
        self._blocks.reports.tracking.add(tracker, every)

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

    def block(self, where: str) -> StepBlock:
        """See Replicator.step."""
        return self._blocks.next(where)

    def _close(self) -> None:
        self._closing = True

    def _run(self, train_step: Callable[..., Any], steps: int | None) -> Generator[tuple[int, Any], None, None]:
        for batch in self._turns(steps):
            block = self._blocks.next(OF_RUN)
            value: Any = None
            with block:
                value = train_step(*batch)
            if block.committed:
                self._blocks.report(block.step, value)
                self.replaying = block.again
                yield block.number, value

    def _turns(self, steps: int | None) -> Iterator[tuple[Any, ...]]:
        """The arguments of one block per turn, until ``steps`` steps are committed or the data ends."""
        self._enter_loop()
        last = None if steps is None else self._blocks.counting.before + steps
        code, self._closing = looping_code(), False
        try:
            while not self._over:
                batch = self._next_batch(last)
                if batch is not None:
                    self._blocks.open_turn()
                    yield batch
                    self._blocks.close_turn()
        except GeneratorExit:
            self._blocks.close_turn()
            self._dropped_by(code)
            raise
        if self._context.passes_by:
            self._pass_by()

    def _dropped_by(self, code: CodeType) -> None:
        """The loop in ``code`` was left: by break or return, on all ranks at the same step; or by an exception."""
        context = self._context
        if context.is_forked:
            return
        if context.failing or (leaves_by_exception(code) and not self._closing):
            context.unfinished = self._left
        else:
            self._left()

    def _left(self) -> None:
        """The user left by break or return: every rank has to do so at the same step."""
        done = not self._blocks.discarded and not self._context.must_join and self._finish(left=True)
        if not done:
            self._context.left_early = self._blocks.where

    # -- between two blocks

    def _next_batch(self, last: int | None) -> tuple[Any, ...] | None:
        """All that comes before the next block, which is a step up to ``last``; its arguments. None: there is none yet,
        or the loop is over."""
        if STATUS.error is not None or self._blocks.discarded:
            self._recover()
            return None
        return self._rehearsed_batch() if self._context.must_join else self._trained_batch(last)

    def _rehearsed_batch(self) -> tuple[Any, ...] | None:
        """One more turn of a rehearsal, unless it is over, here and in all ranks that rehearse together."""
        if self._rounds.in_all_ranks(not self._blocks.rehearsals.go_on()):
            self._recover()
            return None
        STATUS.trace.do(Doing.FETCHING)
        batch = self._fetch()
        if self._rounds.in_all_ranks(batch is not None):
            return batch
        self._feed.ended()
        if not self._rounds.in_all_ranks(self._feed.rewind()):
            self._blocks.rehearsals.end()
        return None

    def _trained_batch(self, last: int | None) -> tuple[Any, ...] | None:
        context, step = self._context, self.step
        if self._hooks.due(self.committed_step) and not self._run_hooks():
            return None
        if self._departure.is_due(step):
            self._departure.go(step)
        if self._end.is_reached(step, last):
            self._end_at(step, last)
            return None
        STATUS.trace.do(Doing.FETCHING)
        self.protection.capture_if_due(context.epoch, step)
        batch = self._fetch()
        if self._blocks.discarded:
            return None
        if self._begins:
            self._begins = False
            return batch if self._end.begins(step, has_batch=batch is not None) else None
        if batch is None:
            self._over = self._end.data_ended(context.epoch, step, self._feed.num_batches)
        return batch

    def _fetch(self) -> tuple[Any, ...] | None:
        """None: the data has ended; or it has raised, and what it was fetched for is discarded."""
        try:
            with METER.inside("data"):
                return self._feed.next_or_none()
        except BaseException as error:  # sys.exit() and torch.distributed.checkpoint's own as well
            if not self._blocks.raised(self.step + 1, error):
                raise
            return None

    def _run_hooks(self) -> bool:
        """See Replicator.every. False: a fault came meanwhile."""
        self.protection.capture_if_due(self._context.epoch, self.step)
        self.protection.fence()
        try:
            self._hooks.run(self.committed_step)
        except BaseException as error:
            if not self._blocks.raised(self.step + 1, error):
                raise
        return STATUS.error is None

    # -- beginning and end

    def _enter_loop(self) -> None:
        context, link = self._context, self._context.link
        context.begin_loop()
        self._over = context.passes_by
        if context.loop == 2 and context.rank == 0 and not context.must_join:
            print(f"p2pstate: {NOT_RESTORED_BETWEEN}", file=sys.stderr)
        if self._blocks.counting.begin(self):
            self._blocks.count_from(self._blocks.counting.before)
            self.protection.follow(context.kept)
        if context.loop in context.ends.empty and not self._over:
            self._end.agreed_step = self.step
        self._feed.begin_loop(context.ends)
        self._blocks.rehearsals.begin_loop()
        STATUS.loud = False
        hand_over_journal(link)
        METER.enter("other")
        if context.epoch or STATUS.solo:
            if not self._over:
                link.send("in_loop")
        else:
            with METER.inside("startup"):
                self._begin_run()
        self._begins = not context.must_join
        if context.must_join and not self._over:
            self._feed.rehearsal_begins()

    def _begin_run(self) -> None:
        """The first round, with everybody else: from a checkpoint, where there is one, or from scratch."""
        self._rounds.connect()
        if not self._context.must_join and self._rounds.find_checkpoint():
            METER.hold("startup")
        if not self._context.must_join:
            self._context.link.send("in_loop")
            self.protection.begin()

    def _pass_by(self) -> None:
        """This loop was over before this process began, or is left for the one that the others are in."""
        self._blocks.step = max(self.step, self._context.ends.end_of(self._context.loop))
        self._context.leave_loop()
        STATUS.loud = True

    def _end_at(self, step: int, last: int | None) -> None:
        """All ranks have come to ``step``, where they are to end, asked for as ``last`` or not."""
        context = self._context
        is_empty = context.loop in context.ends.empty
        by_data = self._end.is_by_data(last) and (is_empty or step not in context.ends.left)
        self._over = self._finish()
        if self._over and by_data:
            self._feed.end_pass()

    def _finish(self, *, left: bool = False) -> bool:
        return self._end.finish(self._context.epoch, self.step, left=left)

    # -- recovery

    def _recover(self) -> None:
        """Forget the discarded step, and go on from the version that everybody resumes; or in a later loop."""
        self._begins = False
        report = self._discard()
        try:
            with METER.inside("recovery.agree"):
                joined = self._rounds.recover(report, failed_step=self.step + 1)
        except OtherLoop as error:
            self._context.loop_to_join, self._context.ends = error.loop, error.ends
            self._over = True
        else:
            self._resume(joined)

    def _discard(self) -> RankReport:
        """Forget the step that was under way, or the rehearsal. Returns what the others have to know of this rank."""
        context, blocks = self._context, self._blocks
        newcomer = context.must_join
        end_journal(context.link)
        METER.release()
        if not newcomer:
            STATUS.fail(P2PStateError("this rank discarded its step"))
            assert STATUS.error_at is not None
            METER.discarded(self._stepping.step_s, time.monotonic() - STATUS.error_at)
        self.protection.fence()
        num_batches = self._feed.num_batches
        self._feed.drop()
        blocks.forget_discarded()
        return RankReport(
            rank=context.rank,
            newcomer=newcomer,
            num_warm_steps=blocks.rehearsals.num_steps,
            committed_step=0 if newcomer else self.step,
            ended_at=self._end.data_ended_at,
            wrappers=blocks.rehearsals.stages(),
            spoilt_step=self._stepping.spoilt_step,
            num_batches=num_batches,
            loop=context.loop,
            ends=context.ends,
        )

    def _resume(self, joined: Joined) -> None:
        """The live state is that of ``joined``: so are the step, the batches, and the loop's end."""
        METER.enter("other")
        METER.recovered()
        self._context.must_join = False
        self._blocks.step = joined.version.step
        self._blocks.reports.recovered(joined.version.step + joined.steps_lost)
        self._end.agreed_step = joined.end_step
        self._hooks.forget()
        self._feed.begin_loop(self._context.ends)
        self._feed.resume()
        self._feed.skip_to(joined.num_batches)
        self._stepping.spoilt_step = 0
