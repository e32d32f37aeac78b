"""A Loader in the place of torch's: epochs, samplers, and positions that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from loader_data import NUM_SAMPLES, Counting, Drawing, everything, indices, plain
from torch.utils.data import DistributedSampler, RandomSampler

from p2pstate.data import Loader, Sampler, Shuffled

pytestmark = pytest.mark.usefixtures("closed_loaders")


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
