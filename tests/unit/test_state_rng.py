"""Every random stream of the process continues exactly, and reading one draws nothing from it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from state_zoo import image_of, restore

from p2pstate.state import LeafError, TrainingState
from p2pstate.state import rng as streams
from p2pstate.state.codec import decode, encode


def draws() -> list[Any]:
    python = [random.random(), random.gauss(0, 1), random.randrange(10**30)]
    numpy = [np.random.rand(), np.random.randn(), np.random.permutation(5).tolist()]
    return [python, numpy, torch.rand(3).tolist(), torch.randn(2).tolist(), torch.nn.Dropout()(torch.ones(20)).tolist()]


@pytest.fixture(autouse=True)
def _streams_left_as_they_were() -> Any:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def test_restore_of_all_streams_repeats_the_draws() -> None:
    state = TrainingState([], [], {})
    draws()  # leaves the second half of a pair of normal numbers behind in each stream
    image = image_of(state)
    wanted = [draws() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    restore(state, image)
    assert [draws() for _ in range(3)] == wanted


def test_collect_and_restore_draw_nothing() -> None:
    state = TrainingState([torch.nn.Linear(2, 2)], [], {})
    image = image_of(state)
    before = encode(streams.capture())
    state.collect()
    assert encode(streams.capture()) == before
    restore(state, image)
    assert encode(streams.capture()) == before
    draws()
    assert encode(streams.capture()) != before


def test_equal_streams_give_equal_bytes() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    one = encode(streams.capture())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert encode(streams.capture()) == one


def test_capture_is_plain_and_restores_after_its_round_trip() -> None:
    value = decode(encode(streams.capture()))
    wanted = draws()
    streams.restore(value)
    assert draws() == wanted


def test_state_without_rng_leaves_the_streams_alone() -> None:
    state = TrainingState([], [], {}, rng=False)
    image = image_of(state)
    torch.manual_seed(9)
    wanted = torch.rand(2).tolist()
    torch.manual_seed(9)
    restore(state, image)
    assert torch.rand(2).tolist() == wanted


@pytest.mark.parametrize("owner_has_rng", [True, False])
def test_restore_with_rng_on_one_side_only_is_refused(owner_has_rng: bool) -> None:
    image = image_of(TrainingState([], [], {}, rng=owner_has_rng))
    with pytest.raises(LeafError) as caught:
        restore(TrainingState([], [], {}, rng=not owner_has_rng), image)
    assert caught.value.name == "rng"


@pytest.mark.parametrize("part", ["python", "numpy", "torch"])
@pytest.mark.parametrize("damage", [None, b"", (3, b"abc", None), {"bit_generator": "PCG64"}])
def test_restore_of_a_damaged_stream_is_an_error(part: str, damage: Any) -> None:
    with pytest.raises(LeafError, match="cannot be set"):
        streams.restore({**streams.capture(), part: damage})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_restore_of_a_cuda_stream_without_a_device_is_refused_before_any_write() -> None:
    with pytest.raises(LeafError) as caught:
        streams.check({**streams.capture(), "cuda": b"\0" * 16})
    assert caught.value.name == "rng/cuda"
