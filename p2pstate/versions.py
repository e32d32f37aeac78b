"""The version rules: what becomes a version, what is kept meanwhile, and which slot is written next. Pure.

In: what the gate's votes say, the steps that commit, the version a round resumes, what the two slots of a part hold.
Out: :class:`Course`, one rank's position in these rules (a frozen value; every event makes the next one),
:func:`version_to_keep` and :func:`next_slot`. protection.py and capture.py execute what is decided here.

Invariants: the decisions follow from numbers that all ranks share (the smallest completed version of a vote, the
committed step, the resumed version), never from what one rank has achieved alone, so all ranks capture and skip alike;
a version is captured only after the one before is protected everywhere; one in which ranks turned out to differ in what
they were to hold alike is never kept; a slot that holds the kept version is never written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from p2pstate.interval import Interval
from p2pstate.types import Version

__all__ = ["Course", "next_slot", "version_to_keep"]

_NOTHING = Version(-1, -1)  # older than every version


@dataclass(frozen=True, slots=True)
class Course:
    """``every``: a version is wanted every so many steps, 1 or more. ``kept``: what the job can fall back to.
    ``captured``: the newest version of this round. ``due``: the state between this step and the next becomes a version.
    ``num_skipped_in_a_row``: wanted versions that all ranks skipped, or gave up, since one was protected.
    ``interval``: what ``every`` follows, where it adapts; a version is then wanted so many steps after the one before,
    else at multiples.
    """

    every: int = 1
    kept: Version | None = None
    captured: Version | None = None
    due: bool = False
    num_skipped_in_a_row: int = 0
    interval: Interval | None = None

    def begun(self) -> Course:
        """A start from scratch: the initial state is the first version."""
        return replace(self, due=True)

    def resumed(self, keep: Version) -> Course:
        """The round resumed a version: it is captured and shipped again at once, for the partners may be new.

        ``keep``: what :func:`version_to_keep` says, the resumed version or an older one. An interval that adapts begins
        anew, for ranks that joined do not know it.
        """
        if self.interval is not None:
            return Course(kept=keep, due=True, interval=Interval())
        return Course(self.every, kept=keep, due=True)

    def committed(self, step: int, complete: Version, largest_need: float = 1.0, *, alike: bool = True) -> Course:
        """``step`` is committed, every rank's shard is complete in both places up to ``complete``, and of an interval
        that adapts no rank needs more than ``largest_need`` steps. ``alike``: nobody has seen that, in the version
        captured last, ranks differ in what they were to hold alike.

        The next version becomes due when the one before is protected; else all ranks skip this one. One that is not
        alike gives a rank another one's bytes: it counts for nothing, and the next one becomes due at once.
        """
        every, interval = self.every, self.interval
        if interval is None:
            wanted = step % every == 0
        else:
            interval = interval.voted(largest_need)
            every = interval.every
            wanted = self.captured is None or step - self.captured.step >= every
        if self.captured is None or complete >= self.captured:
            if not alike and self.captured not in (None, self.kept):
                num_skipped = self.num_skipped_in_a_row + 1
                return Course(every, self.kept, None, True, num_skipped, interval)
            return Course(every, self.captured or self.kept, self.captured, wanted, interval=interval)
        num_skipped = self.num_skipped_in_a_row + wanted
        return replace(self, every=every, due=False, num_skipped_in_a_row=num_skipped, interval=interval)

    def covers(self, step: int) -> bool:
        """Whether the state after ``step``, the newest committed one, is a version, or becomes one before the next."""
        return self.due or (self.captured is not None and self.captured.step == step)

    def captures(self, version: Version) -> Course:
        """``version`` was written to the own slots, and is on its way to the buddy."""
        return replace(self, captured=version, due=False)


def version_to_keep(fatal_losses: Mapping[Version, Collection[frozenset[str]]]) -> Version:
    """Of the whole versions, the one whose slots are kept while the resumed one is captured and shipped again.

    ``fatal_losses``: of every whole version the sets of nodes whose loss would end it, as far as so many may be lost.
    The newest that no loss would end which an older one outlives: the version that is resumed may have only just become
    whole, each shard on its own node, and the slots it would be kept instead of be those of a protected one.
    """
    versions = sorted(fatal_losses)
    keep = versions[0]
    for version in versions[1:]:
        if all(any(less <= lost for less in fatal_losses[keep]) for lost in fatal_losses[version]):
            keep = version
    return keep


def next_slot(held: tuple[Version | None, Version | None], keep: Version | None) -> int:
    """Which of a part's two slots is written next; ``held`` is what they hold by their headers.

    Never the one that holds ``keep``. When neither does: an empty, torn or half-written one, else the older one. A
    start from scratch has nothing to keep, and no version beyond the initial state is whole: that one is spared, the
    newer one written, or a fault before the new initial state is protected would find nothing at all. (Known limit: of
    the initial states of two such starts in a row it cannot tell which is whole.)
    """
    if keep is not None and keep in held:
        return 1 - held.index(keep)
    if keep is None and None not in held:
        return max((0, 1), key=lambda index: held[index] or _NOTHING)
    return min((0, 1), key=lambda index: held[index] or _NOTHING)
