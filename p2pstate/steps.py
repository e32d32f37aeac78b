"""The training loop of one worker: blocks, the gate, captures, and recovery between them.

In: the user's blocks (``with state.step():`` or ``train_step(batch)``), the data, the process's error flag. Out: each
committed step once, a captured version per step, and, after a fault, the same loop going on from the newest whole
version.

A block ends in one of three ways. *Committed*: every rank voted yes before the first optimizer changed anything, and no
error was seen up to the block's end. *Discarded*: this rank saw an error or does not know the vote's outcome; it joins
the next round and resumes the version everybody resumes. *Open*: no optimizer was stepped (a micro-batch of its own);
nothing is captured and a later discard replays it.

Invariants: a version is captured between two blocks, when the next one begins (so that whatever runs between them, a
scheduler or an average, is part of it) and before its batch is fetched; capture or skip follows from the gate's
numbers, which are the same on all ranks; ``StepDiscarded`` never leaves this file.
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

from p2pstate.capture import Capturer
from p2pstate.errors import P2PStateError, StepDiscarded
from p2pstate.groups.gate import Ballot, vote
from p2pstate.groups.registry import REGISTRY
from p2pstate.groups.status import STATUS
from p2pstate.groups.waiting import ABANDON_AFTER_S
from p2pstate.plan_recovery import RankReport
from p2pstate.recover import ROUND_FAILED, Joined, LostError, MustStartOver, Phases, join
from p2pstate.replicate import Shipper
from p2pstate.state import TrainingState
from p2pstate.stats import ProtectionStats
from p2pstate.types import Start, Version
from p2pstate.worker.context import WorkerContext
from p2pstate.worker.link import RoundAborted

__all__ = ["Loop", "StepBlock"]

NUM_REHEARSALS = 2
MIN_SHIPPING_WAIT_S = 0.02
DRAIN_S = 0.5  # how long copies that are under way may still arrive after a fault
END_OF_LOOP = 1 << 40  # votes at the end of the loop cannot meet votes of a step


class StepBlock:
    """What ``with state.step() as step`` binds."""

    def __init__(self, loop: Loop, where: str) -> None:
        self._loop = loop
        self.where = where
        self.number = loop.step + 1
        self.committed = False
        self.boundary = False  # a loss scaler was asked to step
        self.voted: Ballot | None = None

    def __enter__(self) -> StepBlock:
        self._loop.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        return self._loop.leave(self, error)


class Loop:
    """Owned by a Replicator; used from the training thread only."""

    def __init__(
        self,
        context: WorkerContext,
        state: TrainingState,
        optimizers: Iterable[torch.optim.Optimizer],
        data: Any,
        *,
        every: int,
        max_overhead: float,
        recovery_timeout_s: float,
    ) -> None:
        self._context = context
        self._link = context.link
        self._state = state
        self._optimizers = list(optimizers)
        self._data = data
        self._every = every
        self._max_overhead = max_overhead
        self._recovery_timeout_s = recovery_timeout_s
        self._iterator: Iterator[Any] | None = None
        self._block: StepBlock | None = None
        self._turn_open = False
        self._where = ""
        self._scalers: list[Any] = []
        self._discard_pending = False
        self._num_rehearsals_left = NUM_REHEARSALS if STATUS.solo else 0
        # Versions
        self.step = 0  # newest committed step
        self.stats = ProtectionStats()
        self._num_skipped_in_a_row = 0
        self._epoch = 0
        self._to_capture = False
        self._captured: Version | None = None  # newest version this process captured in this round
        self._protected: Version | None = None  # newest version known to be protected on all ranks; its slots are kept
        self._num_warm_steps = 0
        self._newest_yielded = 0
        self._step_seconds = 0.0
        self._block_began = 0.0
        self._beyond: int | None = None  # report the first commit past this step
        self._capturer = Capturer(self._link, context.rank, context.local_rank, context.num_local)
        self._shipper = self._make_shipper()
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._before_optimizer)

    # -- what the user's loop runs on

    @property
    def rehearsing(self) -> bool:
        return STATUS.solo

    def run(self, train_step: Callable[..., Any], steps: int | None) -> Iterator[tuple[int, Any]]:
        """See Replicator.run."""
        for batch in self._turns(steps):
            block = StepBlock(self, "state.run")
            value: Any = None
            with block:
                value = train_step(*batch)
            if block.committed:
                self._report(block.number, value)
                if block.number > self._newest_yielded:
                    self._newest_yielded = block.number
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
                if STATUS.solo and self._num_rehearsals_left > 0:
                    self._num_rehearsals_left -= 1
                elif STATUS.solo or STATUS.error is not None or self._discard_pending:
                    self._recover()
                if not STATUS.solo and steps is not None and self.step >= steps:
                    done = self._finish()
                    continue
                self._capture_if_due()
                try:
                    batch = self._fetch()
                except StopIteration:
                    if STATUS.solo:
                        self._num_rehearsals_left = 0
                    else:
                        done = self._finish()
                    continue
                self._turn_open = True
                yield batch
                self._turn_open = False
        except GeneratorExit:
            # The user left by break or return: every rank has to do so at the same step.
            self._turn_open = False
            if self._discard_pending or STATUS.solo or not self._finish():
                self._context.left_early = self._where or "state.run"
            raise

    def _fetch(self) -> tuple[Any, ...]:
        """The next batch, as arguments of train_step. Raises StopIteration when the data ends."""
        if self._data is None:
            return ()
        if self._iterator is None:
            self._iterator = iter(self._data)
        return (next(self._iterator),)

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
        if STATUS.solo:
            self._num_warm_steps += 1
        elif (block.voted is None and not self._vote(block, boundary=block.boundary)) or STATUS.error is not None:
            self._discard_pending = True
        elif block.voted is not None and block.voted.boundary:
            self._commit(block, block.voted)
        return False

    def _commit(self, block: StepBlock, voted: Ballot) -> None:
        block.committed = True
        self.step = block.number
        self._num_warm_steps += 1
        seconds = time.monotonic() - self._block_began
        self._step_seconds = 0.9 * self._step_seconds + 0.1 * seconds if self._step_seconds else seconds
        if self._captured is None or Version(voted.protected_epoch, voted.protected_step) >= self._captured:
            # The same numbers on every rank: all capture, or all skip.
            self._protected = self._captured or self._protected
            self._to_capture = self.step % self._every == 0
            self._num_skipped_in_a_row = 0
        else:
            self._to_capture = False
            self.stats.num_skipped += 1
            self._num_skipped_in_a_row += 1
        if block.where != "state.run":
            self._report(block.number, None)

    def _report(self, step: int, value: Any) -> None:
        """Tell the agent about a committed step. Reads a loss only where that costs no device synchronisation."""
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        self._link.send(
            "step",
            step=step,
            seconds=time.monotonic() - self._block_began,
            protected=self._protected.step if self._protected else None,
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
        if block is None or block.voted is not None or STATUS.solo:
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

    def _vote(self, block: StepBlock, *, boundary: bool) -> bool:
        """Cast this rank's vote. False: the step must be discarded here."""
        if STATUS.error is not None:
            return False
        self._wait_for_shipping()
        block.voted = self._ballot(block.number, boundary)
        return block.voted is not None

    def _wait_for_shipping(self) -> None:
        """Give the version of the step before a little time to arrive, so that the next one need not be skipped."""
        if self._shipper.wait(0):
            self.stats.num_in_time += 1
            return
        began = time.monotonic()
        self._shipper.wait(max(MIN_SHIPPING_WAIT_S, self._max_overhead * self._step_seconds))
        self.stats.wait_s.append(time.monotonic() - began)

    def _ballot(self, step: int, boundary: bool) -> Ballot | None:
        complete = self._shipper.complete
        result = vote(REGISTRY, STATUS, Ballot(int(boundary), step, -step, *complete))
        if result is not None and result.step != -result.neg_step:
            STATUS.fail(
                P2PStateError(f"ranks do not agree on the step: {result.step} and {-result.neg_step} met in one vote")
            )
            return None
        return result

    # -- versions

    def _capture_if_due(self) -> None:
        inner = REGISTRY.replication
        if not self._to_capture or STATUS.echoing or inner is None:
            return
        self._to_capture = False
        version = Version(self._epoch, self.step)
        began = time.monotonic()
        images = self._capturer.capture(self._state.collect(), version, self._protected)
        self._captured = version
        self._shipper.ship(images, self._protected, inner, began)
        self.stats.capture_s.append(time.monotonic() - began)
        self.stats.num_captured += 1
        self.stats.num_own_bytes = sum(image.num_bytes for image in images if image.part.kind == "own")
        self.stats.num_shared_bytes = sum(image.num_bytes for image in images if image.part.kind != "own")

    def _make_shipper(self) -> Shipper:
        return Shipper(self._link, self._context.buddy, self._context.ward, self._shipping_failed, self.stats)

    def _shipping_failed(self, epoch: int, error: BaseException) -> None:
        if STATUS.error is None and epoch == STATUS.epoch and self._context.in_loop:
            self._link.send("error", epoch=epoch, text=f"replication: {error}", training=False)

    # -- rounds

    def _enter_loop(self) -> None:
        self._context.in_loop = True
        self._link.send("in_loop")
        if self._epoch or STATUS.solo:
            return
        self._epoch = STATUS.epoch
        self._to_capture = True
        try:
            REGISTRY.attach(REGISTRY.build(self._epoch, own_only=True))
        except ROUND_FAILED as error:
            STATUS.fail(error)

    def _finish(self) -> bool:
        """All ranks have committed the last step: let the last copies arrive and agree. False: a fault came first."""
        deadline = time.monotonic() + self._recovery_timeout_s
        while not self._shipper.wait(ABANDON_AFTER_S) and time.monotonic() < deadline and STATUS.error is None:
            pass
        if self._ballot(END_OF_LOOP + self.step, boundary=False) is None:
            return False
        self._context.in_loop = False
        self._link.send("loop_done", step=self.step)
        return True

    def _quiesce(self) -> None:
        """Stop everything that belongs to the old round: after this no slot changes until the next capture."""
        self._shipper.wait(DRAIN_S)
        REGISTRY.cut(self._epoch)
        if not self._shipper.wait(ABANDON_AFTER_S):
            self._shipper.cancel()
            self._shipper = self._make_shipper()
        REGISTRY.release()

    def _recover(self) -> None:
        """Join the next round that can be joined, whatever it takes; returns with the state of its version."""
        newcomer = STATUS.solo
        if not newcomer:
            STATUS.fail(P2PStateError("this rank discarded its step"))
        phases = Phases()
        error_at = STATUS.error_at
        began = time.monotonic()
        if error_at is not None:
            phases.seconds["abort"] = began - error_at
            self._link.send("event", kind="discarded", step=self.step + 1, error=str(STATUS.error)[:300])
        committed = self.step
        self._discard_pending = False
        self._iterator = None
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        for scaler in self._scalers:
            scaler._per_optimizer_states.clear()
        joined = self._join_some_round(newcomer, committed, phases)
        STATUS.connect(self._epoch)
        if self._link.is_aborted(self._epoch):
            STATUS.fail(RoundAborted(self._link.abort_reason), self._epoch)
        self.step = joined.version.step
        self._protected, self._captured, self._to_capture = joined.version, None, True
        self._beyond = joined.version.step + joined.steps_lost
        self._num_rehearsals_left = 0
        self._link.send("in_loop")
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
            steps_skipped=self._num_skipped_in_a_row,
            reason=joined.reason,
        )
        self._num_skipped_in_a_row = 0

    def _join_some_round(self, newcomer: bool, committed: int, phases: Phases) -> Joined:
        context = self._context
        report = RankReport(context.rank, newcomer, self._num_warm_steps, committed)
        while True:
            with phases.phase("quiesce"):
                self._quiesce()
            with phases.phase("view"):
                info = self._link.wait_round(self._epoch)
            self._epoch = info.epoch
            if info.start != Start.IN_PLACE and not (newcomer and info.start == Start.RESTART):
                continue  # all workers are being replaced, this one as well
            context.joining = True
            try:
                joined = join(info, self._link, REGISTRY, self._state, report, phases, self._recovery_timeout_s)
            except MustStartOver as error:
                decision = error.decision
                self._link.send("start_over", epoch=info.epoch, start=decision.start, reason=decision.reason)
            except LostError as error:
                self._link.send("state_lost", epoch=info.epoch, reason=str(error))
            except ROUND_FAILED as error:
                if not self._link.is_aborted(info.epoch):
                    self._link.send("error", epoch=info.epoch, text=f"joining failed: {error}", training=False)
            else:
                self._link.send("resumed", epoch=info.epoch, version=list(joined.version))
                return joined
            finally:
                context.joining = False
