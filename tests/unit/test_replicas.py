"""replicas: which ranks differ, and what becomes of leaves that were never alike."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

from p2pstate.replicas import NUM_CONFIRMATIONS, Difference, Replicas, differences
from p2pstate.state import Collected, Leaf

DEADLINE_S = 30.0
ALL = (0, 1, 2)


@pytest.mark.parametrize(
    ("digests", "ranks"),
    [
        ([b"a", b"a", b"a"], None),
        ([b"a", b"b", b"a"], (1,)),
        ([b"a", b"b", b"c"], ALL),
        ([b"a", None, b"a"], (1,)),  # it does not have the leaf
    ],
)
def test_rank_that_differs_from_most_is_found(digests: list[bytes | None], ranks: tuple[int, ...] | None) -> None:
    said = {rank: {"x": digest} if digest else {} for rank, digest in enumerate(digests)}
    assert differences(ALL, said) == ([] if ranks is None else [Difference(ALL, ranks, ("x",))])


def test_of_two_ranks_nobody_can_tell_which_is_right() -> None:
    (found,) = differences((0, 1), {0: {"x": b"a"}, 1: {"x": b"b"}})
    assert not found.majority
    assert str(found) == "x differs between ranks 0, 1, without a majority"


def test_leaves_that_differ_in_the_same_ranks_are_told_together() -> None:
    said = {rank: {"x": b"a", "y": b"b", "z": b"c"} for rank in ALL}
    said[2] = {"x": b"!", "y": b"b", "z": b"!"}
    (found,) = differences(ALL, said)
    assert found == Difference(ALL, (2,), ("x", "z"))
    assert str(found) == "x (and 1 more) of rank 2 differs from that of the other 2"


def collected(rank: int, *, weight: float = 1.0, sets: dict[str, tuple[int, ...]]) -> Collected:
    leaves = [Leaf(name, torch.full((5,), weight), members) for name, members in sorted(sets.items())]
    leaves.append(Leaf("rng", torch.full((3,), float(rank)), (rank,)))
    return Collected(leaves, b"values", {})


def compare_all(replicas: list[Replicas], states: list[Collected]) -> list[list[Difference]]:
    store = HashStore()

    def one(rank: int) -> list[Difference]:
        return replicas[rank].compare(states[rank], store, DEADLINE_S)

    with ThreadPoolExecutor(len(replicas)) as pool:
        return list(pool.map(one, range(len(replicas))))


def test_memory_that_was_compared_can_be_freed_afterwards() -> None:
    """As FSDP1 and offloading do, between steps."""
    state = collected(0, sets={"weight": (0, 1)})
    compare_all([Replicas(0, 0), Replicas(1, 0)], [state, collected(1, sets={"weight": (0, 1)})])
    state.leaves[0].tensor.untyped_storage().resize_(0)


def test_leaf_that_was_never_alike_is_each_ranks_own_from_then_on() -> None:
    replicas = [Replicas(rank, 0) for rank in ALL]
    sets = {"model/a": ALL}
    states = [collected(rank, weight=float(rank), sets=sets) for rank in ALL]
    assert compare_all(replicas, states) == [[Difference(ALL, ALL, ("model/a",))]] * 3
    for rank in ALL:
        holders = {leaf.name: leaf.holders for leaf in replicas[rank].applied(states[rank]).leaves}
        assert holders == {"model/a": (rank,), "rng": (rank,)}
    assert compare_all(replicas, states) == [[]] * 3, "it is known by now"


def test_one_rank_in_several_sets_compares_each() -> None:
    pairs = [(0, 2), (1, 3)]
    replicas = [Replicas(rank, 0) for rank in range(4)]
    states = [
        collected(rank, weight=float(rank == 3), sets={"model/s": pairs[rank % 2], "model/z": (0, 1, 2, 3)})
        for rank in range(4)
    ]
    found = compare_all(replicas, states)
    everywhere = Difference((0, 1, 2, 3), (3,), ("model/z",))
    pair = Difference((1, 3), (1, 3), ("model/s",))
    assert found == [[everywhere], [everywhere, pair], [everywhere], [everywhere, pair]]


def test_after_the_first_steps_what_differs_is_reported_and_stays_shared() -> None:
    replicas, sets = [Replicas(rank, 5) for rank in ALL], {"model/a": ALL}
    states = [collected(rank, sets=sets) for rank in ALL]
    for _ in range(NUM_CONFIRMATIONS):
        assert replicas[0].is_due(3)
        assert compare_all(replicas, states) == [[]] * 3
    assert [step for step in range(3, 16) if replicas[0].is_due(step)] == [5, 10, 15]
    states[1] = collected(1, weight=2.0, sets=sets)
    assert compare_all(replicas, states) == [[Difference(ALL, (1,), ("model/a",))]] * 3
    assert replicas[0].applied(states[0]) is states[0]


def test_ranks_that_begin_to_train_apart_have_leaves_of_their_own_from_then_on() -> None:
    replicas, sets = [Replicas(rank, 0) for rank in ALL], {"model/a": ALL, "model/b": ALL}
    states = [collected(rank, sets=sets) for rank in ALL]
    for _ in range(NUM_CONFIRMATIONS):
        compare_all(replicas, states)
    assert not replicas[0].is_due(4)
    for each in replicas:
        each.reconfirm()
    assert all(each.is_due(4) and each.confirming for each in replicas)
    states = [
        replace(each, leaves=each.leaves[:1] + collected(rank, weight=rank, sets=sets).leaves[1:])
        for rank, each in enumerate(states)
    ]
    assert compare_all(replicas, states) == [[Difference(ALL, ALL, ("model/b",))]] * 3
    assert [leaf.holders for leaf in replicas[1].applied(states[1]).leaves] == [ALL, (1,), (1,)]
    assert not replicas[0].is_due(5)


def test_rank_that_joins_learns_from_those_that_were_there() -> None:
    replicas, sets = [Replicas(rank, 0) for rank in ALL], {"model/a": ALL}
    states = [collected(rank, weight=float(rank == 2), sets=sets) for rank in ALL]
    compare_all(replicas, states)
    newcomer = Replicas(1, 0)
    newcomer.adopt([replicas[0].pack(), replicas[2].pack()])
    assert newcomer.pack() == replicas[1].pack()
    assert newcomer.applied(states[1]).leaves[0].holders == (1,)
    alone = Replicas(1, 0)
    alone.adopt([])
    assert alone.pack() == Replicas(1, 0).pack()


def test_ranks_without_leaves_that_others_hold_meet_nobody() -> None:
    assert Replicas(0, 0).compare(collected(0, sets={}), HashStore(), DEADLINE_S) == []
