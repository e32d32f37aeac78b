"""Whether ranks are still alike in what they hold alike, seen in every version: by a sample of it, and one number.

In: the leaves that sets of ranks hold alike. Out: this rank's *balance*: the lowest rank of each set adds a hash of its
sample once for every other member, and each of them takes its own away. So the sum over all ranks is 0 where the
samples of every set are the same, and (but for one chance in 2 ** 40) nowhere else; it travels with the gate's votes,
and with each shard, so that neither a vote nor a recovery takes a version in which ranks had begun to train apart.

Invariants: the sample is of the same elements on every rank, however a tensor is strided there; what is kept aliases
live memory, so a balance is always of what the leaves hold now.
Known limits: some elements of at most ``MAX_LEAVES`` leaves of a set are looked at, which is enough for training apart
and too little for single flipped bits (replicas.py); leaves on a card are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import xxhash

from p2pstate.live_body import live_memory_of
from p2pstate.state import Leaf

__all__ = ["MAX_LEAVES", "Sample"]

MAX_LEAVES = 256  # of a set
NUM_ELEMENTS = 16  # of a leaf, from its middle
_MASK = (1 << 40) - 1  # sums over all ranks stay below 63 bits


class Sample:
    """``shared``: of each set of ranks that ``rank`` is in, what they hold alike, by the members in order."""

    def __init__(self, rank: int, shared: Mapping[tuple[int, ...], Sequence[Leaf]]) -> None:
        self._sets = [
            (len(members) - 1 if members[0] == rank else -1, [*_views(leaves)]) for members, leaves in shared.items()
        ]

    def balance(self) -> int:
        total = 0
        for weight, views in self._sets:
            hasher = xxhash.xxh3_64()
            for view in views:
                hasher.update(view)
            total += weight * (hasher.intdigest() & _MASK)
        return total


def _views(leaves: Sequence[Leaf]) -> Iterator[memoryview]:
    """The live memory of the sample."""
    for leaf in leaves[:: -(-len(leaves) // MAX_LEAVES)]:
        tensor = leaf.tensor
        if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
            continue
        start = max(0, (tensor.numel() - NUM_ELEMENTS) // 2)
        stop = min(tensor.numel(), start + NUM_ELEMENTS)
        if tensor.is_contiguous():
            yield live_memory_of(tensor.view(-1)[start:stop].view(torch.uint8))
            continue
        for number in range(start, stop):
            at: list[int] = []
            for size in reversed(tensor.shape):
                number, position = divmod(number, size)
                at.append(position)
            yield live_memory_of(tensor[tuple(reversed(at))].view(1).view(torch.uint8))
