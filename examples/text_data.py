"""Real text that is on every machine: the source files of Python's standard library, as bytes.

In: the library's folder. Out: batches of windows of one logical byte stream (the files in sorted order, one after the
other). Files are memory-mapped when first touched, so opening reads no text. The order of windows is a pure function of
(seed, epoch, position), disjoint over ranks; nothing here draws from a global random generator.
"""

import bisect
import itertools
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class StdlibText:
    """The stream. `read(start, length)` copies bytes out of the maps; `num_bytes` is its length."""

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or Path(sysconfig.get_path("stdlib"))
        self._paths: list[Path] = []
        sizes: list[int] = []
        for parent, folders, names in os.walk(folder):
            folders[:] = sorted(set(folders) - LEFT_OUT)
            for name in sorted(names):
                path = Path(parent, name)
                if name.endswith(".py") and path.is_file() and path.stat().st_size > 0:
                    self._paths.append(path)
                    sizes.append(path.stat().st_size)
        if not sizes:
            raise ValueError(f"no Python source files below {folder}: this Python comes without its library's sources")
        self._ends = list(itertools.accumulate(sizes))
        self._maps: dict[int, NDArray[np.uint8]] = {}
        self.num_files = len(sizes)
        self.num_bytes = self._ends[-1]

    def _map(self, index: int) -> NDArray[np.uint8]:
        if index not in self._maps:
            self._maps[index] = np.memmap(self._paths[index], dtype=np.uint8, mode="r")
        return self._maps[index]

    def read(self, start: int, length: int) -> NDArray[np.uint8]:
        if not 0 <= start <= start + length <= self.num_bytes:
            raise ValueError(f"bytes {start} to {start + length} are not within the {self.num_bytes} bytes of the text")
        out = np.empty(length, dtype=np.uint8)
        index, filled = bisect.bisect_right(self._ends, start), 0
        while filled < length:
            offset = start + filled - (self._ends[index - 1] if index else 0)
            piece = self._map(index)[offset : offset + length - filled]
            out[filled : filled + len(piece)] = piece
            index, filled = index + 1, filled + len(piece)
        return out


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor  # (num_windows, context + 1) int64
    positions: list[int]  # byte of the stream at which each window starts
    number: int  # counts this rank's batches from 1, over all epochs


class TextLoader:
    """Endless batches of one rank. Iterating goes on after the last batch delivered, also after `load_state_dict`."""

    def __init__(
        self, text: StdlibText, *, context: int, batch: int, rank: int = 0, num_ranks: int = 1, seed: int = 0
    ) -> None:
        self._text, self._context, self._batch = text, context, batch
        self._rank, self._num_ranks, self._seed = rank, num_ranks, seed
        self._num_windows = (text.num_bytes - 1) // context
        self._per_epoch = self._num_windows // (batch * num_ranks)
        if self._per_epoch == 0:
            raise ValueError(f"{text.num_bytes} bytes of text are too few for {num_ranks} ranks x {batch} x {context}")
        self._order: tuple[int, NDArray[np.int64]] | None = None  # of the epoch last asked for
        self._delivered = 0

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self._seed, epoch)).permutation(self._num_windows))
        return self._order[1]

    def positions(self, number: int) -> list[int]:
        """Where the windows of this rank's batch `number` (from 1) start."""
        epoch, index = divmod(number - 1, self._per_epoch)
        first = (index * self._num_ranks + self._rank) * self._batch
        windows = self._epoch_order(epoch)[first : first + self._batch]
        return [int(window) * self._context for window in windows]

    def __iter__(self) -> Iterator[Batch]:
        while True:
            number = self._delivered + 1
            positions = self.positions(number)
            windows = np.stack([self._text.read(start, self._context + 1) for start in positions])
            self._delivered = number  # before the batch is handed out: the position means delivered
            yield Batch(torch.from_numpy(windows).long(), positions, number)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "num_ranks": self._num_ranks, "delivered": self._delivered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = self.state_dict()
        for key in ("seed", "num_ranks"):
            if state[key] != mine[key]:
                raise ValueError(
                    f"the loader's {key} is {mine[key]}, the loaded position was counted with {state[key]}"
                )
        self._delivered = state["delivered"]
