"""Leaves into a flat region and the digest of its bytes, in one pass over memory.

In: a layout, live tensors that fit it. Out: their bytes in a region, and in a hasher. A piece is hashed right after it
was copied, while it is in the cache of the core that copied it: together they take a fifth less processor time than
one after the other.

Invariant: the hasher gets every byte of the layout once and in order, also those between leaves.
Known limit: a large leaf that is not contiguous is copied whole, and hashed from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import xxhash

from p2pstate.state.layout import MAX_KEPT_REGIONS, Layout

__all__ = ["PIECE_BYTES", "HashedCopy"]

PIECE_BYTES = 1 << 20  # as much as stays in a core's cache; of smaller ones each costs a call


class _Piece(NamedTuple):
    """Bytes of one leaf, or all of it."""

    entry: int
    begin: int
    end: int
    is_whole: bool


class HashedCopy:
    """Of ``sources``, in the layout's order. They must keep their memory: it is looked at once."""

    def __init__(self, layout: Layout, sources: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self._batches = _batches(layout, sources)
        self._sources = [[_of_source(piece, sources) for piece in batch] for batch in self._batches]
        entries = layout.entries
        firsts = [entries[batch[0].entry].offset_bytes + batch[0].begin for batch in self._batches]
        self._ends = [*firsts[1:], layout.num_bytes] if firsts else []
        self._targets: dict[tuple[int, int], list[list[torch.Tensor]]] = {}

    def write(self, region: torch.Tensor, hasher: xxhash.xxh3_128) -> None:
        """``region``: 1-D uint8, of the layout's size at least."""
        body = memoryview(region.numpy())  # type: ignore[arg-type]
        begin = 0
        with torch.no_grad():
            for targets, sources, end in zip(self._targets_in(region), self._sources, self._ends, strict=True):
                torch._foreach_copy_(targets, sources)
                hasher.update(body[begin:end])
                begin = end

    def _targets_in(self, region: torch.Tensor) -> list[list[torch.Tensor]]:
        key = (region.data_ptr(), region.numel())
        targets = self._targets.get(key)
        if targets is None:
            if len(self._targets) >= MAX_KEPT_REGIONS:
                self._targets.pop(next(iter(self._targets)))
            places = self._layout.places(region)
            targets = [[self._place(piece, places, region) for piece in batch] for batch in self._batches]
            self._targets[key] = targets
        return targets

    def _place(self, piece: _Piece, places: Sequence[torch.Tensor], region: torch.Tensor) -> torch.Tensor:
        if piece.is_whole:
            return places[piece.entry]
        offset = self._layout.entries[piece.entry].offset_bytes
        return region[offset + piece.begin : offset + piece.end].view(places[piece.entry].dtype)


def _batches(layout: Layout, sources: Sequence[torch.Tensor]) -> list[list[_Piece]]:
    """What is copied before it is hashed: about ``PIECE_BYTES`` at a time."""
    batches: list[list[_Piece]] = []
    room = 0
    for number, (entry, source) in enumerate(zip(layout.entries, sources, strict=True)):
        size = entry.num_bytes
        divided = size > PIECE_BYTES and source.is_contiguous() and not (source.is_conj() or source.is_neg())
        for begin in range(0, size, PIECE_BYTES) if divided else (0,):
            end = min(begin + PIECE_BYTES, size) if divided else size
            if end - begin > room or not batches:
                batches.append([])
                room = PIECE_BYTES
            batches[-1].append(_Piece(number, begin, end, not divided))
            room -= end - begin
    return batches


def _of_source(piece: _Piece, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    source = sources[piece.entry]
    if piece.is_whole:
        return source
    item_bytes = source.element_size()
    return source.detach().view(-1)[piece.begin // item_bytes : piece.end // item_bytes]
