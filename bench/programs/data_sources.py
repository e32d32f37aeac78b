"""What the data benchmark reads: token files, and a storage that answers as slowly as an object store.

In: a folder. Out: files of random tokens; a file system ``slow://`` over them; data sets that read windows of them from
memory, through the cache, or straight from the storage. Every request to the storage takes ``LATENCY_S``, and its bytes
come at ``BYTES_PER_S``; requests do not slow each other down.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import register_implementation
from numpy.typing import NDArray
from torch import Tensor

from p2pstate.data import CachedFiles

LATENCY_S = 0.03
BYTES_PER_S = 50e6  # of one connection
NUM_FILES = 8
TOKENS_PER_FILE = 16 << 20
LENGTH = 2049
WINDOWS_PER_FILE = TOKENS_PER_FILE // LENGTH


class ObjectStorage(LocalFileSystem):
    """Files of this machine, at the pace of an object store."""

    protocol = "slow"
    cachable = False

    def info(self, path: Any, **kwargs: Any) -> Any:
        time.sleep(LATENCY_S)
        return super().info(path, **kwargs)

    def cat_file(self, path: Any, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        data = super().cat_file(path, start=start, end=end, **kwargs)
        time.sleep(LATENCY_S + len(data) / BYTES_PER_S)
        return data


register_implementation("slow", ObjectStorage)


def write_tokens(folder: Path) -> list[Path]:
    draw = np.random.default_rng(0)
    paths = [folder / f"{number}.npy" for number in range(NUM_FILES)]
    for path in paths:
        np.save(path, draw.integers(0, 50_000, TOKENS_PER_FILE, dtype=np.uint16))
    return paths


class Windows(torch.utils.data.Dataset[Tensor]):
    """Windows of LENGTH tokens. Nothing is drawn; what is read comes from ``tokens``."""

    draws_random = False
    num_files = NUM_FILES

    def __len__(self) -> int:
        return self.num_files * WINDOWS_PER_FILE

    def __getitem__(self, index: int) -> Tensor:
        file, window = divmod(index, WINDOWS_PER_FILE)
        return torch.from_numpy(self.tokens(file, window * LENGTH).astype(np.int64))

    def tokens(self, file: int, start: int) -> NDArray[np.uint16]:
        raise NotImplementedError


class InMemory(Windows):
    def __init__(self, paths: list[Path]) -> None:
        self._arrays = [np.load(path) for path in paths]

    def tokens(self, file: int, start: int) -> NDArray[np.uint16]:
        return self._arrays[file][start : start + LENGTH]


class Direct(Windows):
    """A range request for every window, as an unchanged data set over fsspec makes it."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths, self._storage = paths, ObjectStorage()

    def tokens(self, file: int, start: int) -> NDArray[np.uint16]:
        header = self._paths[file].stat().st_size - 2 * TOKENS_PER_FILE
        first = header + 2 * start
        return np.frombuffer(self._storage.cat_file(self._paths[file], first, first + 2 * LENGTH), np.uint16)


class Cached(Windows):
    """Through CachedFiles; the next file is fetched while one is read."""

    def __init__(self, paths: list[Path], folder: Path, num_files: int = NUM_FILES) -> None:
        self._urls = [f"slow://{path}" for path in paths]
        self._files = CachedFiles(folder, chunk_bytes=1 << 20)
        self._open: dict[int, Any] = {}
        self.num_files = num_files

    def tokens(self, file: int, start: int) -> NDArray[np.uint16]:
        source = self._open.get(file)
        if source is None:
            source = self._open[file] = self._files.source(self._urls[file])
            self._files.prefetch(self._urls[file + 1 : min(file + 2, self.num_files)])
        first = source.num_bytes - 2 * TOKENS_PER_FILE + 2 * start
        return np.frombuffer(source.read(first, first + 2 * LENGTH), np.uint16)
