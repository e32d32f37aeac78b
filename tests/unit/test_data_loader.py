"""The loader: its position is what was delivered, a function of seed and place alone."""

from __future__ import annotations

import logging
import multiprocessing
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from loader_data import NUM_SAMPLES, SOON_S, Drawing, everything, indices, plain
from torch.utils.data import DataLoader, RandomSampler

from p2pstate.data import Loader, Mixture, Sampler, Shuffled

pytestmark = pytest.mark.usefixtures("closed_loaders")


@pytest.mark.parametrize("num_workers", [1, 4])
def test_loader_of_any_worker_count_gives_the_same_bits(unfaulted: list[Any], num_workers: int) -> None:
    loader = Loader(Drawing(), 4, shuffle=True, num_workers=num_workers, seed=3)
    assert isinstance(loader, DataLoader)
    assert len(loader) == 6
    assert everything(loader, 3) == unfaulted


def test_loader_epoch_has_each_sample_once_in_an_order_of_its_own(unfaulted: list[Any]) -> None:
    epochs = [indices(unfaulted[6 * epoch : 6 * epoch + 6]) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(NUM_SAMPLES)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_loader_augments_a_sample_anew_in_each_epoch_and_for_each_seed(unfaulted: list[Any]) -> None:
    drawn = {(batch[0][n], batch[1][n], batch[2][n], batch[3][n]) for batch in unfaulted for n in range(len(batch[0]))}
    assert len({each[1] for each in drawn}) == len(drawn) == 3 * NUM_SAMPLES
    other = everything(Loader(Drawing(), 4, num_workers=0, seed=4))
    assert not {each for batch in other for each in batch[1]} & {each[1] for each in drawn}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_leaves_the_random_streams_of_the_trainer_alone(num_workers: int) -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    everything(Loader(Drawing(), 4, shuffle=True, num_workers=num_workers))
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_resumed_anywhere_in_three_epochs_goes_on_exactly(unfaulted: list[Any], num_workers: int) -> None:
    loader = Loader(Drawing(), 4, shuffle=True, num_workers=num_workers, seed=3, epochs=3)
    states = [loader.state_dict()]
    for batch in loader:
        states.append(loader.state_dict())
        torch.rand(3)  # code that draws in between
        assert plain(batch) == unfaulted[len(states) - 2]
    assert len(states) == 19
    for place in range(0, 19, 1 if num_workers == 2 else 6):
        resumed = Loader(Drawing(), 4, shuffle=True, num_workers=(2 - num_workers) // 2, seed=3, epochs=3)
        resumed.load_state_dict(states[place])
        assert everything(resumed) == unfaulted[place:]


def test_loader_resumed_again_and_again_within_one_epoch_counts_from_its_beginning(unfaulted: list[Any]) -> None:
    seen: list[Any] = []
    state = None
    for stop in (2, 3, 5, 9, 13):  # within an epoch, at once again, and over epochs
        loader = Loader(Drawing(), 4, shuffle=True, num_workers=2, seed=3, epochs=3)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        while len(seen) < stop:
            seen.append(plain(next(batches)))
        state = loader.state_dict()
        loader.close()
    assert seen == unfaulted[:13]


class Counted(Drawing):
    """Counts what is read, over all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_read = multiprocessing.get_context("fork").Value("i", 0)

    def __getitem__(self, index: int) -> Any:
        with self.num_read.get_lock():
            self.num_read.value += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("sampler", [None, RandomSampler])
def test_loader_cut_at_batch_5_of_each_epoch_sees_each_index_once_in_the_order_of_its_twin(sampler: Any) -> None:
    """An ordinary loop over epochs, whose other code draws random numbers; every process begins with other streams."""

    def make() -> Loader:
        data = Drawing(64)
        return Loader(data, 4, None if sampler else True, sampler(data) if sampler else None, num_workers=0)

    def train(loader: Loader, epochs: range, cut_at: int | None) -> list[tuple[int, list[int]]]:
        seen = []
        for epoch in epochs:
            for batch in loader:
                torch.rand(3)
                seen.append((epoch, plain(batch)[0]))
                if len(seen) == cut_at:
                    return seen
        return seen

    torch.manual_seed(1)
    twin = train(make(), range(2), None)
    torch.manual_seed(1)
    first = make()
    seen = train(first, range(2), 5)
    state, streams = first.state_dict(), torch.get_rng_state()
    for cut_at in (16, None):  # batch 5 of the second epoch
        torch.manual_seed(77)
        loader = make()
        loader.load_state_dict(state)
        torch.set_rng_state(streams)
        seen += train(loader, range(loader.epoch, 2), cut_at)
        state, streams = loader.state_dict(), torch.get_rng_state()
    assert seen == twin
    for epoch in range(2):
        assert sorted(index for each, batch in seen if each == epoch for index in batch) == list(range(64))


def test_loader_counts_what_was_delivered_and_not_what_was_fetched_ahead(unfaulted: list[Any]) -> None:
    dataset = Counted()
    loader = Loader(dataset, 4, shuffle=True, num_workers=2, prefetch_factor=2, seed=3)
    batches = iter(loader)
    assert plain(next(batches)) == unfaulted[0]
    deadline = time.monotonic() + SOON_S
    while dataset.num_read.value < 20:  # the batch that was delivered, and four ahead
        assert time.monotonic() < deadline
        time.sleep(0.01)
    other = Loader(Drawing(), 4, shuffle=True, num_workers=0, seed=3)
    other.load_state_dict(loader.state_dict())
    assert plain(next(iter(other))) == plain(next(batches)) == unfaulted[1]
    assert loader.stats().queue_depth >= 1
    assert [plain(batch) for batch in batches] == unfaulted[2:6]


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (1, 4)])
def test_loader_taken_up_by_other_rank_counts_reads_each_sample_once(before: int, after: int) -> None:
    def loaders(num_ranks: int) -> list[Loader]:
        order = Shuffled(NUM_SAMPLES, seed=2)
        samplers = [Sampler(order, 3, rank=rank, num_ranks=num_ranks, tail="uneven") for rank in range(num_ranks)]
        return [Loader(Drawing(), batch_sampler=sampler, num_workers=0) for sampler in samplers]

    seen: list[int] = []
    for loader in loaders(before):
        seen += indices([plain(next(iter(loader)))])
        state = loader.state_dict()
    for loader in loaders(after):
        loader.load_state_dict(state)
        seen += indices(everything(loader))
    assert sorted(seen) == list(range(NUM_SAMPLES))


def test_loader_augments_a_sample_alike_in_any_batch_and_on_any_rank(unfaulted: list[Any]) -> None:
    order = Shuffled(NUM_SAMPLES, seed=3)
    alike = [
        Loader(Drawing(), batch_sampler=Sampler(order, 5, rank=rank, num_ranks=2, tail="uneven"), num_workers=1, seed=3)
        for rank in range(2)
    ]
    samples = {tuple(each) for loader in alike for batch in everything(loader) for each in zip(*batch, strict=True)}
    assert samples == {tuple(each) for batch in unfaulted[:6] for each in zip(*batch, strict=True)}


def test_loader_of_a_mixture_resumes_exactly() -> None:
    def loader() -> Loader:
        order = Mixture([15, 7], [1, 3], num_samples=20, seed=1)
        return Loader(Drawing(), batch_sampler=Sampler(order, 3), num_workers=1, epochs=4)

    whole = everything(loader())
    first, second = loader(), loader()
    batches = iter(first)
    seen = [plain(next(batches)) for _ in range(11)]
    second.load_state_dict(first.state_dict())
    assert seen + everything(second) == whole


def test_loader_stats_count_and_a_starved_trainer_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Drawing):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.002)
            return index

    with caplog.at_level(logging.WARNING):
        loader = Loader(Slow(120), 1, num_workers=0)
        for _ in loader:
            pass
    stats = loader.stats()
    assert stats.num_batches == 120
    assert stats.fetch_seconds > 0.24
    assert stats.recent_wait > 0.5
    assert caplog.text.count("training waits for its data") == 1
    assert "num_workers=2 or more" in caplog.text
