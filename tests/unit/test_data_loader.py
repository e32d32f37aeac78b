"""The loader: its position is what was delivered, whatever happens to workers, batches and the process around it."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.utils.data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, get_worker_info

from p2pstate.data import Loader, LoaderError, Mixture, Sampler, Shuffled

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


@pytest.fixture(autouse=True)
def _close_loaders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No worker outlives its test."""
    made: list[Loader] = []
    init = Loader.__init__

    def remember(self: Loader, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Loader, "__init__", remember)
    yield
    for loader in made:
        loader.close()


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


# -- the sequence is a function of seed and position


@pytest.fixture(scope="module")
def unfaulted() -> list[Any]:
    """Three epochs, read in the trainer's process."""
    return everything(Loader(Drawing(), 4, shuffle=True, num_workers=0, seed=3), 3)


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


# -- batches delivered again


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_set_back_delivers_the_same_bytes_whatever_was_done_to_the_batches(num_workers: int) -> None:
    loader = Loader(Noise(), 4, num_workers=num_workers, epochs=2)
    batches = iter(loader)
    states, seen = [], []
    for _ in range(9):
        states.append(loader.state_dict())
        batch = next(batches)
        seen.append(batch.clone())
        batch.zero_()
    for back in (1, 3, 4, 2):
        loader.load_state_dict(states[9 - back])
        batches = iter(loader)
        for place in range(9 - back, 9):
            states[place] = loader.state_dict()
            batch = next(batches)
            assert torch.equal(batch, seen[place])
            batch.zero_()
    assert loader.stats().num_redelivered == 1 + 3 + 4 + 2
    assert len(list(batches)) == 12 - 9  # and then goes on


def test_loader_set_back_across_an_epochs_end_ends_it_again() -> None:
    loader = Loader(Noise(), 4, num_workers=1)
    first = iter(loader)
    for _ in range(5):
        next(first)
    state = loader.state_dict()
    seen = [next(first)]
    assert next(first, None) is None
    seen.append(next(iter(loader)))
    loader.load_state_dict(state)
    assert [each.tolist() for each in loader] == [seen[0].tolist()]
    assert next(iter(loader)).tolist() == seen[1].tolist()


def test_loader_keeps_no_more_bytes_than_it_may_and_reads_again_what_is_older(unfaulted: list[Any]) -> None:
    loader = Loader(Drawing(), 4, shuffle=True, num_workers=1, seed=3, keep_bytes=1)
    batches = iter(loader)
    state = loader.state_dict()
    for _ in range(4):
        next(batches)
    loader.load_state_dict(state)
    assert everything(loader) == unfaulted[:6]
    assert loader.stats().num_redelivered == 0


@given(data=st.data())
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_loader_with_any_history_of_saves_and_loads_and_kills_is_where_it_says(
    data: st.DataObject, unfaulted: list[Any]
) -> None:
    """Against a model: a position is a number of batches. Saved states may be old, and loaded into other loaders."""
    num_workers = data.draw(st.sampled_from([0, 1, 2]), "workers")
    loader = Loader(Drawing(), 4, shuffle=True, num_workers=num_workers, seed=3, epochs=3)
    batches, place = iter(loader), 0
    saved: list[tuple[int, dict[str, Any]]] = []
    for action in data.draw(st.lists(st.sampled_from(["next"] * 6 + ["save", "load", "new", "kill"]), max_size=40)):
        if action == "next":
            batch = next(batches, None)
            assert (plain(batch) if batch is not None else None) == (unfaulted[place] if place < 18 else None)
            place = min(18, place + 1)
        elif action == "save":
            saved.append((place, loader.state_dict()))
        elif action == "kill" and num_workers:
            for pid in worker_pids(loader)[:1]:
                os.kill(pid, signal.SIGKILL)
        elif saved:
            place, state = data.draw(st.sampled_from(saved))
            if action == "new":
                loader.close()
                loader = Loader(Drawing(), 4, shuffle=True, num_workers=num_workers, seed=3, epochs=3)
            loader.load_state_dict(state)
            batches = iter(loader)
    loader.close()


