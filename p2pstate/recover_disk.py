"""A round that resumes a checkpoint: memory has no whole version, or all go back behind a step that spoilt the model.

In: what all ranks of the round have said, the checkpoints. Out: the state of one checkpoint, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from p2pstate.errors import NotFinite
from p2pstate.feed import LoopPosition
from p2pstate.groups.status import STATUS
from p2pstate.joined import Attempt, Joined, LostError, MustStartOver, all_done
from p2pstate.loops import check_version
from p2pstate.plan_recovery import RankReport, StartOver, why_unsettled
from p2pstate.resume import Disk
from p2pstate.types import Start

if TYPE_CHECKING:
    from p2pstate.durable.resume import Resolved

__all__ = ["DiskRecovery"]


@dataclass(frozen=True, slots=True)
class DiskRecovery:
    """One rank's part in it. ``reports``: of all ranks. MustStartOver is raised where wrappers are not settled,
    OtherLoop or MustStartOver where the checkpoint is of another training loop."""

    disk: Disk
    attempt: Attempt
    reports: Mapping[int, RankReport]

    def newest(self, in_memory: LostError | MustStartOver, ended_at: int | None) -> Joined | None:
        """Resume the newest good one. None: there is none. ``in_memory``: what the plan says of the copies in memory.

        Raises LostError where memory has nothing left, either.
        """
        with self.attempt.phases.phase("verify"):
            resolved = self.disk.resolve(self.attempt.store, self.attempt.info, str(in_memory))
        if resolved.choice is None:
            if isinstance(in_memory, LostError):
                seen = "; ".join(resolved.skipped) or "there is none"
                raise LostError(f"{in_memory}; and no checkpoint on disk can be used: {seen}") from in_memory
            return None
        joined = self._restore(resolved, f"{in_memory}; {resolved.choice.path} is the newest good checkpoint")
        return replace(joined, end_step=ended_at)

    def behind(self, step: int, num_back: int) -> Joined:
        """Resume one from before ``step``, of which gradients were no numbers. Raises NotFinite: there is none."""
        attempt, report = self.attempt, self.attempt.report
        why = f"gradients of step {step} are NaN or infinite"
        with attempt.phases.phase("verify"):
            resolved = self.disk.resolve(attempt.store, attempt.info, why, before_step=step, num_back=num_back)
        if resolved.choice is None:
            seen = "; ".join(resolved.skipped) or "there is none yet"
            raise NotFinite(f"{why}, and no checkpoint from before can be used: {seen}")
        began_after = report.ends.end_of(report.loop - 1)
        if resolved.choice.step <= began_after:
            raise NotFinite(f"{why}, and no checkpoint is of this training loop, which began after step {began_after}")
        joined = self._restore(resolved, f"{why}: back to {resolved.choice.path}")
        return replace(joined, num_batches=max(each.num_batches for each in self.reports.values() if each.spoilt_step))

    def _restore(self, resolved: Resolved, reason: str) -> Joined:
        attempt, info, choice = self.attempt, self.attempt.info, resolved.choice
        assert choice is not None
        assert choice.manifest is not None
        unsettled = why_unsettled(self.reports)
        if unsettled:
            text = f"{unsettled}: all workers start again and resume from disk at step {choice.step}"
            raise MustStartOver(StartOver(Start.RESTART, text))
        with attempt.phases.phase("restore"):
            version, loaded = self.disk.load(resolved, attempt.state, info.world_size)
            ends = LoopPosition.ends_in(loaded.values["objects"]["loop"], info.epoch)
            check_version(attempt.report, self.reports, ends, ends.num + 1, version.step, info.epoch)
            attempt.state.restore_decoded(loaded.tensors, loaded.values)
            all_done(attempt.registry, lambda: STATUS.error is not None)
        seen_step = max([info.progress, *(report.committed_step for report in self.reports.values())])
        reason = "; ".join([reason, *(f"skipped {each}" for each in resolved.skipped)])
        lost = max(0, seen_step - version.step)
        return Joined(version, version, lost, "disk", choice.manifest.num_bytes, reason, None, ends)
