"""A data set with a shuffle buffer that its state leaves out, as those of Hugging Face: nothing is lost in a Loader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from p2pstate.data import Loader
from p2pstate.data.shuffle_buffer import loses_samples
from p2pstate.replicator import _warn_of_lost_samples

pytestmark = pytest.mark.usefixtures("closed_loaders")


class Part:
    def __init__(self, *inner: Any) -> None:
        self.ex_iterables = list(inner)


class BufferShuffledExamplesIterable:
    def __init__(self, inner: Any = None) -> None:
        self.ex_iterable = inner


class Shuffled(IterableDataset[int]):
    """``state_dict`` as Hugging Face's: how far the buffer has read."""

    def __init__(self, part: Any) -> None:
        self._ex_iterable, self._num_read, self._epoch = part, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        chance, buffer = random.Random(self._epoch), list[int]()
        while self._num_read < 20:
            buffer.append(self._num_read)
            self._num_read += 1
            if len(buffer) == 8:
                yield buffer.pop(chance.randrange(8))
        self._num_read = 0
        chance.shuffle(buffer)
        yield from buffer

    def state_dict(self) -> dict[str, int]:
        return {"read": self._num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._num_read = state["read"]


@pytest.mark.parametrize(
    ("part", "loses"),
    [
        (BufferShuffledExamplesIterable(), True),
        (Part(Part(), Part(BufferShuffledExamplesIterable())), True),
        (Part(Part(), Part()), False),
        (None, False),
    ],
)
def test_buffer_is_found_wherever_it_is(part: Any, loses: bool) -> None:
    assert loses_samples(Shuffled(part)) == loses
    assert not loses_samples(object())


def test_loader_reads_a_shuffle_buffer_again_and_loses_nothing() -> None:
    def make() -> Loader:
        return Loader(Shuffled(BufferShuffledExamplesIterable()), 3, num_workers=0, epochs=2)

    loader = make()
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(batch.tolist())
        states.append(loader.state_dict())
    for epoch in (whole[:7], whole[7:]):
        assert sorted(number for batch in epoch for number in batch) == list(range(20))
    assert whole[:7] != whole[7:]
    for place, state in enumerate(states):
        resumed = make()
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == whole[place:]


def test_replicator_warns_of_samples_that_a_fault_costs(recwarn: pytest.WarningsRecorder) -> None:
    _warn_of_lost_samples(Loader(Shuffled(BufferShuffledExamplesIterable()), num_workers=0))
    _warn_of_lost_samples(Shuffled(Part()))
    assert not recwarn
    with pytest.warns(RuntimeWarning, match="goes through a shuffle buffer"):
        _warn_of_lost_samples(Shuffled(BufferShuffledExamplesIterable()))