# -- workers


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_loader_whose_worker_is_lost_goes_on_exactly(
    unfaulted: list[Any], blow: signal.Signals, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pstate.data.pool.LOOK_EVERY_S", 0.1)
    monkeypatch.setattr("p2pstate.data.pool.STOPPED_FOR_S", 0.2)
    loader = Loader(Drawing(), 4, shuffle=True, num_workers=2, seed=3, epochs=3)
    seen = []
    for batch in loader:
        seen.append(plain(batch))
        if len(seen) in (3, 9):
            os.kill(worker_pids(loader)[0], blow)
    assert seen == unfaulted
    assert caplog.text.count("Another process takes its place") == 2
    assert ("was killed by SIGKILL" if blow == signal.SIGKILL else "was stopped by a signal") in caplog.text


class Deadly(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == 6 and get_worker_info() is not None:
            os._exit(7)
        return super().__getitem__(index)


def test_loader_whose_workers_die_of_a_sample_names_it(caplog: pytest.LogCaptureFixture) -> None:
    loader = Loader(Deadly(), 4, num_workers=2)
    batches = iter(loader)
    assert plain(next(batches))[0] == [0, 1, 2, 3]
    with pytest.raises(LoaderError, match=r"exit code 7; it was reading epoch 0, samples \[4, 5, 6, 7\].*3 processes"):
        next(batches)
    assert loader.state_dict()["position"]["samples"] == 4


class Hanging(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            time.sleep(SOON_S)
        return super().__getitem__(index)


def test_loader_whose_data_set_hangs_says_so_in_time() -> None:
    loader = Loader(Hanging(), 4, num_workers=1, timeout=SOON_S)
    batches = iter(loader)
    next(batches)
    loader._engine._pool.timeout_s = 0.5  # only now: a worker may take its time to start on a busy machine
    for _ in range(2):  # also when it is tried again
        with pytest.raises(LoaderError, match=r"gave no batch for 0.5 s; it is at epoch 0, samples \[4, 5, 6, 7\]"):
            next(batches)


class Raising(Drawing):
    def __init__(self, error: BaseException, until: Path) -> None:
        super().__init__()
        self.error, self.until = error, until

    def __getitem__(self, index: int) -> Any:
        if index == 9 and not self.until.exists():
            raise self.error
        return super().__getitem__(index)


class Speaking(Exception):
    """Has a message of its own, which ExceptionWrapper takes for an argument."""

    message = "it"


class Odd(Exception):
    """Cannot be made of one string."""

    def __init__(self, number: int, *, reason: str) -> None:
        super().__init__(f"{number} {reason}")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("error", "arrives_as"),
    [
        (ValueError("a broken picture"), ValueError),
        (KeyError("a broken picture"), KeyError),
        (StopIteration("a broken picture"), RuntimeError),
        (SystemExit("a broken picture"), RuntimeError),
        (Odd(1, reason="a broken picture"), RuntimeError),
        (ExceptionGroup("two", [ValueError("a broken picture"), OSError()]), RuntimeError),
        (Speaking("a broken picture"), RuntimeError),
        (type("Nameless", (Exception,), {})("a broken picture"), Exception),  # no other process finds its class
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_loader_raises_what_the_data_set_raised_with_the_sample_and_can_try_again(
    num_workers: int, error: BaseException, arrives_as: type[Exception], tmp_path: Path
) -> None:
    loader = Loader(Raising(error, tmp_path / "healed"), 4, num_workers=num_workers)
    batches = iter(loader)
    first = [plain(next(batches)), plain(next(batches))]
    for _ in range(2):
        with pytest.raises(arrives_as, match="sample 9") as caught:
            next(batches)
        assert "a broken picture" in str(caught.value)
        assert "in __getitem__" in str(caught.value)
    assert loader.state_dict()["position"]["samples"] == 8
    (tmp_path / "healed").touch()
    assert first + [plain(batch) for batch in batches] == everything(Loader(Drawing(), 4, num_workers=0))


def fail_to_begin(worker: int) -> None:
    raise OSError(f"no licence for worker {worker}")


def fail_to_collate(samples: list[Any]) -> Any:
    raise TypeError("cannot be stacked")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"worker_init_fn": fail_to_begin, "num_workers": 2}, OSError, "no licence for worker 0"),
        ({"collate_fn": fail_to_collate, "num_workers": 1}, TypeError, r"samples \[0, 1\] \(in collate_fn\)"),
        ({"collate_fn": fail_to_collate, "num_workers": 0}, TypeError, r"samples \[0, 1\] \(in collate_fn\)"),
        ({"collate_fn": lambda _: lambda: 1, "num_workers": 1}, Exception, "cannot be sent to the trainer: epoch 0"),
    ],
)
def test_loader_raises_what_happens_around_the_data_set(
    arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        next(iter(Loader(Drawing(), 2, **arguments)))


def hang_with_workers(pids: Any) -> None:
    loader = Loader(Hanging(), 1, num_workers=3)
    batches = iter(loader)
    next(batches)
    pids.put(loader.worker_pids)
    time.sleep(SOON_S)


def test_loader_workers_of_a_killed_trainer_are_gone_though_they_hang() -> None:
    context = multiprocessing.get_context("fork")
    pids = context.SimpleQueue()
    trainer = context.Process(target=hang_with_workers, args=(pids,))
    trainer.start()
    workers = [psutil.Process(pid) for pid in pids.get()]
    assert len(workers) == 3
    workers[0].suspend()
    trainer.kill()
    trainer.join(SOON_S)
    _, alive = psutil.wait_procs(workers, timeout=SOON_S)
    assert not alive


ENDING = """
import os, signal
from p2pstate.data import Loader

class Numbers:
    def __len__(self):
        return 10
    def __getitem__(self, index):
        return index

loader = Loader(Numbers(), 1, num_workers=2)
next(iter(loader))
os.kill(loader.worker_pids[0], signal.SIGSTOP)
"""


def test_loader_program_that_ends_does_not_wait_for_a_stopped_worker() -> None:
    subprocess.run([sys.executable, "-c", ENDING], check=True, timeout=120)


def test_loader_that_is_forgotten_ends_its_workers() -> None:
    loader = Loader(Drawing(), 4, num_workers=2)
    next(iter(loader))
    workers = [psutil.Process(pid) for pid in loader.worker_pids]
    loader.close()
    assert loader.worker_pids == []
    _, alive = psutil.wait_procs(workers, timeout=SOON_S)
    assert not alive
    assert len(everything(loader)) == 6  # and starts others when it is asked again


@pytest.mark.slow
def test_loader_works_with_spawned_workers(unfaulted: list[Any]) -> None:
    loader = Loader(Drawing(), 4, shuffle=True, num_workers=1, seed=3, multiprocessing_context="spawn")
    assert everything(loader) == unfaulted[:6]


# -- as DataLoader


def test_loader_takes_single_samples_and_own_collation() -> None:
    assert everything(Loader(Drawing(), None, num_workers=1)) == [
        list(each) for batch in everything(Loader(Drawing(), 1, num_workers=0)) for each in zip(*batch, strict=True)
    ]
    assert list(Loader(Drawing(5), 2, num_workers=1, collate_fn=len)) == [2, 2, 1]
    assert list(Loader(Drawing(5), 2, num_workers=0, collate_fn=len, drop_last=True)) == [2, 2]


def test_loader_iteration_left_half_way_begins_the_epoch_again(unfaulted: list[Any]) -> None:
    loader = Loader(Drawing(), 4, shuffle=True, num_workers=1, seed=3)
    peeked = plain(next(iter(loader)))
    assert peeked == unfaulted[0]
    assert everything(loader, 2) == unfaulted[:12]
    for _, batch in zip(range(6), loader, strict=False):  # all of it, but its end was not seen
        assert batch is not None
    assert loader.epoch == 2
    everything(loader)
    assert loader.epoch == 4


def test_loader_follows_the_epoch_that_its_sampler_is_set_to(unfaulted: list[Any]) -> None:
    sampler = Sampler(Shuffled(NUM_SAMPLES, seed=3), 4, tail="uneven")
    loader = Loader(Drawing(), batch_sampler=sampler, num_workers=0, seed=3)
    sampler.set_epoch(2)
    assert everything(loader) == unfaulted[12:]
    sampler.set_epoch(1)
    batches = iter(loader)
    next(batches)
    assert sampler.state_dict() == {"order": sampler.order.identity, "epoch": 1, "samples": 4}


def test_loader_has_one_iteration_at_a_time() -> None:
    loader = Loader(Drawing(), 4, num_workers=0)
    older, newer = iter(loader), iter(loader)
    next(newer)
    with pytest.raises(RuntimeError, match="make a second loader"):
        next(older)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["shuffle by sampler", "generator", "distributed"])
