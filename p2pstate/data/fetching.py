"""From indices, or the next samples of an iterable, to one batch: what runs in a loader worker or in the trainer.

In: tasks. Out: batches, and for iterables the state behind each. Before a sample is made, the global random streams are
seeded with (seed, pass, index), or (seed, epoch, worker, number) in an iterable: an augmentation is the same whoever
runs it and whatever ran before. ``collate_fn`` draws from a stream named by the batch's first sample.

Invariant: an exception says which sample it came from (``SampleError``), and StopIteration of a data set that is no
iterable never looks like the end of the data.
Known limit: for a data set that draws (``draws_random`` is not False) samples are made one by one; ``__getitems__``,
which makes a whole batch at once, is used only where nothing is drawn.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from p2pstate.data.shuffle_buffer import loses_samples
from p2pstate.data.streams import seed_streams

__all__ = ["Begin", "End", "Fetcher", "More", "Read", "SampleError", "Spec", "make_fetcher"]

logger = logging.getLogger("p2pstate.data")


@dataclass(frozen=True, slots=True)
class Read:
    """Make the batch of these samples of a map-style data set."""

    epoch: int
    indices: NDArray[np.int64]
    passes: NDArray[np.int64]  # over the sample's source: what its augmentation is seeded with

    def __str__(self) -> str:
        return f"epoch {self.epoch}, samples {self.indices.tolist()[:16]}{'...' if len(self.indices) > 16 else ''}"


@dataclass(frozen=True, slots=True)
class Begin:
    """Iterate an iterable data set: from ``state``, or from its beginning, leaving out ``num_samples``. With no samples
    delivered, ``state`` is what the epoch before has left."""

    epoch: int
    num_samples: int = 0  # that were delivered before
    state: Any = None
    ended: bool = False  # there is nothing left in this epoch


@dataclass(frozen=True, slots=True)
class More:
    """Make the next batch of an iterable data set."""

    epoch: int

    def __str__(self) -> str:
        return f"epoch {self.epoch}, the next batch of an iterable data set"


@dataclass(frozen=True, slots=True)
class End:
    """In place of a batch: the iterable has ended."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a fetcher needs to know. ``worker``: its number among ``num_workers``."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    seed: int
    in_batches: bool  # False: samples come alone, as ``batch_size=None`` asks for
    batch_size: int = 1  # of an iterable
    drop_last: bool = False  # of an iterable
    worker: int = 0
    num_workers: int = 1


class SampleError(Exception):
    """Wraps what a data set raised. ``where`` names the sample."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


class Fetcher:
    """Of a map-style data set."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._draws = getattr(spec.dataset, "draws_random", True)
        self._prefetch = getattr(spec.dataset, "prefetch", None)

    def announce(self, task: Read) -> None:
        """The task will come soon: a data set with ``prefetch(indices)`` can begin to fetch what it needs."""
        if not callable(self._prefetch):
            return
        try:
            self._prefetch(task.indices.tolist())
        except Exception as error:  # what is wrong with a sample is raised when it is read
            logger.warning("prefetch(%s) of the data set failed: %s", task.indices.tolist(), error)

    def fetch(self, task: Read) -> tuple[Any, Any]:
        """(batch, None). Raises SampleError from what the data set raised."""
        indices = task.indices.tolist()
        dataset, spec = self._spec.dataset, self._spec
        if not self._draws and hasattr(dataset, "__getitems__"):
            with _named(f"one of the samples {indices}"):
                samples = dataset.__getitems__(indices)
        else:
            samples = []
            for index, turn in zip(indices, task.passes.tolist(), strict=True):
                with _named(f"sample {index}"):
                    if self._draws:
                        seed_streams("sample", spec.seed, turn, index)
                    samples.append(dataset[index])
        with _named(f"samples {indices} (in collate_fn)"):
            if self._draws:
                seed_streams("batch", spec.seed, *(int(each[0]) for each in (task.passes, indices) if len(each)))
            return spec.collate_fn(samples if spec.in_batches else samples[0]), None


