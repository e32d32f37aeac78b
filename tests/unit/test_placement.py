"""placement: partners on other nodes, balanced, in groups; what labels and numbers allow is given, the rest is said."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstate.placement import MAX_COPIES, partners, wards, weaknesses

COPIES = st.integers(1, MAX_COPIES)
LABELS = st.lists(
    st.fixed_dictionaries({}, optional={"rack": st.sampled_from("abc"), "zone": st.sampled_from("xy")}),
    min_size=2,
    max_size=13,
)


def nodes(num_nodes: int, num_workers: int = 1) -> list[str]:
    return [f"n{rank // num_workers}" for rank in range(num_nodes * num_workers)]


def labelled(racks: str, key: str = "rack") -> dict[str, dict[str, str]]:
    """One letter a node."""
    return {f"n{index}": {key: rack} for index, rack in enumerate(racks)}


def holders(names: list[str], found: list[tuple[int, ...]]) -> list[set[str]]:
    """Of every rank, the nodes that have its shard."""
    return [{names[rank], *(names[keeper] for keeper in keepers)} for rank, keepers in enumerate(found)]


@settings(max_examples=200)
@given(LABELS, st.integers(1, 4), COPIES)
def test_partners_whatever_the_labels_are_on_other_nodes_and_balanced(
    labels: list[dict[str, str]], num_workers: int, copies: int
) -> None:
    names = nodes(len(labels), num_workers)
    found = partners(names, copies, {f"n{index}": each for index, each in enumerate(labels)})
    num_copies = min(copies, len(labels) - 1)
    assert all(len(kept) == num_copies + 1 for kept in holders(names, found)), "not each on a node of its own"
    assert Counter(keeper for keepers in found for keeper in keepers) == dict.fromkeys(range(len(names)), num_copies)
    inverse = wards(found)
    assert all(rank in inverse[keeper] for rank, keepers in enumerate(found) for keeper in keepers)
    assert all(len(each) == num_copies for each in inverse)


@settings(max_examples=100)
@given(LABELS, COPIES)
def test_partners_whatever_copies_nodes_die_keep_every_shard(labels: list[dict[str, str]], copies: int) -> None:
    names = nodes(len(labels))
    kept = holders(names, partners(names, copies, {f"n{index}": each for index, each in enumerate(labels)}))
    num_lost = min(copies, len(labels) - 1)
    for lost in itertools.combinations(names, num_lost):
        assert all(nodes_of_shard - set(lost) for nodes_of_shard in kept), f"{lost} took a shard with them"


@pytest.mark.parametrize("copies", range(1, MAX_COPIES + 1))
@pytest.mark.parametrize("num_nodes", range(2, 14))
def test_partners_form_groups_of_copies_plus_one_and_only_leftovers_make_them_larger(
    num_nodes: int, copies: int
) -> None:
    names = nodes(num_nodes)
    kept = holders(names, partners(names, copies))
    groups: list[set[str]] = []
    for nodes_of_shard in kept:
        touching = [group for group in groups if group & nodes_of_shard]
        groups = [group for group in groups if group not in touching] + [set().union(nodes_of_shard, *touching)]
    size = copies + 1
    assert len(groups) == max(1, num_nodes // size)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    if num_nodes % size == 0:
        assert all(kept[int(node[1:])] == group for group in groups for node in group), (
            "each keeps what all others have"
        )


@settings(max_examples=200)
@given(LABELS, COPIES)
def test_partners_of_a_rack_that_is_not_too_large_are_in_other_racks(labels: list[dict[str, str]], copies: int) -> None:
    """A rack with as many nodes as there are groups holds one copy of each shard at most; with ``copies`` times as
    many its loss still loses nothing. The same goes for zones."""
    names = nodes(len(labels))
    named = {f"n{index}": each for index, each in enumerate(labels)}
    kept = holders(names, partners(names, copies, named))
    num_groups = max(1, len(labels) // (copies + 1))
    for key in ("zone", "rack"):
        # The same rack name in two zones is two racks.
        domains: dict[tuple[str | None, ...], set[str]] = {}
        for node, each in named.items():
            if key in each:
                domains.setdefault((each.get("zone") if key == "rack" else None, each[key]), set()).add(node)
        for members in domains.values():
            if len(members) <= num_groups:
                assert all(len(nodes_of_shard & members) <= 1 for nodes_of_shard in kept), (key, members)
            if len(members) <= copies * num_groups and copies < len(labels):
                assert all(nodes_of_shard - members for nodes_of_shard in kept), (key, members)


@pytest.mark.parametrize(("num_nodes", "num_neighbours"), [(4, 2), (8, 2), (8, 4), (9, 3)])
def test_partners_without_labels_are_in_no_parallel_group_of_neighbours(num_nodes: int, num_neighbours: int) -> None:
    found = partners(nodes(num_nodes))
    assert all(keeper // num_neighbours != rank // num_neighbours for rank, (keeper,) in enumerate(found))


@pytest.mark.parametrize(
    ("num_nodes", "copies", "labels", "expected"),
    [
        (1, 1, {}, [()]),
        (2, 1, {}, [(1,), (0,)]),
        (2, 3, {}, [(1,), (0,)]),
        (3, 1, {}, [(1,), (2,), (0,)]),
        (3, 2, {}, [(1, 2), (2, 0), (0, 1)]),
        (4, 1, {}, [(2,), (3,), (0,), (1,)]),
        (5, 1, {}, [(2,), (3,), (4,), (1,), (0,)]),
        (4, 1, labelled("aabb"), [(2,), (3,), (0,), (1,)]),
        (4, 1, labelled("abab"), [(1,), (0,), (3,), (2,)]),
        (4, 1, labelled("aabb", "zone"), [(2,), (3,), (0,), (1,)]),
        (5, 2, labelled("aaabb"), [(3, 1), (4, 2), (0, 3), (1, 4), (2, 0)]),
    ],
)
def test_partners_table_of_cases(
    num_nodes: int, copies: int, labels: Mapping[str, Mapping[str, str]], expected: list[tuple[int, ...]]
) -> None:
    assert partners(nodes(num_nodes), copies, labels) == expected


def test_partners_in_a_crowded_rack_still_survive_its_loss_where_a_ring_allows() -> None:
    labels = labelled("aaabb")
    assert all(
        any(labels[node]["rack"] == "b" for node in kept) for kept in holders(nodes(5), partners(nodes(5), 2, labels))
    )
    assert weaknesses(nodes(5), 2, labels) == []


def test_partners_of_nodes_of_different_size_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="same number of workers, and a has 2, b has 1"):
        partners(["a", "a", "b"])


@pytest.mark.parametrize("copies", [0, -1, MAX_COPIES + 1])
def test_partners_of_an_impossible_number_of_copies_are_refused(copies: int) -> None:
    with pytest.raises(ValueError, match=f"copies={copies}: 1 to 3"):
        partners(nodes(8), copies)


@pytest.mark.parametrize(
    ("num_nodes", "copies", "labels", "sentences"),
    [
        (2, 1, {}, []),
        (1, 1, {}, ["n0 is the only node"]),
        (2, 2, {}, ["copies=2 needs 3 nodes and there are 2: each shard has 1"]),
        (4, 1, labelled("aabb"), []),
        (4, 1, labelled("aaab"), ["rack a holds so many"]),
        (2, 1, labelled("xx", "zone"), ["zone x holds so many"]),
        (2, 1, {"n0": {"zone": "x", "rack": "a"}, "n1": {"zone": "x", "rack": "b"}}, ["zone x holds so many"]),
        (2, 1, {"n0": {"zone": "x", "rack": "a"}, "n1": {"zone": "y", "rack": "a"}}, []),
    ],
)
def test_weaknesses_say_what_the_nodes_cannot_give(
    num_nodes: int, copies: int, labels: Mapping[str, Mapping[str, str]], sentences: list[str]
) -> None:
    found = weaknesses(nodes(num_nodes), copies, labels)
    assert [said[: len(expected)] for said, expected in zip(found, sentences, strict=True)] == sentences
