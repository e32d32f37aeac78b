"""placement.buddies: every rank one buddy and one ward, on another node, nodes in pairs."""

from __future__ import annotations

import pytest

from p2pstate.placement import buddies, wards


def nodes(num_nodes: int, num_workers: int) -> list[str]:
    return [f"n{rank // num_workers}" for rank in range(num_nodes * num_workers)]


@pytest.mark.parametrize("num_nodes", range(2, 10))
@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_buddies_of_several_nodes_are_a_permutation_onto_other_nodes(num_nodes: int, num_workers: int) -> None:
    names = nodes(num_nodes, num_workers)
    found = buddies(names)
    assert sorted(b for b in found if b is not None) == list(range(len(names)))
    for rank, buddy in enumerate(found):
        assert buddy is not None
        assert names[buddy] != names[rank]
        assert wards(found)[buddy] == rank


def test_buddies_of_an_even_number_of_nodes_are_mutual() -> None:
    found = buddies(nodes(6, 2))
    assert all(found[buddy] == rank for rank, buddy in enumerate(found) if buddy is not None)


def test_buddies_of_one_node_are_missing() -> None:
    assert buddies(nodes(1, 3)) == [None] * 3


def test_buddies_of_nodes_of_different_size_are_refused() -> None:
    with pytest.raises(ValueError, match="same number of workers"):
        buddies(["a", "a", "b"])
