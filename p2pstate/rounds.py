"""From one round to the next: a worker joins whatever round can be joined, until one has been.

In: what this rank says of itself, the rounds that the agent announces. Out: this process connected, and its state at
the version that everybody resumes.

Invariants: shipping has stopped and all connections are released before a round is waited for; a round that fails
leaves nothing behind, and the next one is tried; the process's collectives echo until the round has been joined.
"""

from __future__ import annotations

import sys
import time

from p2pstate.errors import NotFinite
from p2pstate.groups.gate import all_say
from p2pstate.groups.registry import REGISTRY
from p2pstate.groups.status import STATUS
from p2pstate.joined import ROUND_FAILED, Attempt, Joined, LostError, MustStartOver, OtherLoop, Phases
from p2pstate.observe.meter import METER
from p2pstate.plan_recovery import RankReport
from p2pstate.protection import Protection
from p2pstate.recover import join
from p2pstate.resume import Disk
from p2pstate.settings import Asked
from p2pstate.state import LeafError, TrainingState
from p2pstate.trace import JOIN
from p2pstate.types import NO_ENDS, LoopEnds, RoundInfo, Start
from p2pstate.worker.context import WorkerContext
from p2pstate.worker.link import RoundAborted

__all__ = ["Rounds"]


class Rounds:
    def __init__(
        self,
        context: WorkerContext,
        state: TrainingState,
        protection: Protection,
        recovery_timeout_s: float,
        disk: Disk | None,
    ) -> None:
        self._context = context
        self._link = context.link
        self._state = state
        self._protection = protection
        self._recovery_timeout_s = recovery_timeout_s
        self._disk = disk

    def connect(self) -> None:
        """The first round, with everybody else: connect the groups for votes and shipping."""
        self._context.epoch = epoch = STATUS.epoch
        STATUS.trace.enter_round(epoch)
        try:
            REGISTRY.attach(REGISTRY.build(epoch, own_only=True))
        except ROUND_FAILED as error:
            STATUS.fail(error)

    def find_checkpoint(self) -> bool:
        """In the first round of a start from scratch, with everybody else: is there a checkpoint? All resume it."""
        context, info = self._context, self._context.info
        if self._disk is None or STATUS.error is not None:
            return False
        assert info is not None
        assert REGISTRY.make_store is not None
        try:
            resolved = self._disk.resolve(REGISTRY.make_store(context.epoch), info, "the run was started")
        except ROUND_FAILED as error:
            STATUS.fail(error)
            return False
        if resolved.choice is not None:
            context.restore = context.must_join = True
        return context.must_join

    def in_all_ranks(self, is_so: bool) -> bool:
        """Whether it is so in every rank that rehearses together with this one, which all of them ask at the same time;
        for a process that rehearses alone: whether it is so here. False after an error, which ends the rehearsal."""
        if STATUS.solo or not self._context.restore:
            return is_so
        return bool(all_say(REGISTRY, STATUS, is_so))

    def recover(self, report: RankReport, failed_step: int) -> Joined:
        """Join the next round that can be joined, whatever it takes; returns with the state of its version. Raises
        OtherLoop in a process that has to go to a later training loop before."""
        phases = Phases()
        STATUS.trace.leave_round()
        error_at = STATUS.error_at
        if error_at is not None:
            phases.seconds["abort"] = time.monotonic() - error_at
            self._link.send("event", kind="discarded", step=failed_step, error=str(STATUS.error)[:300])
        if report.newcomer:
            self._link.send("rehearsed")
        joined = self._join_some_round(report, phases)
        self._connected()
        self._link.send(
            "event",
            kind="recovery",
            epoch=self._context.epoch,
            phases=phases.seconds,
            error_t=time.time() - (time.monotonic() - error_at) if error_at is not None else None,
            source=joined.source,
            bytes=joined.num_bytes,
            version=list(joined.version),
            steps_lost=joined.steps_lost,
            steps_skipped=self._protection.num_skipped_since_kept,
            reason=joined.reason,
            clock=METER.report(),
        )
        self._protection.resumed(joined.keep, from_disk=joined.source == "disk")
        return joined

    def _connected(self) -> None:
        epoch = self._context.epoch
        STATUS.connect(epoch)
        STATUS.trace.enter_round(epoch)
        if self._link.is_aborted(epoch):
            STATUS.fail(RoundAborted(self._link.abort_reason), epoch)

    def _join_some_round(self, report: RankReport, phases: Phases) -> Joined:
        context = self._context
        if report.newcomer and context.restore and STATUS.error is None:
            # Everybody started this round connected: join it over the connections there are.
            info = self._link.wait_round(context.epoch - 1)
            joined = self._try_to_join(info, report, phases, connected=True)
            if joined is not None:
                return joined
        while True:
            # A newcomer may have rehearsed long before it is needed: its waiting is no part of a recovery.
            counted = Phases() if report.newcomer else phases
            with counted.phase("quiesce"):
                self._protection.quiesce(context.epoch)
                REGISTRY.release()
            with counted.phase("view"), context.farewell.idle():
                info = self._link.wait_round(context.epoch)
            if self._link.adopted is not None:  # a rehearsal is over: from now on this process's time is the rank's
                seconds, context.raised = self._link.adopted
                METER.restart("recovery.view", seconds)
                self._link.adopted = None
            METER.move("recovery.view", "waiting", self._link.waited_s)
            if STATUS.solo and info.ends.num >= context.loop:
                raise OtherLoop(info.ends.num + 1, info.ends)  # the run has gone on since this process rehearsed
            context.epoch, context.num_moves = info.epoch, 0
            if info.start != Start.IN_PLACE:
                continue  # all workers are being replaced, this one as well
            joined = self._try_to_join(info, report, phases, connected=False)
            if joined is not None:
                return joined

    def _try_to_join(self, info: RoundInfo, report: RankReport, phases: Phases, *, connected: bool) -> Joined | None:
        """None: this process has told its agent what stands in the way, and waits for the next round."""
        link, context = self._link, self._context
        context.joining = True
        try:
            joined = self._join(info, report, phases, connected=connected)
        except OtherLoop as error:
            self._go_to_other_loop(info, error)
            raise
        except MustStartOver as error:
            self._start_over(info, error.decision.start, error.decision.reason, error.ends)
        except LeafError as error:
            if report.newcomer:
                raise
            # Such as parts that the model got after the version: a process of its own begins without them.
            self._start_over(info, Start.RESTART, f"{error}: all workers start again")
        except NotFinite as error:
            print(f"p2pstate: {error}", file=sys.stderr)
            context.leave(str(error), code=1, innocent=False)
        except LostError as error:
            link.send("state_lost", epoch=info.epoch, reason=str(error))
        except ROUND_FAILED as error:
            if not link.is_aborted(info.epoch):
                link.send("error", epoch=info.epoch, text=f"joining failed: {error}")
        else:
            self._adopt(info, joined)
            return joined
        finally:
            context.joining = False
        return None

    def _join(self, info: RoundInfo, report: RankReport, phases: Phases, *, connected: bool) -> Joined:
        context = self._context
        attempt = Attempt(
            info,
            self._link,
            REGISTRY,
            self._state,
            report,
            phases,
            STATUS.trace.row(JOIN),
            context.num_moves,
        )
        asked = Asked(
            settings=self._protection.settings,
            sizes=context.sizes,
            lean=context.lean,
            why_not_full=context.why_not_full,
            replicas=self._protection.replicas.pack(),
        )
        return join(attempt, asked, self._disk, connected=connected, timeout_s=self._recovery_timeout_s)

    def _adopt(self, info: RoundInfo, joined: Joined) -> None:
        """What the round has settled holds for this process from now on."""
        context = self._context
        context.info, context.ends = info, joined.ends
        context.lean, context.sizes_of_all = joined.lean, joined.sizes_of_all
        context.tell_copies()
        self._protection.replicas.adopt(joined.replicas)
        self._link.send("resumed", epoch=info.epoch, version=list(joined.version), ends=joined.ends.pack())

    def _go_to_other_loop(self, info: RoundInfo, error: OtherLoop) -> None:
        """This process does, and the round has to wait for it; or all ranks do, over the connections there are."""
        context = self._context
        if not error.together:
            self._link.send("error", epoch=info.epoch, text=f"rank {context.rank} has to wait: {error}")
            return
        context.info = info
        context.num_moves += 1
        context.restore = True
        self._connected()

    def _start_over(self, info: RoundInfo, start: str, reason: str, ends: LoopEnds = NO_ENDS) -> None:
        self._link.send("start_over", epoch=info.epoch, start=start, reason=reason, ends=ends.pack())