def test_loader_with_torchs_samplers_resumes_in_the_same_order(kind: str, num_workers: int) -> None:
    def make() -> Loader:
        sampler: Any = RandomSampler(Drawing())
        if kind == "generator":
            sampler = RandomSampler(Drawing(), generator=torch.Generator().manual_seed(8))
        if kind == "distributed":
            sampler = DistributedSampler(Drawing(), 2, 1, seed=5)
            sampler.set_epoch(3)
        return Loader(Drawing(), 2, sampler=sampler, num_workers=num_workers)

    torch.manual_seed(1)
    loader = make()
    whole = []
    for number, batch in enumerate(loader):
        whole.append(plain(batch))
        torch.rand(1)
        if number == 3:
            state, stream = loader.state_dict(), torch.get_rng_state()
    torch.manual_seed(99)
    resumed = make()
    torch.set_rng_state(stream)
    resumed.load_state_dict(state)
    assert everything(resumed) == whole[4:]
    assert torch.equal(torch.get_rng_state(), stream)
    assert sorted(indices(whole)) == sorted(set(indices(whole)))


@pytest.mark.parametrize("begun", [False, True])
def test_loader_with_a_generator_resumes_between_epochs_in_the_next_ones_order(begun: bool) -> None:
    """Also where the next epoch's order has been drawn already, and nothing of it was delivered."""

    def make() -> Loader:
        return Loader(Drawing(), 2, sampler=RandomSampler(Drawing(), generator=torch.Generator().manual_seed(8)))

    loader = make()
    first = indices(everything(loader))
    iteration = iter(loader) if begun else None
    state = loader.state_dict()
    second = indices([plain(batch) for batch in iteration or loader])
    assert second != first
    resumed = make()
    for _ in range(2):  # a step that is tried again goes back to where it was
        resumed.load_state_dict(state)
        assert indices(everything(resumed)) == second


