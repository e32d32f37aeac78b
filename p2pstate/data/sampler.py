"""Batches of indices for one rank: an order, divided over ranks, with a position that can be saved and set.

In: an ``Order`` and a ``Split``. Out: lists of indices, as ``batch_sampler=`` of any DataLoader takes them.
Invariant: the position is (epoch, global samples); what comes next is a function of it alone.
Known limit: iterating counts what was *drawn*, and torch's DataLoader with worker processes draws ahead of what it
delivers. ``Loader`` does not iterate: it asks for batches by position, and sets the position to what it delivered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from p2pstate.data.order import Order
from p2pstate.data.split import Split

__all__ = ["Sampler"]

POSITION_KEYS = {"order", "epoch", "samples"}

Drawn = tuple[NDArray[np.int64], NDArray[np.int64], int]  # indices, passes over their sources, samples done behind it


class Sampler(torch.utils.data.Sampler[list[int]]):
    """One rank's batches of an epoch.

    Args:
        order: ``Shuffled`` or ``Mixture``; the same on every rank.
        batch_size: samples per batch and rank.
        rank, num_ranks: this rank's place. A position saved with another ``num_ranks`` or ``batch_size`` is taken up
            where all ranks together had come to.
        tail: what becomes of an incomplete last batch, see ``Split``.
    """

    def __init__(self, order: Order, batch_size: int, *, rank: int = 0, num_ranks: int = 1, tail: str = "drop") -> None:
        self.order = order
        self.split = Split(order.num_samples, batch_size, rank, num_ranks, tail)
        self.epoch = 0
        self.num_done = 0  # samples that all ranks together have had in this epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` with the next iteration."""
        if epoch < 0:
            raise ValueError(f"epoch {epoch}: epochs count from 0")
        self.epoch, self.num_done = epoch, 0

    def batch(self, epoch: int, num_done: int) -> tuple[list[int], list[int]] | None:
        """(indices, passes over their sources) of this rank's batch there; None at the epoch's end."""
        positions = self.split.positions(num_done)
        if positions is None:
            return None
        indices, passes = self.order.draw(epoch, positions)
        return indices.tolist(), passes.tolist()

    def batches(self, epoch: int, num_done: int, count: int) -> list[Drawn]:
        """The next ``count`` batches from there, or as many as the epoch has; in the time of one or two."""
        places: list[NDArray[np.int64]] = []
        afters: list[int] = []
        while len(places) < count and (positions := self.split.positions(num_done)) is not None:
            num_done = self.split.after(num_done)
            places.append(positions)
            afters.append(num_done)
        if not places:
            return []
        ends = np.cumsum([len(positions) for positions in places])[:-1]
        indices, passes = self.order.draw(epoch, np.concatenate(places))
        return list(zip(np.split(indices, ends), np.split(passes, ends), afters, strict=True))

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of this epoch; the iteration after that gives the next epoch."""
        while (found := self.batch(self.epoch, self.num_done)) is not None:
            self.num_done = self.split.after(self.num_done)
            yield found[0]
        self.set_epoch(self.epoch + 1)

    def __len__(self) -> int:
        return self.split.num_batches()

    def state_dict(self) -> dict[str, Any]:
        """The position, counted in samples of all ranks together, so that another number of ranks can take it up."""
        return {"order": self.order.identity, "epoch": self.epoch, "samples": self.num_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError as ``check`` does."""
        self.check(state)
        self.epoch, self.num_done = state["epoch"], state["samples"]

    def check(self, state: dict[str, Any]) -> None:
        """Raises ValueError for what is no position, and for one in another order: it means other samples here."""
        missing = POSITION_KEYS - set(state) if isinstance(state, Mapping) else POSITION_KEYS
        if missing:
            raise ValueError(f"{state!r:.100} is no position of a Sampler: {', '.join(sorted(missing))} is missing")
        if state["order"] != self.order.identity:
            raise ValueError(
                f"the saved position counts through {state['order']}; this sampler goes through {self.order.identity}: "
                "samples would be lost or repeated. Give it the same data, weights and seed"
            )
        if state["epoch"] < 0 or not 0 <= state["samples"] <= self.order.num_samples:
            raise ValueError(
                f"the saved position is damaged: sample {state['samples']} of epoch {state['epoch']}, in an order of "
                f"{self.order.num_samples} samples"
            )
