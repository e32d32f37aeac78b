"""A map-style data set over token files: windows of fixed length, with the documents in them if those are known.

In: token files (see ``shards.py``); for documents, the .ends.npy files that ``p2pstate data pack`` writes. Out: samples
for a loader. Opening costs the same for any size; nothing is kept of what was read.
Invariants: every window is a function of its index; the state says which files it was counted in, and a restored state
of other files is refused by name.
Known limit: with ``documents=True`` the ends of all documents are kept in memory, 8 bytes each.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray

from p2pstate.data.files import DataChanged, Files
from p2pstate.data.shards import Shards, ends_of

__all__ = ["MmapTokens"]

MARK_DIGITS = 8  # of each file's fingerprint, in a saved position


class MmapTokens(torch.utils.data.Dataset[Any]):
    """Windows of ``length`` tokens, ``stride`` apart, of all files one after the other; what is left over at the end
    is in no window.

    A sample is an int64 tensor of shape (length,). With ``documents=True`` it is a dictionary of ``tokens``,
    ``documents`` (int64, which document of the window a token belongs to, from 0) and ``positions`` (int64, its place
    within its document), from which attention that stays within documents is made.

    Args:
        paths: .bin files (``dtype`` says of what, unless they were packed) or .npy files; one, or a list.
        length: tokens per window; one more than the context length gives inputs and targets.
        stride: from window to window; ``length`` if not given.
        files: ``CachedFiles``, for paths that are URLs.

    Raises:
        ValueError: the files are no token files, or hold less than one window.
        DataChanged: a file is not what it was when it was packed, or, while reading, when it was opened.
    """

    draws_random = False  # a Loader need not seed random streams for its samples

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        length: int,
        stride: int | None = None,
        dtype: str | None = None,
        documents: bool = False,
        files: Files | None = None,
    ) -> None:
        for count in (length, length if stride is None else stride):
            if not isinstance(count, int | np.integer) or count < 1:
                raise ValueError(f"length={length!r}, stride={stride!r}: both count tokens, from 1")
        self._shards = Shards(paths, dtype=dtype, files=files)
        self._length, self._stride = length, stride or length
        self._ends = _Ends(self._shards) if documents else None
        self.num_tokens = self._shards.num_tokens
        self._num_windows = max(0, (self.num_tokens - length) // self._stride + 1)
        if self._num_windows == 0:
            raise ValueError(f"{self.num_tokens} tokens are less than one window of {length}")

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._num_windows:
            raise IndexError(f"window {index}: there are {self._num_windows}")
        start = index * self._stride
        tokens = torch.from_numpy(self._shards.read(start, self._length).astype(np.int64))
        if self._ends is None:
            return tokens
        bounds = self._ends.around(start, start + self._length)
        places = np.arange(start, start + self._length)
        numbers = np.searchsorted(bounds, places, side="right") - 1
        return {
            "tokens": tokens,
            "documents": torch.from_numpy(numbers),
            "positions": torch.from_numpy(places - bounds[numbers]),
        }

    def prefetch(self, indices: Sequence[int]) -> None:
        """Begin to fetch the files that hold these windows; a Loader says so of batches that will be asked for."""
        self._shards.prefetch(index * self._stride for index in indices)

    def check_all(self) -> None:
        """Read every byte of packed files and compare: DataChanged names the first file that is not as it was."""
        self._shards.check_all()

    def state_dict(self) -> dict[str, Any]:
        """Which data this is: the windows, and a mark of each file. Small: 4 bytes per file."""
        marks = "".join(mark[:MARK_DIGITS] for mark in self._shards.fingerprints)
        return {"length": self._length, "stride": self._stride, "marks": bytes.fromhex(marks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compares. ValueError for other windows, DataChanged naming the first file that differs."""
        mine = self.state_dict()
        for key in ("length", "stride"):
            if state[key] != mine[key]:
                raise ValueError(f"the saved position counts windows of {key} {state[key]}; here {key}={mine[key]}")
        if len(state["marks"]) != len(mine["marks"]):
            count, now = (len(each["marks"]) * 2 // MARK_DIGITS for each in (state, mine))
            raise DataChanged(f"the saved position was counted in {count} token files, and now there are {now}")
        step = MARK_DIGITS // 2
        for number, path in enumerate(self._shards.paths):
            here = slice(number * step, (number + 1) * step)
            if state["marks"][here] != mine["marks"][here]:
                raise DataChanged(
                    f"{path} is not the file in which the saved position was counted: its size or content differs; "
                    "restore it, or begin a new run on the changed data"
                )


class _Ends:
    """Where documents end, over all files."""

    def __init__(self, shards: Shards) -> None:
        self._file_ends = shards.ends
        self._files: list[NDArray[Any]] = []
        for number, path in enumerate(shards.paths):
            ends = shards.document_ends(number)
            if ends is None:
                raise ValueError(f"{path}: documents=True needs {ends_of(path)} beside it (p2pstate data pack)")
            self._files.append(ends)

    def around(self, start: int, end: int) -> NDArray[np.int64]:
        """Where each document that has tokens in [start, end) begins. A document never goes on in the next file."""
        found: list[int] = []
        first_token = 0
        for ends, file_end in zip(self._files, self._file_ends, strict=True):
            if first_token < end and start < file_end:
                low = int(np.searchsorted(ends, start - first_token, side="right")) if start > first_token else 0
                high = int(np.searchsorted(ends, end - first_token, side="left"))
                begins = [0 if low == 0 else int(ends[low - 1]), *(int(each) for each in ends[low:high])]
                found += [first_token + each for each in begins if first_token + each < min(end, file_end)]
            first_token = file_end
        return np.asarray(found, dtype=np.int64)
