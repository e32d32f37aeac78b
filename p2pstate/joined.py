"""The joining of a round: one attempt, and how it ends: joined, to be tried again, to be started over, or lost.

In: the round, and this process in it; what is known at the end. Out: values and exceptions that recover.py and
rounds.py speak in, and the last meeting of all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError, ReduceOp

from p2pstate.errors import P2PStateError, Retryable
from p2pstate.groups.registry import Registry
from p2pstate.groups.waiting import wait_collective
from p2pstate.observe.meter import METER
from p2pstate.plan_recovery import RankReport, StartOver
from p2pstate.state import TrainingState
from p2pstate.trace import Row
from p2pstate.types import NO_ENDS, LoopEnds, RoundInfo, Version
from p2pstate.worker.link import Link

__all__ = ["ROUND_FAILED", "Attempt", "Joined", "LostError", "MustStartOver", "OtherLoop", "Phases", "all_done"]

ROUND_FAILED = (Retryable, DistStoreError, RuntimeError)  # what recover.join raises when another round has to be joined


class LostError(P2PStateError):
    """The plan says that some part of the state is gone."""


class MustStartOver(Retryable):
    """The plan says that all workers have to begin again. ``ends``: what they have to know of the training loops."""

    def __init__(self, decision: StartOver, ends: LoopEnds = NO_ENDS) -> None:
        super().__init__(decision.reason)
        self.decision, self.ends = decision, ends


class OtherLoop(Retryable):
    """The state to resume is of a later training loop of the script: go there first. ``together``: all ranks do, over
    the connections of this round."""

    def __init__(self, loop: int, ends: LoopEnds, *, together: bool = False) -> None:
        super().__init__(f"the others are in training loop {loop}")
        self.loop, self.ends, self.together = loop, ends, together


@dataclass(slots=True)
class Phases:
    """Seconds spent in each phase of one recovery, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            with METER.inside("recovery." + name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


@dataclass(slots=True)
class Attempt:
    """This process, with the state ``state``, on its way into round ``info``. ``report``: what it says of itself;
    ``phases``, ``row``: how far it is, for the record and for its agent to read; ``num_moves``: how often all ranks
    have moved on to another training loop in this round. ``store``: what the ranks tell each other, since then."""

    info: RoundInfo
    link: Link
    registry: Registry
    state: TrainingState
    report: RankReport
    phases: Phases
    row: Row
    num_moves: int = 0
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        assert self.registry.make_store is not None
        self.store = self.registry.make_store(self.info.epoch)
        if self.num_moves:
            self.store = PrefixStore(f"moved/{self.num_moves}", self.store)

    def is_over(self) -> bool:
        """The round was given up meanwhile."""
        return self.link.is_aborted(self.info.epoch)


@dataclass(frozen=True, slots=True)
class Joined:
    """``keep``: the version whose slots stay until the resumed state is protected; ``source``: survivor, own vault,
    replicas, buddy or disk; ``num_bytes``: what came over the network."""

    version: Version
    keep: Version
    steps_lost: int
    source: str
    num_bytes: int
    reason: str
    end_step: int | None  # all ranks end here, because the data of one did, or all had left here
    ends: LoopEnds  # of the loops before
    lean: bool = False
    sizes_of_all: list[tuple[int, int]] = field(default_factory=list)  # see Asked
    replicas: list[Any] = field(default_factory=list)  # of each survivor
    num_batches: int = 0  # that must be behind all ranks: what comes before is not trained with again


def all_done(registry: Registry, is_over: Callable[[], bool]) -> None:
    """Wait until every rank has come so far."""
    assert registry.gate is not None
    done = torch.ones(1, dtype=torch.int64)
    wait_collective(registry.gate.group.allreduce([done], ReduceOp.MIN), is_over)