def test_loader_refuses_positions_that_mean_other_batches() -> None:
    state = Loader(Drawing(), 4, shuffle=True, num_workers=0).state_dict()
    for arguments, says in (
        ({"seed": 1, "shuffle": True}, "saved with seed 0"),
        ({"shuffle": False}, "samples would be lost or repeated"),
        ({"sampler": RandomSampler(Drawing())}, "cannot begin there"),
    ):
        with pytest.raises(ValueError, match=says):
            Loader(Drawing(), 4, num_workers=0, **arguments).load_state_dict(state)
    for other in (None, {"epoch": 1}):
        with pytest.raises(ValueError, match="not a position"):
            Loader(Drawing(), 4, num_workers=0).load_state_dict(other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="position is damaged"):
        Loader(Counting(8), 4, num_workers=0).load_state_dict({**state, "position": {"epoch": 0, "workers": [{}]}})
    with pytest.raises(ValueError, match="a Loader takes integers"):
        next(iter(Loader(Drawing(), 4, sampler=["a"], num_workers=0)))
    with pytest.raises(ValueError, match="in_order"):
        Loader(Drawing(), 4, in_order=False)


class BrokenSampler:
    """Gives two batches and stumbles, once."""

    def __init__(self) -> None:
        self.broken = True

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2, 3])
        if self.broken:
            self.broken = False
            raise OSError("the list of samples cannot be read")
        yield [4, 5]

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_whose_sampler_raises_ahead_loses_no_batch(num_workers: int) -> None:
    batches = iter(Loader(Drawing(), batch_sampler=BrokenSampler(), num_workers=num_workers, prefetch_factor=2))
    seen, errors = [], 0
    while len(seen) < 3:
        try:
            seen.append(plain(next(batches))[0])
        except OSError:
            errors += 1
    assert (seen, errors) == ([[0, 1], [2, 3], [4, 5]], 1)
    assert next(batches, None) is None


class Talking(Drawing):
    def __getitem__(self, index: int) -> Any:
        print(f"reads {index}")
        return index

    def prefetch(self, indices: list[int]) -> None:
        print("prefetch fails")
        raise OSError("no line")


def test_loader_that_is_closed_ends_its_workers_though_those_of_another_were_forked_since() -> None:
    loaders = [Loader(Drawing(), 4, num_workers=1) for _ in range(2)]
    for loader in loaders:
        next(iter(loader))
    first = loaders[0]._engine._pool._workers[0].process
    loaders[0].close()
    assert first.exitcode == 0  # and was not killed because it waited for more
    loaders[1].close()


class Collecting(Drawing):
    """Collects garbage in whichever process reads it."""

    def __getitem__(self, index: int) -> Any:
        gc.collect()
        return index


