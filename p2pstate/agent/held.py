"""A process that may hold a rank, as its agent sees it, whoever started it; and who can say which there are.

In: what the process says, what becomes of it. Out: :class:`RankProcess`, a record that its owner keeps;
:class:`RankProcesses`, what the watchdog, the status and others need of the owner.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rendezvous.channel import Channel

__all__ = ["Held", "Phase", "RankProcess", "RankProcesses"]


class Phase(enum.Enum):
    """How far a worker is."""

    STARTING = "starting"  # forked, not ready yet
    SPARE = "spare"  # ready, without a rank
    FRESH = "fresh"  # runs the script connected, has not reached its loop
    REHEARSING = "rehearsing"  # runs the script alone, or has, under a rank that another process still holds
    ALONE = "alone"  # runs the script alone, has not joined yet
    LOOP = "loop"  # in its training loop
    RERUN = "rerun"  # in a function that can be called again
    DONE = "done"  # has left its training loop at the agreed step
    FINISHED = "finished"  # its script ended well


@dataclass(slots=True, eq=False)
class RankProcess:
    pid: int
    channel: Channel
    phase: Phase = Phase.STARTING
    rank: int | None = None
    epoch: int = 0  # the newest round it was told
    step: int = -1  # newest committed step that it told of, and when
    protected: int | None = None
    told_at: float | None = None  # monotonic seconds
    page: memoryview | None = None  # what it does (see trace.py); None without a rank
    hung: str = ""  # why it is being ended
    ended: bool = False


Held = TypeVar("Held", bound=RankProcess)


class RankProcesses(Protocol[Held]):
    def assigned(self) -> Sequence[Held]:
        """Those that have a rank."""

    def of_rank(self, rank: int) -> Held | None:
        """The process that has this rank and was not reaped yet."""

    def note(self, worker: Held, text: str) -> None:
        """Write something about a worker where its own output goes, or where a person finds it."""

    def signal(self, worker: Held, number: int) -> None:
        """Send a signal to the worker alone."""

    def kill(self, worker: Held) -> None:
        """SIGKILL."""
