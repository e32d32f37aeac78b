"""The batches of one rank, and where in them it is.

In: the user's data, or none. Out: the arguments of one block at a time; after a restore the same batches again, from
the restored position.

Invariants: whether the data was being iterated is part of the captured state; continuing draws no random number that
the undisturbed run does not draw.
Known limit: what an ``__iter__`` that is a generator draws itself, before its first batch, cannot be told from what it
draws for that batch, and is drawn once more after a restore; seeds that torch's loaders draw in it are not.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data.dataloader

from p2pstate.state import rng as random_streams
from p2pstate.types import LoopEnds

__all__ = ["Feed", "LoopPosition"]

MAX_REST = 64  # batches by which data is uneven; a longer rest is one of data without an end


class LoopPosition:
    """Part of the captured state: whether the data was being iterated, that is, whether ``iter(data)`` is behind us,
    how many batches were taken in all, and which training loops of the script had ended before."""

    def __init__(self) -> None:
        self.iterating = False
        self.num_batches = 0
        self.ends = LoopEnds()

    def state_dict(self) -> dict[str, Any]:
        ends = [self.ends.num, *self.ends.steps]
        return {"iterating": self.iterating, "num_batches": self.num_batches, "ends": ends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iterating = bool(state["iterating"])
        self.num_batches = state["num_batches"]

    @staticmethod
    def ends_in(state: dict[str, Any], since: int) -> LoopEnds:
        """Of a captured position that was read in round ``since``."""
        num, *steps = state["ends"]
        return LoopEnds(since, num, tuple(steps))


class Feed:
    def __init__(self, data: Any, position: LoopPosition) -> None:
        self._data = data
        self._position = position
        self._iterator: Iterator[Any] | None = None
        self._start: tuple[int, Any] | None = None  # of a rehearsal: batches taken until then, the data's position
        self._begun_again: _BegunAgain | None = None  # until the first batch after a restore

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
        batch = self._take()
        self._position.num_batches += 1
        return batch

    def next_or_none(self) -> tuple[Any, ...] | None:
        """None: the data has ended, and the next batch begins a new pass over it."""
        try:
            return self.next()
        except StopIteration:
            self.ended()
            return None

    def _take(self) -> tuple[Any, ...]:
        if self._data is None:
            return ()
        if self._iterator is None:
            self._iterator = iter(self._data)
            self._position.iterating = True
        begun_again, self._begun_again = self._begun_again, None  # where __iter__ is a generator, it begins only now
        with begun_again or contextlib.nullcontext():
            return (next(self._iterator),)

    def end_pass(self) -> None:
        """The loop is over, because the data of some rank ended: so does the pass of this one, whose last few batches
        nobody is trained with. Data that tells its own position has to come to its end to begin anew."""
        with contextlib.suppress(StopIteration):
            for _ in range(MAX_REST):
                self._take()
        self.ended()

    @property
    def num_batches(self) -> int:
        """How many were taken in all, up to the restored position and since."""
        return self._position.num_batches

    def begin_loop(self, ends: LoopEnds) -> None:
        """``ends``: of the loops before this one."""
        self._position.ends = ends

    def skip_to(self, num_batches: int) -> None:
        """Take batches, which nobody is trained with, until so many were taken in all, or the data ends."""
        try:
            while self._position.num_batches < num_batches:
                self.next()
        except StopIteration:
            self.ended()

    def rehearsal_begins(self) -> None:
        """From here on batches are only borrowed: the position is restored when the rehearsal is over."""
        if self._data is not None:
            self._start = self.num_batches, copy.deepcopy(self._data.state_dict())

    def rewind(self) -> bool:
        """The data ended in a rehearsal: borrow the same batches again. False: there were none."""
        if self._start is None or self.num_batches == self._start[0]:
            return False
        self._start = self.num_batches, self._start[1]
        self._data.load_state_dict(copy.deepcopy(self._start[1]))
        return True

    def ended(self) -> None:
        """The data ended here: the next batch begins a new pass over it."""
        self._iterator = None
        self._position.iterating = False

    def drop(self) -> None:
        """The state is about to be replaced: nothing of the current pass is used any more."""
        self._iterator = self._begun_again = None

    def resume(self) -> None:
        """After a restore: iterate again, at the restored position. Some loaders draw a seed when they are asked to
        iterate; the undisturbed run has drawn it before, so the random streams are put back."""
        self._iterator = None
        if self._data is not None and self._position.iterating:
            self._begun_again = _BegunAgain()
            with random_streams.kept(), self._begun_again:
                self._iterator = iter(self._data)
                self._data.state_dict()  # torchdata's loaders begin to iterate when they are asked for their position


class _BegunAgain:
    """In the block, the first iterator of each of torch's loaders draws its seed and puts the streams back: the
    undisturbed run has drawn one at that place before. A second one begins the loader's next pass."""

    def __init__(self) -> None:
        self._loaders: list[Any] = []

    def __enter__(self) -> None:
        kind: Any = torch.utils.data.dataloader._BaseDataLoaderIter
        begin = self._begin = kind.__init__

        def begin_again(iterator: Any, loader: Any) -> None:
            is_first = all(each is not loader for each in self._loaders)
            self._loaders.append(loader)
            with random_streams.kept() if is_first else contextlib.nullcontext():
                begin(iterator, loader)

        kind.__init__ = begin_again

    def __exit__(self, *error: object) -> None:
        kind: Any = torch.utils.data.dataloader._BaseDataLoaderIter
        kind.__init__ = self._begin
