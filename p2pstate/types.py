"""The values that agents and workers exchange about versions, slots and rounds.

In: nothing. Out: frozen values and their MessagePack forms. No torch, no socket, no clock. DESIGN.md's glossary gives
the words: a *version* is (epoch, step), where the epoch is the round (the epoch at which the training membership last
changed) in which the step was captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "NOTHING_RAISED",
    "NO_ENDS",
    "OLDEST",
    "LoopEnds",
    "Part",
    "RoundInfo",
    "SlotRecord",
    "Start",
    "Version",
    "Worker",
]


NOTHING_RAISED = (0, "")  # step and signature of a user's exception; see user_errors.py


class Version(NamedTuple):
    """One captured state of the whole job. Ordered: a later round wins, then a later step."""

    epoch: int
    step: int


OLDEST = Version(0, -1)  # before any

NUM_ENDS_KEPT = 256  # the newest: versions in memory are of the last loops


class LoopEnds(NamedTuple):
    """After which steps, counted through, the training loops of the run's script have ended: ``num`` loops, the newest
    of them after ``steps``. ``left``: those of these steps at which the user's code has left, by break or return. What
    was said in a later round (``since``) counts more; in one round, the longer. ``empty``: loops, begun after the
    newest step, that are to end without one as soon as they begin again, for the data of some rank ends before."""

    since: int = 0
    num: int = 0
    steps: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    empty: tuple[int, ...] = ()

    @staticmethod
    def unpack(raw: Any) -> LoopEnds:
        """ValueError or TypeError for what :meth:`pack` does not make."""
        since, num, *lists = raw
        steps, left, empty = (tuple(map(int, each)) for each in lists)
        ends = LoopEnds(int(since), int(num), steps, left, empty)
        if len(ends.steps) != min(ends.num, NUM_ENDS_KEPT):
            raise ValueError(f"{num} loops with {len(ends.steps)} ends")
        return ends

    def pack(self) -> list[Any]:
        return [self.since, self.num, list(self.steps), list(self.left), list(self.empty)]

    def end_of(self, loop: int) -> int:
        """The step after which loop ``loop`` (they count from 1) has ended; -1: it has not, or long ago."""
        index = loop - 1 - (self.num - len(self.steps))
        return self.steps[index] if 0 <= index < len(self.steps) else -1

    def loop_of(self, step: int) -> int:
        """In which loop ``step`` was committed; 0: long ago."""
        num_ended = self.num - sum(end >= step for end in self.steps)
        return 0 if self.num > len(self.steps) and num_ended == self.num - len(self.steps) else num_ended + 1

    def ended(self, loop: int, step: int, *, left: bool = False) -> LoopEnds:
        """Loop ``loop`` has ended after ``step``, and those after it are still to come."""
        later = () if step > self.end_of(loop - 1) else self.empty
        later = later or tuple(each for each in self.empty if each > loop)
        return self._first(loop - 1)._appended(step, left=left)._replace(empty=later)

    def resumed(self, epoch: int, step: int) -> LoopEnds:
        """A round has resumed the state after ``step``: only the loops before it have ended, and perhaps its own."""
        before = self._first(self.loop_of(step) - 1)
        if step in self.steps:
            before = before._appended(step, left=step in self.left)._replace(empty=self.empty)
        return before._replace(since=epoch)

    def with_empty(self, epoch: int, loop: int) -> LoopEnds:
        """A round has found that ``loop`` comes to no step: it is to be over as soon as it begins again."""
        return self._replace(since=epoch, empty=(*self.empty, loop))

    def _first(self, num: int) -> LoopEnds:
        steps = self.steps[: max(0, len(self.steps) - (self.num - num))]
        return LoopEnds(self.since, num, steps, tuple(step for step in self.left if step in steps))

    def _appended(self, step: int, *, left: bool) -> LoopEnds:
        steps = (*self.steps, step)[-NUM_ENDS_KEPT:]
        known = {*self.left, *([step] if left else [])}
        return LoopEnds(self.since, self.num + 1, steps, tuple(sorted(known.intersection(steps))))


NO_ENDS = LoopEnds()


class Part(NamedTuple):
    """What one slot holds of a version.

    ``own`` parts: the leaves that only one rank has, or that no rank on another node has (``members`` is that rank).
    ``shared`` parts: one of ``num_pieces`` pieces of the leaves that all of ``members`` hold alike, on one of their
    nodes; the members on a node divide them, so that each node has them once.
    """

    kind: str
    members: tuple[int, ...]
    piece: int
    num_pieces: int

    @staticmethod
    def own(rank: int) -> Part:
        return Part("own", (rank,), 0, 1)

    @staticmethod
    def shared(members: tuple[int, ...], piece: int, num_pieces: int) -> Part:
        return Part("shared", members, piece, num_pieces)

    @staticmethod
    def unpack(raw: list[Any]) -> Part:
        kind, members, piece, num_pieces = raw
        return Part(kind, tuple(members), piece, num_pieces)

    def __str__(self) -> str:
        if self.kind == "own":
            return f"shard {self.members[0]}"
        return f"piece {self.piece + 1} of {self.num_pieces} of what ranks {', '.join(map(str, self.members))} share"


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What is known about one slot of one node's vault."""

    node: str
    slot: int
    part: Part
    version: Version | None  # None: never completed, or being written when its writer died
    num_bytes: int
    digest: str
    num_shared_sets: int  # of an own part: how many sets of shared leaves complete this rank's state
    balance: int = 0  # of an own part: the sum over all ranks is 0 where what they share is alike (see sampling.py)

    def pack(self) -> list[Any]:
        version = list(self.version) if self.version else None
        rest = [self.num_bytes, self.digest, self.num_shared_sets, self.balance]
        return [self.node, self.slot, list(self.part), version, *rest]

    @staticmethod
    def unpack(raw: list[Any]) -> SlotRecord:
        node, slot, part, version, *rest = raw
        return SlotRecord(node, slot, Part.unpack(part), Version(*version) if version else None, *rest)


