"""What counts as held elsewhere; the division of shared leaves is complete, balanced and the same everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstate.redundancy import divide, is_held_elsewhere

SPECS = st.dictionaries(st.text(max_size=4), st.integers(0, 1 << 40), max_size=40).map(lambda d: list(d.items()))


@settings(max_examples=200)
@given(SPECS, st.integers(1, 9), st.randoms(use_true_random=False))
def test_divide_any_leaves_gives_a_complete_balanced_division(specs, num_parts, source) -> None:
    parts = divide(specs, num_parts)
    assert len(parts) == num_parts
    assert sorted(name for part in parts for name in part) == sorted(name for name, _ in specs)
    assert all(part == sorted(part) for part in parts)
    sizes = dict(specs)
    loads = [sum(sizes[name] for name in part) for part in parts]
    biggest = max(sizes.values(), default=0)
    assert max(loads) - min(loads) <= biggest
    shuffled = specs[:]
    source.shuffle(shuffled)
    assert divide(shuffled, num_parts) == parts


@pytest.mark.parametrize(
    ("specs", "num_parts", "parts"),
    [
        ([], 2, [[], []]),
        ([("a", 5)], 1, [["a"]]),
        ([("a", 5)], 3, [["a"], [], []]),
        ([("a", 1), ("b", 2), ("c", 3)], 2, [["c"], ["a", "b"]]),
        ([("a", 0), ("b", 0), ("c", 0), ("d", 0)], 2, [["a", "c"], ["b", "d"]]),
        ([("w", 7), ("x", 7), ("y", 7), ("z", 7)], 2, [["w", "y"], ["x", "z"]]),
    ],
)
def test_divide_table_of_cases(specs: list[tuple[str, int]], num_parts: int, parts: list[list[str]]) -> None:
    assert divide(specs, num_parts) == parts


@pytest.mark.parametrize(
    ("specs", "num_parts", "sentence"),
    [([], 0, "at least 1"), ([("a", 1), ("a", 2)], 2, "twice"), ([("a", -1)], 2, "negative")],
)
def test_divide_of_nonsense_is_refused(specs: list[tuple[str, int]], num_parts: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        divide(specs, num_parts)


TWO_NODES, ONE_NODE = (0, 0, 1, 1), (0, 0)


@pytest.mark.parametrize(
    ("holders", "places", "expected"),
    [
        ((0,), TWO_NODES, False),
        ((0, 1), TWO_NODES, False),  # they die together
        ((0, 2), TWO_NODES, True),
        ((0, 1, 2, 3), TWO_NODES, True),
        ((0,), ONE_NODE, False),
        ((0, 1), ONE_NODE, True),  # against the death of a process, which is all that is to be had there
    ],
)
def test_bytes_are_held_elsewhere_if_no_node_takes_all_of_their_holders(
    holders: tuple[int, ...], places: tuple[int, ...], expected: bool
) -> None:
    assert is_held_elsewhere(holders, places) is expected
