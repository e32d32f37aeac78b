"""The training loop of one worker: blocks, the gate, and recovery between them.

In: the user's blocks (``with state.step():`` or ``train_step(batch)``), the data, the process's error flag. Out: each
committed step, and, after a fault, the same loop going on from the newest whole version. A committed step that was lost
is done again, and so is the code after it, whose effects on the state were lost with it.

A block ends in one of three ways. *Committed*: every rank voted yes before the first optimizer changed anything, and no
error was seen up to the block's end. *Discarded*: this rank saw an error or does not know the vote's outcome; it joins
the next round and resumes the version everybody resumes. *Open*: no optimizer was stepped (a micro-batch of its own);
nothing is captured and a later discard replays it.

Invariants: a version is captured between two blocks, when the next one begins (so that whatever runs between them, a
scheduler or an average, is part of it) and before its batch is fetched; ``StepDiscarded`` never leaves this file;
inside the loop a lost peer is an error value, outside it an exception.
Known limit: code between blocks must not use collectives.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch

from p2pstate.errors import P2PStateError, StepDiscarded
from p2pstate.gradients import discard_gradients
from p2pstate.groups.gate import Ballot, vote
from p2pstate.groups.registry import REGISTRY
from p2pstate.groups.status import STATUS
from p2pstate.plan_recovery import RankReport
from p2pstate.protection import Protection
from p2pstate.recover import ROUND_FAILED, Joined, LostError, MustStartOver, Phases, join
from p2pstate.state import TrainingState
from p2pstate.state import rng as random_streams
from p2pstate.types import RoundInfo, Start
from p2pstate.worker.context import WorkerContext
from p2pstate.worker.link import RoundAborted

__all__ = ["Loop", "LoopPosition", "StepBlock"]

NUM_REHEARSALS = 2  # whole steps: DDP lays its buckets out anew after the first one that is reduced
MAX_REHEARSAL_TURNS = 1000  # for a loop whose rehearsals never come to an optimizer.step()
END_OF_LOOP = 1 << 40  # votes at the end of the loop cannot meet votes of a step
MIN_DATA_END_WAIT_S = 5.0  # how long a rank without data waits for the others to run out as well


class StepBlock:
    """What ``with state.step() as step`` binds."""

    def __init__(self, loop: Loop, where: str) -> None:
        self._loop = loop
        self.where = where
        self.number = loop.step + 1
        self.committed = False
        self.again = False  # committed before in this process, and done again after a fault
        self.boundary = False  # a loss scaler was asked to step
        self.voted: Ballot | None = None

    def __enter__(self) -> StepBlock:
        self._loop.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        return self._loop.leave(self, error)


class LoopPosition:
    """Part of the captured state: whether the data was being iterated, that is, whether ``iter(data)`` is behind us."""

    def __init__(self) -> None:
        self.iterating = False

    def state_dict(self) -> dict[str, bool]:
        return {"iterating": self.iterating}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        self.iterating = state["iterating"]


class Loop:
    """Owned by a Replicator; used from the training thread only."""

    def __init__(
        self,
        context: WorkerContext,
        state: TrainingState,
        models: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        data: Any,
        position: LoopPosition,
        protection: Protection,
        *,
        recovery_timeout_s: float,
    ) -> None:
        self._context = context
        self._link = context.link
        self._state = state
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._scalers: list[Any] = []
        self._data = data
        self._iterator: Iterator[Any] | None = None
        self._position = position
        self.protection = protection
        self._recovery_timeout_s = recovery_timeout_s
        # Where this process is
        self.step = 0  # newest committed step
        self._epoch = 0  # newest round it joined or tried to join
        self._must_join = not context.fresh or context.restore
        self._num_rehearsals_left = NUM_REHEARSALS if self._must_join else 0
        self._num_rehearsal_turns_left = MAX_REHEARSAL_TURNS
        self._num_warm_steps = 0
        self._ended_at: int | None = None  # this rank's data ended after this step
        self._end_step: int | None = None  # all ranks end at this step, because somebody's data does
        self._newest_yielded = 0
        self.replaying = False  # what run() has yielded is a step that this process had committed before
        self._beyond: int | None = None  # report the first commit past this step
        # The block
        self._block: StepBlock | None = None
        self._turn_open = False
        self._where = ""
        self._discard_pending = False
        self._block_began = 0.0
        self._step_seconds = 0.0
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._before_optimizer)

    @property
    def rehearsing(self) -> bool:
        return self._must_join

    # -- what the user's loop runs on

    def run(self, train_step: Callable[..., Any], steps: int | None) -> Iterator[tuple[int, Any]]:
        """See Replicator.run."""
        for batch in self._turns(steps):
            block = StepBlock(self, "state.run")
            value: Any = None
            with block:
                value = train_step(*batch)
            if block.committed:
                self._report(block.number, value)
                self.replaying = block.again
                yield block.number, value

    def batches(self, steps: int | None) -> Iterator[Any]:
        """See Replicator.batches."""
        for batch in self._turns(steps):
            yield batch[0] if batch else None

    def _turns(self, steps: int | None) -> Iterator[tuple[Any, ...]]:
        """The arguments of one block per turn, until ``steps`` steps are committed or the data ends."""
        self._enter_loop()
        done = False
        try:
            while not done:
                if STATUS.error is not None or self._discard_pending:
                    self._recover()
                elif self._must_join and self._num_rehearsals_left > 0 and self._num_rehearsal_turns_left > 0:
                    self._num_rehearsal_turns_left -= 1
                elif self._must_join:
                    self._recover()
                if self._is_over(steps):
                    done = self._finish()
                    continue
                if not self._must_join:
                    self.protection.capture_if_due(self._epoch, self.step)
                try:
                    batch = self._fetch()
                except StopIteration:
                    self._iterator = None
                    self._position.iterating = False
                    if self._must_join:
                        self._num_rehearsals_left = 0
                    else:
                        done = self._data_ended()
                    continue
                self._turn_open = True
                yield batch
                self._turn_open = False
        except GeneratorExit:
            # The user left by break or return: every rank has to do so at the same step.
            self._turn_open = False
            if self._discard_pending or self._must_join or not self._finish():
                self._context.left_early = self._where or "state.run"
            raise

    def _is_over(self, steps: int | None) -> bool:
        limits = [limit for limit in (steps, self._end_step) if limit is not None]
        return not self._must_join and bool(limits) and self.step >= min(limits)

    def _fetch(self) -> tuple[Any, ...]:
        """The next batch, as arguments of train_step. Raises StopIteration when the data ends."""
        if self._data is None:
            return ()
        if self._iterator is None:
            self._iterator = iter(self._data)
            self._position.iterating = True
        return (next(self._iterator),)

    def _continue_data(self) -> None:
        """After a restore: iterate again, at the restored position. Some loaders draw a seed when they are asked to
        iterate; the undisturbed run has drawn it before, so the random streams are put back."""
        self._iterator = None
        if self._data is not None and self._position.iterating:
            streams = random_streams.capture()
            self._iterator = iter(self._data)
            random_streams.restore(streams)

    # -- blocks

    def enter(self, block: StepBlock) -> None:
        if self._block is not None:
            raise RuntimeError("a step began inside another one: leave the first `with state.step():` block before")
        if not self._turn_open:
            raise RuntimeError(
                "`with state.step():` runs once per turn of `for batch in state.batches():`, which decides what is run "
                "again after a fault; here it ran outside of that loop, or a second time in one turn"
            )
        self._block = block
        self._where = block.where
        self._turn_open = False
        self._block_began = time.monotonic()

    def leave(self, block: StepBlock, error: BaseException | None) -> bool:
        """The end of a block. True swallows ``error``: the step was discarded."""
        self._block = None
        if error is not None:
            if isinstance(error, StepDiscarded):
                self._discard_pending = True
                return True
            if STATUS.error is not None and isinstance(error, Exception):
                print("p2pstate: an exception in a step that is discarded anyway:", file=sys.stderr)
                traceback.print_exception(error)
                self._discard_pending = True
                return True
            return False
        if self._must_join:
            if block.boundary:  # a micro-batch of its own is no step
                self._num_warm_steps += 1
                self._num_rehearsals_left -= 1
        elif (block.voted is None and not self._vote(block, boundary=block.boundary)) or STATUS.error is not None:
            self._discard_pending = True
        elif block.voted is not None and block.voted.boundary:
            self._commit(block, block.voted)
        return False

    def _commit(self, block: StepBlock, voted: Ballot) -> None:
        block.committed = True
        block.again = block.number <= self._newest_yielded
        self.step = block.number
        self._num_warm_steps += 1
        seconds = time.monotonic() - self._block_began
        self._step_seconds = 0.9 * self._step_seconds + 0.1 * seconds if self._step_seconds else seconds
        self._newest_yielded = max(self._newest_yielded, block.number)
        self.protection.committed(self.step, voted)
        if block.where != "state.run":
            self._report(block.number, None)

    def _report(self, step: int, value: Any) -> None:
        """Tell the agent about a committed step. Reads a loss only where that costs no device synchronisation."""
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        protected = self.protection.protected
        self._link.send(
            "step",
            step=step,
            seconds=time.monotonic() - self._block_began,
            protected=protected.step if protected else None,
            loss=float(value) if isinstance(value, int | float) else None,
        )
        if self._beyond is not None and step > self._beyond:
            self._beyond = None
            self._link.send("event", kind="first_step", epoch=self._epoch, step=step)

    # -- the gate

    def watch_scaler(self, scaler: Any) -> None:
        """A loss scaler that declines to step an optimizer ends a step all the same."""
        stock = scaler.step

        def step(*args: Any, **kwargs: Any) -> Any:
            if self._block is not None:
                self._block.boundary = True
            return stock(*args, **kwargs)

        scaler.step = step
        self._scalers.append(scaler)

    def _before_optimizer(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pre-hook of every optimizer: nothing outside a block, once inside, after the closure where there is one."""
        block = self._block
        if block is None or block.voted is not None:
            return None
        if self._must_join:
            block.boundary = True
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._gate(block)
            return None

        def closure_then_gate() -> Any:
            loss = closure()
            if block.voted is None:
                self._gate(block)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_gate}
        return (args[0], closure_then_gate, *args[2:]), kwargs

    def _gate(self, block: StepBlock) -> None:
        if not self._vote(block, boundary=True):
            raise StepDiscarded
        if block.voted is not None and not block.voted.boundary:
            STATUS.fail(
                P2PStateError(
                    "some ranks ended their block without optimizer.step() while others stepped: every rank has to "
                    "step the same number of times"
                )
            )
            raise StepDiscarded

    def _vote(self, block: StepBlock, *, boundary: bool) -> bool:
        """Cast this rank's vote. False: the step must be discarded here."""
        if STATUS.error is not None:
            return False
        self.protection.wait_a_little(self._step_seconds)
        block.voted = self._ballot(block.number, boundary)
        return block.voted is not None

    def _ballot(self, step: int, boundary: bool, timeout_s: float | None = None) -> Ballot | None:
        """None: this rank has seen an error, the ranks do not agree on what they vote about, or time is up."""
        ballot = Ballot(int(boundary), step, -step, *self.protection.complete())
        result = vote(REGISTRY, STATUS, ballot, timeout_s)
        if result is not None and result.step != -result.neg_step:
            STATUS.fail(P2PStateError("ranks do not agree on the step: some have left the loop, others go on"))
            return None
        return result

    # -- beginning and end

    def _enter_loop(self) -> None:
        self._context.in_loop = True
        STATUS.loud = False
        if self._epoch or STATUS.solo:
            self._link.send("in_loop")
            return
        self._epoch = STATUS.epoch
        try:
            REGISTRY.attach(REGISTRY.build(self._epoch, own_only=True))
        except ROUND_FAILED as error:
            STATUS.fail(error)
        if not self._must_join:
            self._link.send("in_loop")
            self.protection.begin()

    def _finish(self, timeout_s: float | None = None) -> bool:
        """All ranks have committed the last step: protect it, agree, and leave. False: a fault came first."""
        if STATUS.error is not None:
            return False
        self.protection.capture_if_due(self._epoch, self.step)
        self.protection.drain(self._recovery_timeout_s)
        if self._ballot(END_OF_LOOP + self.step, boundary=False, timeout_s=timeout_s) is None:
            return False
        self._ended_at = self._end_step = None
        self._context.in_loop = False
        STATUS.loud = True
        self._link.send("loop_done", step=self.step)
        return True

    def _data_ended(self) -> bool:
        """This rank has no batch any more. If others have, all end at this step, after a round of its own."""
        if self._finish(max(MIN_DATA_END_WAIT_S, 10 * self._step_seconds)):
            return True
        self._ended_at = self.step
        STATUS.fail(P2PStateError(f"the data of rank {self._context.rank} ended after step {self.step}"))
        return False

    # -- rounds

    def _recover(self) -> None:
        """Join the next round that can be joined, whatever it takes; returns with the state of its version."""
        newcomer = self._must_join
        if not newcomer:
            STATUS.fail(P2PStateError("this rank discarded its step"))
        phases = Phases()
        error_at = STATUS.error_at
        if error_at is not None:
            phases.seconds["abort"] = time.monotonic() - error_at
            self._link.send("event", kind="discarded", step=self.step + 1, error=str(STATUS.error)[:300])
        self._discard_pending = False
        self._iterator = None
        discard_gradients(self._models, self._optimizers, self._scalers)
        joined = self._join_some_round(newcomer, phases)
        STATUS.connect(self._epoch)
        if self._link.is_aborted(self._epoch):
            STATUS.fail(RoundAborted(self._link.abort_reason), self._epoch)
        self._must_join = False
        self.step = joined.version.step
        self._beyond = joined.version.step + joined.steps_lost
        self._end_step = joined.end_step
        self._link.send(
            "event",
            kind="recovery",
            epoch=self._epoch,
            phases=phases.seconds,
            error_t=time.time() - (time.monotonic() - error_at) if error_at is not None else None,
            source=joined.source,
            bytes=joined.num_bytes,
            version=list(joined.version),
            steps_lost=joined.steps_lost,
            steps_skipped=self.protection.num_skipped_in_a_row,
            reason=joined.reason,
        )
        self.protection.resumed(joined.keep)
        self._continue_data()

    def _join_some_round(self, newcomer: bool, phases: Phases) -> Joined:
        context = self._context
        ended_at = -1 if self._ended_at is None else self._ended_at
        report = RankReport(context.rank, newcomer, self._num_warm_steps, 0 if newcomer else self.step, ended_at)
        if newcomer and context.restore and STATUS.error is None:
            # Everybody started this round connected: join it over the connections there are.
            info = self._link.wait_round(self._epoch - 1)
            joined = self._try_to_join(info, report, phases, connected=True)
            if joined is not None:
                return joined
        while True:
            with phases.phase("quiesce"):
                self.protection.quiesce(self._epoch)
                REGISTRY.release()
            with phases.phase("view"):
                info = self._link.wait_round(self._epoch)
            self._epoch = info.epoch
            if info.start != Start.IN_PLACE:
                continue  # all workers are being replaced, this one as well
            joined = self._try_to_join(info, report, phases, connected=False)
            if joined is not None:
                return joined

    def _try_to_join(self, info: RoundInfo, report: RankReport, phases: Phases, *, connected: bool) -> Joined | None:
        link, context = self._link, self._context
        context.joining = True
        try:
            joined = join(info, link, REGISTRY, self._state, report, phases, self._recovery_timeout_s, connected)
        except MustStartOver as error:
            link.send("start_over", epoch=info.epoch, start=error.decision.start, reason=error.decision.reason)
        except LostError as error:
            link.send("state_lost", epoch=info.epoch, reason=str(error))
        except ROUND_FAILED as error:
            if not link.is_aborted(info.epoch):
                link.send("error", epoch=info.epoch, text=f"joining failed: {error}")
        else:
            link.send("resumed", epoch=info.epoch, version=list(joined.version))
            return joined
        finally:
            context.joining = False
        return None