class Start:
    """How the workers of a round begin."""

    FRESH = "fresh"  # no state anywhere: everybody starts the script connected
    IN_PLACE = "in_place"  # survivors stay in their process, newcomers join alone and pull
    RESTART = "restart"  # everybody starts the script again, connected, and resumes from the vaults
    RERUN = "rerun"  # survivors call their function again, newcomers start the script, all connected


@dataclass(frozen=True, slots=True)
class Worker:
    """Where one rank of a round lives."""

    rank: int
    local_rank: int
    node: str
    host: str  # numeric address of the node, for data connections


@dataclass(frozen=True, slots=True)
class RoundInfo:
    """What a worker is told about a round: who has which rank, and how to begin."""

    run_id: str
    nonce: str
    epoch: int
    start: str
    reason: str
    workers: tuple[Worker, ...]
    progress: int = -1  # newest step that anybody is known to have committed, also of the nodes that are gone
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False)  # of the nodes that have some
    ends: LoopEnds = NO_ENDS  # as known when the view was decided

    @property
    def world_size(self) -> int:
        return len(self.workers)

    def node_of(self, rank: int) -> str:
        return self.workers[rank].node

    def pack(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "nonce": self.nonce,
            "epoch": self.epoch,
            "start": self.start,
            "reason": self.reason,
            "workers": [[w.rank, w.local_rank, w.node, w.host] for w in self.workers],
            "progress": self.progress,
            "labels": {node: dict(labels) for node, labels in self.labels.items()},
            "ends": self.ends.pack(),
        }

    @staticmethod
    def unpack(raw: dict[str, Any]) -> RoundInfo:
        return RoundInfo(
            raw["run_id"],
            raw["nonce"],
            raw["epoch"],
            raw["start"],
            raw["reason"],
            tuple(Worker(*w) for w in raw["workers"]),
            raw["progress"],
            raw["labels"],
            LoopEnds.unpack(raw["ends"]),
        )
