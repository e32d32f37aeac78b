"""Which sample comes when: a pure function of (seed, epoch, position), for one source or a weighted mixture.

In: sizes, weights, a seed. Out: for positions of an epoch, the indices of their samples, and for each sample the pass
over its source that it belongs to (which seeds its augmentation).

Invariants: memory and time do not depend on the position; within one pass over a source each of its samples comes
exactly once. Positions are global: how they are divided over ranks is ``split.py``'s subject.
Known limit: the weights of a mixture are met exactly in every block of ``BLOCK`` draws, in multiples of 1 / BLOCK.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from p2pstate.data.permutation import Permutation, hash_words

__all__ = ["BLOCK", "Mixture", "Order", "Shuffled"]

BLOCK = 1024  # draws of a mixture after which every source has had exactly its share
MAX_CACHED_PERMUTATIONS = 8
Positions = NDArray[np.int64]


class Order(Protocol):
    """What a sampler draws from."""

    @property
    def num_samples(self) -> int:
        """Draws in one epoch."""

    @property
    def identity(self) -> str:
        """Equal for orders that give the same draws; part of a saved position."""

    def draw(self, epoch: int, positions: Positions) -> tuple[Positions, Positions]:
        """(indices, passes over the source), for positions below ``num_samples``."""


class Shuffled:
    """Each of ``num_samples`` samples once per epoch, in an order of each epoch's own (or always 0, 1, 2, ...)."""

    def __init__(self, num_samples: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if num_samples < 1:
            raise ValueError("an order needs at least one sample; the data set is empty")
        self.num_samples = operator.index(num_samples)
        self._seed, self._shuffle = seed, shuffle
        self._permutations: dict[int, Permutation] = {}

    @property
    def identity(self) -> str:
        """Equal for orders that give the same draws; part of a saved position."""
        return f"{self.num_samples} samples, " + (f"seed {self._seed}" if self._shuffle else "not shuffled")

    def draw(self, epoch: int, positions: Positions) -> tuple[Positions, Positions]:
        """``positions``, [n] int64 below ``num_samples`` -> (sample indices, the epoch of each), both [n] int64."""
        passes = np.full(len(positions), epoch, dtype=np.int64)
        return self.at(epoch, positions), passes

    def at(self, epoch: int, positions: Positions) -> Positions:
        """The sample indices at ``positions`` of an epoch, [n] int64."""
        if not self._shuffle:
            return positions
        permutation = self._permutations.get(epoch)
        if permutation is None:
            while len(self._permutations) >= MAX_CACHED_PERMUTATIONS:
                del self._permutations[next(iter(self._permutations))]
            permutation = self._permutations[epoch] = Permutation(self.num_samples, self._seed, epoch)
        return permutation(positions)


class Mixture:
    """Draws from several sources in proportion to their weights, each source in passes of its own.

    Args:
        sizes: samples per source. Indices count through all sources in this order, as in torch's ConcatDataset.
        weights: one per source, in any scale.
        num_samples: draws that are called one epoch; the number of all samples if not given. A source's passes go on
            from epoch to epoch: a small source with a large weight comes several times, a large one is continued.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], *, num_samples: int | None = None, seed: int = 0
    ) -> None:
        if len(sizes) != len(weights) or not sizes:
            raise ValueError(f"{len(sizes)} sources and {len(weights)} weights: give one weight per source")
        if any(not 0 <= weight < math.inf for weight in weights) or sum(weights) <= 0:
            raise ValueError(f"weights {list(weights)}: none may be negative or infinite and one must be positive")
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
            if size < 1:
                raise ValueError(f"source {number} of weight {weight} has {size} samples: leave it out of the mixture")
        self.num_samples = sum(sizes) if num_samples is None else num_samples
        if self.num_samples < 1:
            raise ValueError(f"num_samples={self.num_samples}: an epoch needs at least one draw")
        self._seed = seed
        self._shares = _shares(weights)
        for number, (share, weight) in enumerate(zip(self._shares, weights, strict=True)):
            if weight > 0 and share == 0:
                raise ValueError(
                    f"source {number} has weight {weight} of {sum(weights)}: less than one draw in {BLOCK}; "
                    "raise it, or leave the source out"
                )
        self._sources = [
            Shuffled(size, seed=hash_words("source", seed, number)[0]) for number, size in enumerate(sizes)
        ]
        self._offsets = np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))[:-1]])
        # a block before it is put in its own order: source of each place, and how many of that source came before
        self._plain = np.repeat(np.arange(len(sizes), dtype=np.int64), self._shares)
        self._block: tuple[int, Positions, Positions] | None = None

    @property
    def identity(self) -> str:
        """Equal for mixtures that give the same draws; part of a saved position."""
        sizes = [source.num_samples for source in self._sources]
        return f"a mixture of {sizes} in shares {self._shares}, {self.num_samples} samples, seed {self._seed}"

    def draw(self, epoch: int, positions: Positions) -> tuple[Positions, Positions]:
        """``positions``, [n] int64 below ``num_samples`` -> (sample indices, counted through all sources; how often the
        source of each was gone through before), both [n] int64."""
        indices, passes = np.empty_like(positions), np.empty_like(positions)
        blocks, places = np.divmod(positions + epoch * self.num_samples, BLOCK)
        for block in np.unique(blocks):
            here = np.flatnonzero(blocks == block)
            sources, earlier = self._block_order(int(block))
            of_source = sources[places[here]]
            turns = earlier[places[here]] + int(block) * np.asarray(self._shares)[of_source]
            for number in np.unique(of_source):
                source = self._sources[number]
                mine = of_source == number
                source_passes, source_positions = np.divmod(turns[mine], source.num_samples)
                for each in np.unique(source_passes):
                    now = source_passes == each
                    places_now = here[mine][now]
                    indices[places_now] = source.at(int(each), source_positions[now]) + self._offsets[number]
                    passes[places_now] = each
        return indices, passes

    def _block_order(self, block: int) -> tuple[Positions, Positions]:
        if self._block is None or self._block[0] != block:
            order = Permutation(BLOCK, hash_words("block", self._seed)[0], block)(np.arange(BLOCK))
            sources = self._plain[order]
            earlier = np.empty(BLOCK, dtype=np.int64)
            for number, share in enumerate(self._shares):
                earlier[sources == number] = np.arange(share)
            self._block = (block, sources, earlier)
        return self._block[1], self._block[2]


def _shares(weights: Sequence[float]) -> list[int]:
    """Draws per block: the largest remainders get what rounding down leaves over."""
    exact = [weight * BLOCK / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda number: (shares[number] - exact[number], number))
    for number in by_remainder[: BLOCK - sum(shares)]:
        shares[number] += 1
    return shares
