"""Orders, their division over ranks, and positions that are saved and taken up again."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstate.data import Mixture, Sampler, Shuffled
from p2pstate.data.order import BLOCK, Order
from p2pstate.data.permutation import Permutation
from p2pstate.data.split import TAILS, Split

SIZES = st.integers(1, 2000)
SEEDS = st.integers(-(2**70), 2**70)


def drawn(order: Order, epoch: int = 0) -> list[int]:
    return order.draw(epoch, np.arange(order.num_samples))[0].tolist()


# -- permutations


@given(size=SIZES, seed=SEEDS, epoch=st.integers(0, 10**9))
def test_permutation_of_any_size_hits_every_element_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(size, seed, epoch)(np.arange(size)).tolist()) == list(range(size))


@given(size=st.integers(1, (1 << 62) - 1), places=st.lists(st.integers(0, (1 << 62) - 1), min_size=1, unique=True))
def test_permutation_of_a_huge_size_stays_within_it_and_never_repeats(size: int, places: list[int]) -> None:
    asked = np.unique(np.asarray(places) % size)
    found = Permutation(size, 3)(asked)
    assert len(np.unique(found)) == len(asked)
    assert 0 <= found.min() <= found.max() < size


def test_permutation_element_is_the_same_alone_and_among_others() -> None:
    permutation = Permutation(10_007, 5)
    everything = permutation(np.arange(10_007))
    assert all(permutation(np.array([place]))[0] == everything[place] for place in range(0, 10_007, 101))


def test_permutation_is_the_same_on_every_machine() -> None:
    assert Permutation(1_000_000, 7, 1)(np.arange(4)).tolist() == [589197, 471791, 108961, 924441]


def test_permutations_of_four_elements_are_all_about_equally_frequent() -> None:
    count = Counter(tuple(Permutation(4, seed)(np.arange(4)).tolist()) for seed in range(2400))
    assert set(count) == set(permutations(range(4)))
    assert 50 < min(count.values()) <= max(count.values()) < 150  # 100 expected, standard deviation 10


def test_permutation_looks_random_to_neighbours_and_epochs() -> None:
    first, second = (Permutation(1_000_003, 1, epoch)(np.arange(20_000)).astype(float) for epoch in (1, 2))
    for left, right in ((first[1:], first[:-1]), (first, second), (first, np.arange(20_000))):
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.04  # 5 standard deviations of 20,000 independent pairs


def test_permutation_of_nothing_or_outside_its_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be"):
        Permutation(0)
    for outside in (-1, 10):
        with pytest.raises(ValueError, match="not all within"):
            Permutation(10)(np.array([outside]))


# -- orders


def test_order_of_a_trillion_samples_needs_no_memory() -> None:
    order = Shuffled(10**12, seed=1)
    tracemalloc.start()
    first = order.draw(3, np.arange(10**12 - 64, 10**12))[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(first.tolist())) == 64
    assert peak < 100_000


def test_order_not_shuffled_counts_up() -> None:
    assert drawn(Shuffled(9, shuffle=False), epoch=4) == list(range(9))


def test_order_differs_by_epoch_and_seed_and_repeats_with_them() -> None:
    assert drawn(Shuffled(100, seed=1), 0) == drawn(Shuffled(100, seed=1), 0)
    assert drawn(Shuffled(100, seed=1), 0) != drawn(Shuffled(100, seed=1), 1)
    assert drawn(Shuffled(100, seed=1), 0) != drawn(Shuffled(100, seed=2), 0)


@given(
    sources=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 50)), min_size=1, max_size=6),
    seed=SEEDS,
    epoch_length=st.integers(100, 3000),
)
@settings(max_examples=40)
def test_mixture_takes_each_source_in_whole_passes_and_its_share(
    sources: list[tuple[int, int]], seed: int, epoch_length: int
) -> None:
    sizes, weights = [size for size, _ in sources], [weight for _, weight in sources]
    order = Mixture(sizes, weights, num_samples=epoch_length, seed=seed)
    num_epochs = -(-2 * BLOCK // epoch_length)
    draws = [order.draw(epoch, np.arange(epoch_length)) for epoch in range(num_epochs)]
    indices = np.concatenate([draw[0] for draw in draws])
    passes = np.concatenate([draw[1] for draw in draws])
    bounds = np.cumsum([0, *sizes])
    for number, size in enumerate(sizes):
        mine = (indices >= bounds[number]) & (indices < bounds[number + 1])
        share = weights[number] / sum(weights)
        assert abs(int(mine[:BLOCK].sum()) - share * BLOCK) < 1
        own = (indices[mine] - bounds[number]).tolist()
        for start in range(0, len(own), size):
            whole = own[start : start + size]
            assert len(set(whole)) == len(whole), "a sample twice within one pass"
            assert set(passes[mine][start : start + size].tolist()) == {start // size}


def a_mixture(num_samples: int) -> Mixture:
    return Mixture([100, 7, 5000], [1, 2, 0.5], num_samples=num_samples, seed=9)


@cache
def four_thousand_draws() -> tuple[list[int], list[int]]:
    indices, passes = a_mixture(4000).draw(0, np.arange(4000))
    return indices.tolist(), passes.tolist()


@given(at=st.lists(st.integers(0, 3999), min_size=1, max_size=20))
@settings(max_examples=20)
def test_mixture_draw_is_the_same_alone_and_among_others(at: list[int]) -> None:
    indices, passes = a_mixture(4000).draw(0, np.asarray(at))
    expected = four_thousand_draws()
    assert indices.tolist() == [expected[0][each] for each in at]
    assert passes.tolist() == [expected[1][each] for each in at]


@pytest.mark.parametrize("epoch_length", [1, 7, 1000, 1333])
def test_mixture_epochs_of_any_length_are_cut_from_the_same_draws(epoch_length: int) -> None:
    order = a_mixture(epoch_length)
    for epoch in range(max(0, BLOCK // epoch_length - 3), BLOCK // epoch_length + 3):
        start = epoch * epoch_length
        indices, passes = order.draw(epoch, np.arange(epoch_length))
        expected = [draws[start : start + epoch_length] for draws in four_thousand_draws()]
        num_known = len(expected[0])
        assert [indices[:num_known].tolist(), passes[:num_known].tolist()] == expected


@pytest.mark.parametrize(
    ("sizes", "weights", "sentence"),
    [
        ([1, 2], [1], "one weight per source"),
        ([], [], "one weight per source"),
        ([1, 2], [1, -1], "none may be negative"),
        ([1, 2], [0, 0], "one must be positive"),
        ([1, 2], [1, 1e-6], "less than one draw in 1024"),
        ([1, 0], [1, 1], "source 1 of weight 1 has 0 samples"),
        ([1, 2], [1, float("nan")], "none may be negative or infinite"),
    ],
)
def test_mixture_that_cannot_be_met_says_so(sizes: list[int], weights: list[float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Mixture(sizes, weights)


# -- ranks


def all_ranks(num_samples: int, batch: int, num_ranks: int, tail: str, start: int = 0) -> list[list[list[int]]]:
    """rank -> batches of positions, from the global position ``start``."""
    found = []
    for rank in range(num_ranks):
        split, at, batches = Split(num_samples, batch, rank, num_ranks, tail), start, []
        while (positions := split.positions(at)) is not None:
            batches.append(positions.tolist())
            at = split.after(at)
        assert len(batches) == split.num_batches(start)
        found.append(batches)
    return found


@given(
    num_samples=st.integers(1, 300),
    batch=st.integers(1, 9),
    num_ranks=st.integers(1, 7),
    tail=st.sampled_from(TAILS),
)
def test_split_gives_each_position_once_and_its_tail_as_named(
    num_samples: int, batch: int, num_ranks: int, tail: str
) -> None:
    if tail == "drop" and num_samples < batch * num_ranks:
        with pytest.raises(ValueError, match="do not fill one batch"):
            Split(num_samples, batch, 0, num_ranks, tail)
        return
    ranks = all_ranks(num_samples, batch, num_ranks, tail)
    count = Counter(position for batches in ranks for one in batches for position in one)
    whole = num_samples - num_samples % (batch * num_ranks)
    if tail == "uneven":
        assert count == Counter(range(num_samples))
    elif tail == "drop":
        assert count == Counter(range(whole))
    else:
        assert set(count) == set(range(num_samples))
    if tail != "uneven":
        assert len({len(batches) for batches in ranks}) == 1
        assert {len(one) for batches in ranks for one in batches} <= {batch}


@given(
    num_samples=st.integers(30, 300),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=5),
)
def test_split_over_other_numbers_of_ranks_goes_through_the_same_global_order(
    num_samples: int, sizes: list[tuple[int, int, int]]
) -> None:
    """Each stage: so many batches of this size on so many ranks; the last one goes on to the end."""
    seen: list[int] = []
    at = 0
    for batch, num_ranks, num_steps in sizes:
        for _ in range(num_steps):
            splits = [Split(num_samples, batch, rank, num_ranks, "uneven") for rank in range(num_ranks)]
            parts = [split.positions(at) for split in splits]
            seen += sorted(position for part in parts if part is not None for position in part.tolist())
            (at,) = {split.after(at) for split in splits}
            assert seen == list(range(at))
    for batches in all_ranks(num_samples, 3, 2, "uneven", at):
        seen += [position for one in batches for position in one]
    assert sorted(seen) == list(range(num_samples))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((10, 0), "at least one sample"),
        ((10, 2.5), "batch_size=2.5: give a whole number"),
        ((10, 1, 2, 2), "ranks count from 0"),
        ((10, 1, -1, 2), "ranks count from 0"),
        ((10, 1, 0, 1, "keep"), "choose one of drop, pad, uneven"),
    ],
)
def test_split_that_makes_no_sense_is_refused(arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Split(*arguments)


# -- positions


@pytest.mark.parametrize("order", [Shuffled(64, seed=3), Mixture([40, 24, 5], [3, 2, 1], num_samples=64, seed=3)])
def test_sampler_killed_again_and_again_goes_through_every_epoch_as_if_it_had_not_been(order: Order) -> None:
    twin = Sampler(order, 4)
    undisturbed = [list(twin) for _ in range(3)]
    seen: list[list[int]] = []
    state = Sampler(order, 4).state_dict()
    for batches_until_killed in (5, 3, 1, 1, 10, 12, 7, 100):
        sampler = Sampler(order, 4)
        sampler.load_state_dict(state)
        for _ in range(3):
            for number, batch in enumerate(sampler, 1):
                seen.append(batch)
                state = sampler.state_dict()
                np.random.random()  # draws of other code change nothing
                if number == batches_until_killed:
                    break
            else:
                state = sampler.state_dict()
                continue
            break
        if len(seen) >= 48:
            break
    assert seen[:48] == [batch for epoch in undisturbed for batch in epoch]


def test_sampler_of_three_ranks_goes_on_with_two_through_the_same_order() -> None:
    order = Shuffled(50, seed=2)
    three = [iter(Sampler(order, 2, rank=rank, num_ranks=3, tail="uneven")) for rank in range(3)]
    seen = [index for _ in range(4) for rank in three for index in next(rank)]
    state = {"order": order.identity, "epoch": 0, "samples": 24}
    for rank in range(2):
        sampler = Sampler(order, 5, rank=rank, num_ranks=2, tail="uneven")
        sampler.load_state_dict(state)
        seen += [index for batch in sampler for index in batch]
        assert sampler.state_dict()["epoch"] == 1
    assert sorted(seen) == list(range(50))


def test_sampler_refuses_a_position_in_another_order() -> None:
    state = Sampler(Shuffled(50, seed=2), 5).state_dict()
    for other in (Shuffled(50, seed=3), Shuffled(51, seed=2), Shuffled(50, shuffle=False), Mixture([50], [1], seed=2)):
        with pytest.raises(ValueError, match="samples would be lost or repeated"):
            Sampler(other, 5).load_state_dict(state)
    for damaged in (None, {"order": state["order"]}, {**state, "samples": 51}, {**state, "epoch": -1}):
        with pytest.raises(ValueError, match=r"is no position of a Sampler|position is damaged"):
            Sampler(Shuffled(50, seed=2), 5).load_state_dict(damaged)  # type: ignore[arg-type]


def test_sampler_length_is_that_of_an_epoch() -> None:
    assert len(Sampler(Shuffled(23), 4)) == 5
    assert len(Sampler(Shuffled(23), 4, tail="pad")) == 6
