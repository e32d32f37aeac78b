"""The bytes of an image that are in no slot: read piece by piece from the live tensors, while nobody changes them.

In: a layout, its live leaves, a tail, how often all of it will be read. Out: something with a length and slices, as a
memoryview has, for a transport to send.

Invariants: the live tensors are read only until :meth:`LiveBody.settle` returns; who has not read all by then reads on
from a copy that is made there. So whatever is sent is of one instant.
Known limits: a piece is copied once more than from a slot; tensors that are not contiguous are copied whole before.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from p2pstate.state import Layout, Leaf

__all__ = ["LiveBody", "flat_bytes", "live_memory_of", "memory_of"]

_POLL_S = 0.02


class LiveBody:
    """``num_readers``: how many times every byte is read."""

    def __init__(self, layout: Layout, leaves: Sequence[Leaf], tail: bytes, num_readers: int) -> None:
        self._layout = layout
        self._leaves = list(leaves)
        self._tail = tail
        self._sources = [
            (entry.offset_bytes, flat_bytes(leaf.tensor)) for entry, leaf in zip(layout.entries, leaves, strict=True)
        ]
        self._sources.append((layout.num_bytes, torch.frombuffer(bytearray(tail), dtype=torch.uint8)))
        self._num_unread_bytes = num_readers * len(self)
        self._changed = threading.Condition()
        self._over = False
        self._copy: memoryview | None = None

    def __len__(self) -> int:
        return self._layout.num_bytes + len(self._tail)

    def __getitem__(self, at: slice) -> memoryview:
        start, stop, _ = at.indices(len(self))
        with self._changed:
            piece = self._read(start, stop) if self._copy is None else self._copy[start:stop]
            self._num_unread_bytes -= stop - start
            self._changed.notify_all()
            return piece

    def give_up(self) -> None:
        """Nobody will read any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def settle(self, patience_s: float, is_over: Callable[[], bool]) -> bool:
        """Wait until all was read, but not for long; from then on the live tensors may change.

        False when a copy had to be made for readers that are slow: memory for the whole image, until they are done.
        """
        deadline = time.monotonic() + patience_s
        with self._changed:
            while self._is_wanted() and time.monotonic() < deadline and not is_over():
                self._changed.wait(_POLL_S)
            wanted = self._is_wanted()
            if wanted:
                copy = torch.empty(len(self), dtype=torch.uint8)
                self._layout.write(self._leaves, copy[: self._layout.num_bytes])
                self._layout.release()
                copy[self._layout.num_bytes :] = self._sources[-1][1]
                self._copy = memory_of(copy)
            self._leaves.clear()
            self._sources.clear()
            return not wanted

    def _is_wanted(self) -> bool:
        return self._num_unread_bytes > 0 and not self._over

    def _read(self, start: int, stop: int) -> memoryview:
        piece, done = torch.empty(stop - start, dtype=torch.uint8), start
        first = bisect.bisect_right(self._sources, start, key=lambda source: source[0]) - 1
        for offset, flat in self._sources[max(0, first) :]:
            begin, end = max(start, offset), min(stop, offset + flat.numel())
            if offset >= stop:
                break
            if begin < end:
                piece[done - start : begin - start].zero_()  # what is between two leaves
                piece[begin - start : end - start].copy_(flat[begin - offset : end - offset])
                done = end
        piece[done - start :].zero_()
        return memory_of(piece)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, 1-D; aliases the tensor where that is contiguous."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Of a 1-D uint8 tensor in host memory."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def live_memory_of(tensor: torch.Tensor) -> memoryview:
    """The same, to be read, of a tensor that is others' to resize: ``numpy()`` forbids that from then on."""
    return memoryview(np.from_dlpack(tensor))  # type: ignore[arg-type]
