"""A Loader of an iterable data set: resumed anywhere, with a state of the data set or by reading again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from loader_data import Counting, CountingByEpochs, CountingWithState, everything, plain, worker_pids

from p2pstate.data import Loader

pytestmark = pytest.mark.usefixtures("closed_loaders")


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("kind", [Counting, CountingWithState, CountingByEpochs])
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
    half = len(whole) // 2  # the last batch of an epoch is a smaller one
    for place in sorted({*range(0, len(states), 4 if num_workers == 0 else 9), half, half + 1}):
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


@pytest.mark.parametrize("kind", [Counting, CountingWithState, CountingByEpochs])
def test_loader_of_an_iterable_whose_worker_is_killed_goes_on_exactly(kind: type[Any]) -> None:
    expected = [batch[0] for batch in everything(Loader(kind(61), 2, num_workers=2, epochs=2))]
    loader = Loader(kind(61), 2, num_workers=2, epochs=2)
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
