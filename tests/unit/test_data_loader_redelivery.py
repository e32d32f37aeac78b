"""A Loader that is set back: the same bytes again, whatever was done to the batches."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.utils.data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loader_data import Drawing, Noise, everything, plain, worker_pids

from p2pstate.data import Loader

pytestmark = pytest.mark.usefixtures("closed_loaders")


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
