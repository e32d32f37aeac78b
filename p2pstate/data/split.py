"""Which positions of an epoch are this rank's next batch, and what happens at the epoch's end.

In: a global position, that is, how many samples all ranks together have had in this epoch. Out: the positions of one
rank's batch from there, and where the next one starts. Because nothing else is remembered, any number of ranks goes on
from where any other number stopped.

Invariants: batches of all ranks from one global position are disjoint; together they are the next
``batch_size * num_ranks`` positions, rank r having every ``num_ranks``-th from the r-th on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["TAILS", "Split"]

TAILS = ("drop", "pad", "uneven")


@dataclass(frozen=True, slots=True)
class Split:
    """One rank's share of an epoch.

    ``tail`` says what becomes of the positions that do not fill a batch on every rank: ``drop`` leaves them out,
    ``pad`` fills up with samples from the epoch's beginning, ``uneven`` gives some ranks a smaller last batch or none.
    """

    num_samples: int
    batch_size: int
    rank: int = 0
    num_ranks: int = 1
    tail: str = "drop"

    def __post_init__(self) -> None:
        for name in ("num_samples", "batch_size", "rank", "num_ranks"):
            if not isinstance(getattr(self, name), int | np.integer):
                raise ValueError(f"{name}={getattr(self, name)!r}: give a whole number")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: a batch has at least one sample")
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank {self.rank} of {self.num_ranks} ranks: ranks count from 0")
        if self.tail not in TAILS:
            raise ValueError(f"tail={self.tail!r}: choose one of {', '.join(TAILS)}")
        if self.tail == "drop" and self.num_samples < self.global_batch:
            raise ValueError(
                f"{self.num_samples} samples do not fill one batch of {self.batch_size} on each of {self.num_ranks} "
                "ranks, and tail='drop' leaves the rest out: choose tail='pad' or 'uneven', or smaller batches"
            )

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.num_ranks

    def positions(self, start: int) -> NDArray[np.int64] | None:
        """This rank's batch from the global position ``start``; None when there is none any more in this epoch."""
        end = start + self.global_batch
        if end > self.num_samples and self.tail == "drop":
            return None
        if start >= self.num_samples:
            return None
        positions = np.arange(start + self.rank, end, self.num_ranks, dtype=np.int64)
        if self.tail == "pad":
            return positions % self.num_samples
        return positions[positions < self.num_samples] if start + self.rank < self.num_samples else None

    def after(self, start: int) -> int:
        """The global position behind the batch that begins at ``start``."""
        return min(self.num_samples, start + self.global_batch)

    def num_batches(self, start: int = 0) -> int:
        """Batches of this rank from ``start`` to the epoch's end."""
        left = self.num_samples - start
        if self.tail == "drop":
            return left // self.global_batch
        if self.tail == "uneven":
            left -= self.rank
            return max(0, -(-left // self.global_batch))
        return -(-left // self.global_batch)