class IterableFetcher:
    """Of an iterable data set. The state behind a batch is that of the data set, or of its iterator, if one has it, and
    if it is enough to go on from."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._loses_samples = loses_samples(spec.dataset)
        self._draws = getattr(spec.dataset, "draws_random", True)
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._num_samples = 0
        self._ended = self._is_carried = False
        self._initial = self._state() if self._of_dataset else None

    def announce(self, task: Begin | More) -> None:
        """Nothing can be known before it comes."""

    def fetch(self, task: Begin | More) -> tuple[Any, Any]:
        """(batch or End, state behind it). For Begin: (None, number of samples read and thrown away)."""
        if isinstance(task, Begin):
            return None, self._begin(task)
        assert self._iterator is not None
        spec = self._spec
        size = spec.batch_size if spec.in_batches else 1
        samples = list(itertools.islice(self._samples(), size))
        state = {"samples": self._num_samples, "state": self._state(), "ended": self._ended}
        if not samples or (spec.drop_last and len(samples) < size):
            return End(), state
        with _named(f"the batch behind sample {self._num_samples} (in collate_fn)"):
            return spec.collate_fn(samples if spec.in_batches else samples[0]), state

    @property
    def _of_dataset(self) -> bool:
        """Whether the state is that of the data set itself."""
        dataset = self._spec.dataset
        return not self._loses_samples and hasattr(dataset, "load_state_dict") and hasattr(dataset, "state_dict")

    def _begin(self, task: Begin) -> int:
        is_fresh, is_amid = self._iterator is None, self._iterator is not None and not self._ended
        self._epoch, self._num_samples, self._ended, self._is_carried = task.epoch, 0, task.ended, False
        if task.ended:
            self._iterator, self._num_samples = iter(()), task.num_samples
            return 0
        dataset: Any = self._spec.dataset
        self._seed()
        with _named("the beginning of an iterable data set"):
            if task.num_samples == 0 and self._of_dataset:
                state = task.state if task.state is not None else self._initial
                if state is not None and (is_amid or (is_fresh and task.state is not None)):
                    dataset.load_state_dict(copy.deepcopy(state))
                    self._is_carried = True
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(task.epoch)
            goes_on = task.state is not None and task.num_samples > 0
            if goes_on and self._of_dataset:
                dataset.load_state_dict(task.state)
            iterator: Any = iter(dataset)
            if goes_on and not self._of_dataset:
                iterator.load_state_dict(task.state)
        self._iterator = iterator
        if goes_on:
            self._num_samples = task.num_samples
            return 0
        return sum(1 for _ in itertools.islice(self._samples(), task.num_samples))

    def _samples(self) -> Iterator[Any]:
        """The samples from here on, each with streams of its own."""
        while not self._ended:
            assert self._iterator is not None
            self._seed()
            with _named(f"sample {self._num_samples} of an iterable data set"):
                try:
                    sample = next(self._iterator)
                except StopIteration:
                    self._ended = not self._begins_anew()
                    continue
            self._num_samples += 1
            yield sample

    def _begins_anew(self) -> bool:
        """To some data sets the state that an epoch's end has left means: nothing is left."""
        if not self._is_carried or self._num_samples or self._initial is None:
            return False
        self._is_carried = False
        dataset: Any = self._spec.dataset
        dataset.load_state_dict(copy.deepcopy(self._initial))
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self._epoch)
        self._iterator = iter(dataset)
        return True

    def _seed(self) -> None:
        if self._draws:
            seed_streams("iterable", self._spec.seed, self._epoch, self._spec.worker, self._num_samples)

    def _state(self) -> Any:
        candidates: tuple[Any, Any] = (self._spec.dataset, self._iterator)
        for thing in () if self._loses_samples else candidates:
            if hasattr(thing, "load_state_dict") and hasattr(thing, "state_dict"):
                return copy.deepcopy(thing.state_dict())  # which may be the live one
        return None


def make_fetcher(spec: Spec) -> Fetcher | IterableFetcher:
    if isinstance(spec.dataset, torch.utils.data.IterableDataset):
        return IterableFetcher(spec)
    return Fetcher(spec)


class _named:
    """Turns what the block raises into SampleError, the original as its cause."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt | SampleError | GeneratorExit):
            raise SampleError(self._where) from error
