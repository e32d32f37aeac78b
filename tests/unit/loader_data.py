"""Data sets for a Loader, and its batches as plain values."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import torch
import torch.utils.data
from torch.utils.data import IterableDataset, get_worker_info

from p2pstate.data import Loader

NUM_SAMPLES = 22
SOON_S = 30.0  # far above what anything here takes


class Drawing(torch.utils.data.Dataset[Any]):
    """A sample is its index and what an augmentation drew from each of the three streams."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), random.random(), np.random.rand()


class Noise(Drawing):
    """Never the same twice: only bytes that were kept can be delivered again."""

    def __getitem__(self, index: int) -> Any:
        return torch.frombuffer(bytearray(os.urandom(512)), dtype=torch.uint8)


class Counting(IterableDataset[Any]):
    """Each worker has the numbers that are its own modulo the number of workers; with a state, if asked for."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for number in range(first, self.num_samples, step):
            yield number, random.random()


class CountingWithState(IterableDataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.done, self.read, self.resumed = num_samples, 0, 0, False

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        if not self.resumed:
            self.done = 0
        self.resumed = False
        while (number := first + self.done * step) < self.num_samples:
            self.done += 1
            self.read += 1
            yield number, self.read

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.resumed = state["done"], True


class CountingByEpochs(CountingWithState):
    """Counts its epochs itself, in an order of each; the end of one leaves it at the beginning of the next."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.rounds = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        while (number := first + self.done * step) < self.num_samples:
            self.done += 1
            yield (number + self.rounds * step) % self.num_samples, self.rounds
        self.done, self.rounds = 0, self.rounds + 1

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.rounds = state["done"], state["rounds"]


def plain(batch: Any) -> Any:
    """Tensors as lists, so that batches can be compared bit for bit."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, list | tuple):
        return [plain(each) for each in batch]
    return batch


def everything(loader: Loader, num_epochs: int = 1) -> list[Any]:
    return [plain(batch) for _ in range(num_epochs) for batch in loader]


def indices(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index in batch[0]]


def worker_pids(loader: Loader) -> list[int]:
    return [child.pid for child in psutil.Process().children() if child.pid in loader.worker_pids]
