"""The batches of one rank, and where in them it is.

In: the user's data, or none. Out: the arguments of one block at a time; after a restore the same batches again, from
the restored position.

Invariants: whether the data was being iterated is part of the captured state; continuing draws no random number that
the undisturbed run does not draw.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from p2pstate.errors import ConfigError
from p2pstate.state import rng as random_streams

__all__ = ["ONE_LOOP", "Feed", "LoopPosition"]

ONE_LOOP = (
    "a process that replaces a dead one, or is started again, begins with the first loop over state.run() or "
    "state.batches(). Make one loop of them: give the epochs to the loader (p2pstate.data.Loader(..., epochs=N)) and "
    "what comes between them to state.every(n, function)"
)


class LoopPosition:
    """Part of the captured state: whether the data was being iterated, that is, whether ``iter(data)`` is behind us,
    how many batches were taken in all, and in which of the process's loops."""

    def __init__(self) -> None:
        self.iterating = False
        self.num_batches = 0
        self.loop = 1

    def state_dict(self) -> dict[str, int]:
        return {"iterating": self.iterating, "num_batches": self.num_batches, "loop": self.loop}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.iterating = bool(state["iterating"])
        self.num_batches = state.get("num_batches", 0)  # versions before 0.1 had none
        self.loop = state.get("loop", 1)


class Feed:
    def __init__(self, data: Any, position: LoopPosition) -> None:
        self._data = data
        self._position = position
        self._iterator: Iterator[Any] | None = None
        self._num_loops = 0

    def check(self, train_step: Callable[..., Any]) -> None:
        """Raises ValueError if it cannot be called with what `next` returns."""
        if not callable(train_step):
            raise ValueError(f"run() takes a function that does one step, not {type(train_step).__name__}")
        try:
            signature = inspect.signature(train_step)
        except ValueError:  # some functions do not tell
            return
        try:
            signature.bind(*([] if self._data is None else [None]))
        except TypeError as error:
            given = "no arguments, as the Replicator has no data=" if self._data is None else "the batch"
            name = getattr(train_step, "__name__", type(train_step).__name__)
            raise ValueError(f"run() calls {name} with {given}: {error}") from None

    def next(self) -> tuple[Any, ...]:
        """The next batch, as arguments of train_step. Raises StopIteration when the data ends."""
        batch: tuple[Any, ...] = ()
        if self._data is not None:
            if self._iterator is None:
                self._iterator = iter(self._data)
                self._position.iterating = True
            batch = (next(self._iterator),)
        self._position.num_batches += 1
        return batch

    @property
    def num_batches(self) -> int:
        """How many were taken in all, up to the restored position and since."""
        return self._position.num_batches

    def begin_loop(self) -> int:
        """-> how many this process has begun."""
        self._num_loops += 1
        self._position.loop = self._num_loops
        return self._num_loops

    def skip_to(self, num_batches: int) -> None:
        """Take batches, which nobody is trained with, until so many were taken in all, or the data ends."""
        try:
            while self._position.num_batches < num_batches:
                self.next()
        except StopIteration:
            self.ended()

    def ended(self) -> None:
        """The data ended here: the next batch begins a new pass over it."""
        self._iterator = None
        self._position.iterating = False

    def drop(self) -> None:
        """The state is about to be replaced: nothing of the current pass is used any more."""
        self._iterator = None

    def resume(self) -> None:
        """After a restore: iterate again, at the restored position. Some loaders draw a seed when they are asked to
        iterate; the undisturbed run has drawn it before, so the random streams are put back. Raises ConfigError."""
        if self._position.loop != self._num_loops:
            raise ConfigError(f"loop {self._position.loop} cannot be resumed in loop {self._num_loops}: {ONE_LOOP}")
        self._iterator = None
        if self._data is not None and self._position.iterating:
            with random_streams.kept():
                self._iterator = iter(self._data)