class Cycle:
    """Garbage that only a collection finds; says where it was found."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        self.path.write_text(str(os.getpid()))


def test_garbage_of_the_trainer_is_not_collected_in_a_worker_that_was_forked_since(tmp_path: Path) -> None:
    """Connections and groups cannot be destroyed in a process that has none of their threads."""
    found_in = tmp_path / "found"
    gc.disable()
    try:
        Cycle(found_in)
        loader = Loader(Collecting(4), 2, num_workers=1, multiprocessing_context="fork", persistent_workers=False)
        assert len(list(loader)) == 2
        assert not found_in.exists()
    finally:
        gc.enable()
    gc.collect()
    assert found_in.read_text() == str(os.getpid())


def test_loader_that_is_closed_lets_workers_finish_and_keeps_what_they_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    loader = Loader(Talking(6), 2, num_workers=1, persistent_workers=False)
    assert [plain(batch) for batch in loader] == [[0, 1], [2, 3], [4, 5]]  # prefetch is only a hint
    assert loader.worker_pids == []
    said = capfd.readouterr()
    assert [f"reads {number}" in said.out for number in range(6)] == [True] * 6
    assert "prefetch fails" in said.out


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_set_back_within_an_accumulation_window_replays_it_whole(num_workers: int) -> None:
    """A position is saved every fourth batch only; the batches of an unfinished window come again, unchanged."""
    loader = Loader(Noise(60), 2, num_workers=num_workers)
    batches = iter(loader)
    for _ in range(4):
        state = loader.state_dict()
        window = [next(batches) for _ in range(4)]
        kept = [batch.clone() for batch in window]
        for batch in window[:2]:
            batch.zero_()
        loader.load_state_dict(state)
        batches = iter(loader)
        assert all(torch.equal(next(batches), batch) for batch in kept)


# -- iterables


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("kind", [Counting, CountingWithState])
def test_loader_of_an_iterable_resumes_anywhere(kind: type[Any], num_workers: int) -> None:
    def make() -> Loader:
        return Loader(kind(25), 3, num_workers=num_workers, epochs=2)

    loader = make()
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(plain(batch)[0])
        states.append(loader.state_dict())
    for epoch in (whole[: len(whole) // 2], whole[len(whole) // 2 :]):
        assert sorted(number for batch in epoch for number in batch) == list(range(25))
    for place in range(0, len(states), 4 if num_workers == 0 else 9):
        resumed = make()
        resumed.load_state_dict(states[place])
        assert [batch[0] for batch in everything(resumed)] == whole[place:]
        resumed.close()


def test_loader_of_an_iterable_with_a_state_reads_nothing_again() -> None:
    loader = Loader(CountingWithState(100), 5, num_workers=1)
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    resumed = Loader(CountingWithState(100), 5, num_workers=1)
    resumed.load_state_dict(loader.state_dict())
    numbers, num_read = plain(next(iter(resumed)))
    assert numbers[0] == 50
    assert num_read[0] == 1


def test_loader_of_an_iterable_without_a_state_says_what_the_way_back_costs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pstate.data.engines.TELL_REPLAY_ABOVE_S", 0.0)
    loader = Loader(Counting(100), 5, num_workers=1)
    batches = iter(loader)
    before = [plain(next(batches)) for _ in range(11)][10]
    resumed = Loader(Counting(100), 5, num_workers=0)
    resumed.load_state_dict({**loader.state_dict()})
    after = plain(next(iter(resumed)))
    assert after[0][0] == before[0][-1] + 1
    assert "read again from its beginning to find the position: 55 samples in" in caplog.text


@pytest.mark.parametrize("kind", [Counting, CountingWithState])
def test_loader_of_an_iterable_whose_worker_is_killed_goes_on_exactly(kind: type[Any]) -> None:
    expected = [batch[0] for batch in everything(Loader(kind(60), 2, num_workers=2, epochs=2))]
    loader = Loader(kind(60), 2, num_workers=2, epochs=2)
    seen = []
    for batch in loader:
        seen.append(plain(batch)[0])
        if len(seen) in (1, 12, 40):
            os.kill(worker_pids(loader)[len(seen) % 2], signal.SIGKILL)
    assert seen == expected


class RaisingStream(Counting):
    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if sample[0] == 7:
                raise ValueError("a broken record")
            yield sample


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_of_an_iterable_that_raises_never_ends_quietly(num_workers: int) -> None:
    batches = iter(Loader(RaisingStream(20), 1, num_workers=num_workers))
    seen = [plain(next(batches))[0][0] for _ in range(7)]
    assert seen == list(range(7))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"sample \d of an iterable data set[\s\S]*a broken record"):
            next(batches)


def test_loader_of_an_iterable_refuses_another_number_of_workers() -> None:
    state = Loader(Counting(20), 2, num_workers=2).state_dict()
    with pytest.raises(ValueError, match="give it num_workers=2"):
        Loader(Counting(20), 2, num_workers=3).load_state_dict(state)


# -- what it tells


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


def is_shared(samples: list[torch.Tensor]) -> bool:
    return torch.utils.data.default_collate(samples).is_shared()


def test_worker_collates_in_memory_of_its_own_so_that_a_killed_one_leaves_no_name_in_dev_shm() -> None:
    with contextlib.closing(
        Loader(list(torch.arange(4.0)), batch_size=2, num_workers=1, collate_fn=is_shared)
    ) as loader:
        assert list(loader) == [False, False]
