"""Which of the script's training loops is resumed: all ranks have to be in the one that the version belongs to.

In: in which loop each rank is, after which steps the run's loops have ended, the version that is resumed. Out: nothing
where they fit; else who has to do what, as an exception.

A script may train in one loop after another: epochs as loops of their own, pretraining and fine-tuning. A process that
begins later passes by the loops that are over (they end without a step), runs what stands between them, and joins in
the loop in which the others are. What it has by then is replaced by the version, so only versions of that very loop can
be resumed there. Before the first of them is whole, all workers start again, join in the loop before, which ends at
once, and do together what comes after it. That a loop comes to no step at all, as some rank's data ends among the
batches before it, is remembered over such a start, and over one from the beginning: then it ends where it begins.

Known limit: after which steps loops have ended is known of the newest NUM_ENDS_KEPT. A version from before them cannot
be resumed from memory, only from disk: a checkpoint says itself which loops were over.
"""

from __future__ import annotations

from collections.abc import Mapping

from p2pstate.errors import Retryable
from p2pstate.joined import LostError, MustStartOver, OtherLoop
from p2pstate.plan_recovery import RankReport, StartOver
from p2pstate.types import NO_ENDS, NUM_ENDS_KEPT, LoopEnds, Start

__all__ = ["check_meeting", "check_version", "without_loop"]


def check_meeting(mine: RankReport, reports: Mapping[int, RankReport], ends: LoopEnds) -> None:
    """All ranks of a round have met. Raises OtherLoop in one that has yet to come to the loop of the others, Retryable
    in those that have to wait for it, MustStartOver when they cannot meet."""
    loops = {report.loop for report in reports.values() if not report.newcomer}
    if not loops:
        return
    newest = max(loops)
    farthest = max(report.loop for report in reports.values())
    if len(loops) > 1 or farthest > newest:
        raise _restart(f"some ranks have come to training loop {farthest}, others have not")
    behind = [report.rank for report in reports.values() if report.loop < newest]
    if mine.rank in behind:
        raise OtherLoop(newest, ends)
    if behind:
        raise Retryable(f"rank {behind[0]} has yet to come to training loop {newest}")


def check_version(
    mine: RankReport, reports: Mapping[int, RankReport], ends: LoopEnds, loop: int, step: int, epoch: int
) -> None:
    """``step``, of training loop ``loop``, is to be resumed in round ``epoch``. Raises OtherLoop in all ranks where all
    are on their way there, MustStartOver where some would have to go back, LostError where nobody knows the way there
    any more."""
    if loop < 1:
        raise LostError(
            f"step {step}, the newest protected one, is more than {NUM_ENDS_KEPT} training loops ago, and which loop "
            "it was is not known any more: capture versions more often than that (every=)"
        )
    if all(report.loop == loop for report in reports.values()):
        return
    if all(report.newcomer and report.loop == mine.loop for report in reports.values()) and mine.loop < loop:
        raise OtherLoop(loop, ends, together=True)
    began_after = ends.end_of(mine.loop - 1)
    why = f"training loop {mine.loop} has no protected step yet: the newest is step {step}, of an earlier one"
    if began_after >= 0 and any(each.loop == mine.loop and each.ended_at == began_after for each in reports.values()):
        raise _restart(f"{why}, and the data of some rank ended before the first", ends.with_empty(epoch, mine.loop))
    raise _restart(why)


def without_loop(error: LostError | MustStartOver, epoch: int, loop: int, ends: LoopEnds) -> LostError | MustStartOver:
    """``error``: nothing can be resumed in round ``epoch``. If training starts anew because of that, it is to pass by
    ``loop``, whose data ended in some rank before the first step."""
    if isinstance(error, LostError) or error.decision.start != Start.FRESH:
        return error
    why = f"the data of some rank ended before the first step of training loop {loop}"
    decision = StartOver(Start.FRESH, f"{why}; training starts anew, and that loop is over at once")
    return MustStartOver(decision, ends.with_empty(epoch, loop))


def _restart(why: str, ends: LoopEnds = NO_ENDS) -> MustStartOver:
    return MustStartOver(StartOver(Start.RESTART, f"{why}; all workers start again"), ends)
