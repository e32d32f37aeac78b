"""Positions in samplers that p2pstate does not know: what they draw late, and a state of their own."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from p2pstate.data import Loader
from p2pstate.data.streams import current, restore

NUM_SAMPLES, BATCH, NUM_EPOCHS = 5, 2, 3


class DrawsLate(torch.utils.data.Sampler[int]):
    """Each index is drawn when it is asked for, from the process's own streams."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.num_samples))
        while left:
            yield left.pop(random.choice((np.random.randint(len(left)), int(torch.randint(len(left), ())))))


class WithState(torch.utils.data.Sampler[int]):
    """Counts its epochs itself, and begins where its state says, which an epoch's end sets back."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.done, self.epoch_number = num_samples, 0, 0

    def __iter__(self) -> Iterator[int]:
        order = np.random.RandomState(self.epoch_number).permutation(self.num_samples)
        while self.done < self.num_samples:
            self.done += 1
            yield int(order[self.done - 1])
        self.done, self.epoch_number = 0, self.epoch_number + 1

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "epoch": self.epoch_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.epoch_number = state["done"], state["epoch"]


class WithStateOnce(WithState):
    """A state that was loaded counts for one iteration; what an epoch's end leaves means that nothing is left."""

    start = 0

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        for number in range(start, self.num_samples):
            self.done = number + 1
            yield number

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = self.done = state["done"]


class WithStateOfIterator(torch.utils.data.Sampler[int]):
    class Iterating(Iterator[int]):
        def __init__(self, num_samples: int) -> None:
            self.order, self.done = torch.randperm(num_samples).tolist(), 0

        def __next__(self) -> int:
            if self.done == len(self.order):
                raise StopIteration
            self.done += 1
            return int(self.order[self.done - 1])

        def state_dict(self) -> dict[str, Any]:
            return {"order": list(self.order), "done": self.done}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.order, self.done = state["order"], state["done"]

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return self.Iterating(self.num_samples)


def loader_of(make: Callable[[int], Any], *, in_batches: bool) -> Loader:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    sampler = make(NUM_SAMPLES)
    return Loader(range(NUM_SAMPLES), BATCH if in_batches else None, sampler=sampler, num_workers=0)


def batches_of(loader: Loader, num_epochs: int, limit: int = 1000) -> list[list[int]]:
    found: list[list[int]] = []
    for _ in range(num_epochs):
        for batch in loader:
            found.append(torch.as_tensor(batch).reshape(-1).tolist())
            random.random(), np.random.rand(), torch.rand(())  # as a trainer draws between its batches
            if len(found) == limit:
                return found
    return found


@pytest.mark.parametrize("in_batches", [True, False], ids=["in batches", "alone"])
@pytest.mark.parametrize("make", [DrawsLate, WithState, WithStateOnce, WithStateOfIterator])
def test_sampler_of_any_kind_is_resumed_anywhere_as_if_nothing_had_been(
    make: Callable[[int], Any], in_batches: bool
) -> None:
    unfaulted = batches_of(loader_of(make, in_batches=in_batches), NUM_EPOCHS)
    assert sorted(functools.reduce(operator.iadd, unfaulted, [])) == sorted(list(range(NUM_SAMPLES)) * NUM_EPOCHS)
    for cut in range(1, len(unfaulted)) if in_batches else (1, 4, 5, 6, 12):
        first = loader_of(make, in_batches=in_batches)
        before = batches_of(first, NUM_EPOCHS, cut)
        state = first.state_dict()
        streams = random.getstate(), np.random.get_state(), torch.get_rng_state()
        second = loader_of(make, in_batches=in_batches)
        second.load_state_dict(state)
        random.setstate(streams[0]), np.random.set_state(streams[1]), torch.set_rng_state(streams[2])
        assert before + batches_of(second, NUM_EPOCHS - second.epoch) == unfaulted, f"cut behind batch {cut}"
        first.load_state_dict(state)  # and in place, where more was asked for ahead
        assert first.state_dict()["position"]["batches"] == state["position"]["batches"]


def test_distributed_sampler_shuffles_anew_in_each_of_the_epochs_of_one_iteration() -> None:
    sampler = DistributedSampler(range(NUM_SAMPLES), num_replicas=1, rank=0)
    loader = Loader(range(NUM_SAMPLES), NUM_SAMPLES, sampler=sampler, num_workers=0, epochs=3)
    orders = {tuple(batch.tolist()) for batch in loader}
    assert len(orders) == 3


class Announced(list[int]):
    prefetch = 4  # a number of its own, not a method for loaders


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batch_without_samples_is_collated_as_by_torch(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    data = Announced(range(NUM_SAMPLES))
    loader = Loader(data, batch_sampler=[[1, 2], [], [3]], collate_fn=list, num_workers=num_workers)
    assert list(loader) == [[1, 2], [], [3]]
    assert not caplog.records
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("epochs", [None, NUM_EPOCHS])
@pytest.mark.parametrize("make", [torch.utils.data.RandomSampler, DrawsLate, WithState])
def test_step_done_again_at_an_epochs_border_gets_the_same_order_and_random_numbers(
    make: Callable[[Any], Any], epochs: int | None, num_workers: int
) -> None:
    """As a Replicator's survivor: loader and streams are set back in place, everywhere once."""

    def train(*, faulty: bool) -> list[Any]:
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        sampler = make(range(NUM_SAMPLES)) if make is torch.utils.data.RandomSampler else make(NUM_SAMPLES)
        loader = Loader(range(NUM_SAMPLES), BATCH, sampler=sampler, num_workers=num_workers, epochs=epochs)
        seen = []
        for _ in range(NUM_EPOCHS if epochs is None else 1):
            saved = loader.state_dict(), current()
            iterator, is_again = iter(loader), False
            while (batch := next(iterator, None)) is not None:
                if faulty and not is_again:
                    loader.load_state_dict(saved[0])
                    restore(saved[1])
                    iterator, is_again = iter(loader), True
                    continue
                seen.append([batch.tolist(), random.random(), np.random.rand(), torch.rand(()).item()])
                saved, is_again = (loader.state_dict(), current()), False
        loader.close()
        return seen

    assert train(faulty=True) == train(faulty=False)


def test_position_of_another_order_is_taken_up_by_a_loader_that_stands_at_the_same_place() -> None:
    """As a newcomer, which has rehearsed with an order of its own."""

    def loader_and_two_batches(seed: int) -> tuple[Loader, Iterator[Any], list[Any]]:
        torch.manual_seed(seed)
        data = range(20)
        loader = Loader(data, BATCH, sampler=torch.utils.data.RandomSampler(data), num_workers=0)
        loader.state_dict()
        batches = iter(loader)
        return loader, batches, [next(batches).tolist() for _ in range(2)]

    first, left, begun = loader_and_two_batches(3)
    second, _, others = loader_and_two_batches(4)
    assert begun != others
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == [batch.tolist() for batch in left]
