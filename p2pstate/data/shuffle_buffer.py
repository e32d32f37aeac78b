"""Iterables whose own state leaves out samples that are waiting in memory to be shuffled.

In: a data set. Out: whether what its ``state_dict()`` gives is enough to go on in the same order. Hugging Face's
``shuffle(buffer_size=...)`` fills its buffer anew behind the samples that were in it: after ``load_state_dict`` those
never come. Reading again from the epoch's beginning brings the same order, because that is a function of its seed.
Known limit: buffers are found by the names of Hugging Face's classes.
"""

from __future__ import annotations

from typing import Any

__all__ = ["loses_samples"]

_BUFFERS = ("BufferShuffledExamplesIterable",)


def loses_samples(dataset: Any) -> bool:
    """Whether samples are lost where ``dataset`` is put back to its state."""
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ in _BUFFERS:
            return True
        parts += [getattr(part, "ex_iterable", None)] if hasattr(part, "ex_iterable") else []
        parts += getattr(part, "ex_iterables", ())
    return False
