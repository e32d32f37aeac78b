"""The random streams that a data set draws from, set anew for every sample.

In: numbers that name a sample. Out: Python's, NumPy's and torch's global streams, seeded with a hash of them, so that
what a sample's augmentation draws depends on nothing else: not on the worker, not on the samples before it.
Invariant: ``kept`` leaves the process's own streams as they were.
Known limits: NumPy's global stream is seeded with 32 bits, the others with 64; CUDA's streams are left alone.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from p2pstate.data.permutation import hash_words

__all__ = ["current", "kept", "restore", "same", "seed_streams"]


def seed_streams(label: str, *numbers: int) -> None:
    """Seed the three streams with a hash of the label and the numbers. About 20 microseconds."""
    word = hash_words(label, *numbers)[0]
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)
    torch.default_generator.manual_seed(word)  # torch.manual_seed would look for devices each time


def current() -> dict[str, Any]:
    """The three streams as they are."""
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state()}


def restore(streams: Mapping[str, Any]) -> None:
    """Put them where ``current`` found them."""
    random.setstate(streams["python"])
    np.random.set_state(streams["numpy"])
    torch.set_rng_state(streams["torch"])


def same(left: Any, right: Any) -> bool:
    """Whether two values made of streams, generators and numbers are equal; a tuple may have become a list."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray | torch.Tensor) or isinstance(right, np.ndarray | torch.Tensor):
        return np.array_equal(np.asarray(left), np.asarray(right))
    return bool(left == right)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Put the streams back as they are now when the block ends."""
    streams = current()
    try:
        yield
    finally:
        restore(streams)
