"""memory_need: how many bytes the copies take on each node, and what is refused."""

from __future__ import annotations

import pytest

from p2pstate.memory import Bound
from p2pstate.memory_need import RankNeed, bytes_on_nodes, decide
from p2pstate.slots import slot_bytes

GIB = 1 << 30
TWO, FOUR = ["a", "b"], ["a", "b", "c", "d"]


def plenty(nodes: list[str]) -> dict[str, Bound]:
    return dict.fromkeys(nodes, Bound(1 << 50, "the host's available memory"))


@pytest.mark.parametrize(
    ("nodes", "copies", "factor"),
    [
        (TWO, 1, 4),
        (TWO, 3, 4),  # there is one other node only
        (FOUR, 1, 4),
        (FOUR, 2, 6),
        (FOUR, 3, 8),
        (["a"], 1, 2),
        (["a", "a", "b", "b"], 1, 8),  # two ranks on each
    ],
)
def test_unique_bytes_take_two_versions_here_and_at_every_partner(nodes: list[str], copies: int, factor: int) -> None:
    found = bytes_on_nodes([RankNeed(GIB, 0)] * len(nodes), nodes, copies=copies)
    assert found == dict.fromkeys(nodes, factor * slot_bytes(GIB))
    assert slot_bytes(GIB) < 1.02 * GIB


def test_what_others_hold_as_well_takes_two_versions_on_each_node() -> None:
    found = bytes_on_nodes([RankNeed(0, GIB)] * 2, TWO)
    assert found["a"] == 2 * slot_bytes(GIB) + 4 * slot_bytes(0)


def test_writing_to_disk_takes_one_more_of_each() -> None:
    needs = [RankNeed(GIB, GIB // 2)] * 2
    more = bytes_on_nodes(needs, TWO, writes_to_disk=True)["a"] - bytes_on_nodes(needs, TWO)["a"]
    assert more == slot_bytes(GIB) + slot_bytes(GIB // 2)


def test_copies_of_a_larger_shard_are_counted_where_they_are_kept() -> None:
    found = bytes_on_nodes([RankNeed(GIB, 0), RankNeed(0, 0), RankNeed(0, 0), RankNeed(0, 0)], FOUR)
    assert [round(found[node] / GIB, 1) for node in FOUR] == [2.0, 0.0, 2.0, 0.0]


def test_run_that_fits_is_not_refused() -> None:
    assert decide([RankNeed(GIB, GIB)] * 2, TWO, plenty(TWO)).refused == ""


def test_node_with_too_little_is_refused_with_the_figures() -> None:
    rooms = plenty(TWO) | {"b": Bound(3 * GIB, "the memory limit of control group /x, 4096 MiB")}
    decision = decide([RankNeed(GIB, 0)] * 2, TWO, rooms)
    assert decision.refused == (
        "b needs 4160 MiB of host memory to keep 4 bytes per byte of unique state (copies=1), and 3072 MiB are left "
        "(the memory limit of control group /x, 4096 MiB): give the run more memory or more nodes, or divide the state "
        "over more ranks, or allow lean mode (lean='auto')"
    )


def test_run_that_fits_only_without_copies_on_the_own_nodes_is_lean_and_says_why() -> None:
    rooms = plenty(TWO) | {"b": Bound(3 * GIB, "a limit")}
    decision = decide([RankNeed(GIB, 0)] * 2, TWO, rooms, lean="auto")
    assert (decision.refused, decision.lean) == ("", True)
    assert decision.said == (
        "b needs 4160 MiB of host memory to keep 4 bytes per byte of unique state (copies=1), and 3072 MiB are left "
        "(a limit); so each shard is kept on other nodes only (lean mode)"
    )
    assert decide([RankNeed(GIB, 0)] * 2, TWO, plenty(TWO), lean="auto") == decide(
        [RankNeed(GIB, 0)] * 2, TWO, rooms={}
    )
    assert decide([RankNeed(GIB, 0)] * 2, TWO, plenty(TWO), lean=True).lean
    assert decide([RankNeed(GIB, 0)] * 2, TWO, plenty(TWO), lean=True).said == ""


@pytest.mark.parametrize(("copies", "factor"), [(1, 2), (2, 4), (3, 6)])
def test_lean_mode_takes_two_versions_at_every_partner_and_none_here(copies: int, factor: int) -> None:
    found = bytes_on_nodes([RankNeed(GIB, 0)] * 4, FOUR, copies=copies, lean=True)
    assert found == dict.fromkeys(FOUR, factor * slot_bytes(GIB))


def test_node_that_is_alone_keeps_its_own_copies_whatever_the_mode() -> None:
    assert bytes_on_nodes([RankNeed(GIB, 0)], ["a"], lean=True) == {"a": 2 * slot_bytes(GIB)}
    refused = decide([RankNeed(GIB, 0)], ["a"], {"a": Bound(GIB, "a limit")}, lean="auto").refused
    assert refused.startswith("a needs 2080 MiB of host memory to keep 2 bytes per byte of unique state (copies=1)")
    assert "lean" not in refused


def test_run_that_does_not_even_fit_lean_is_refused_with_the_smaller_figure() -> None:
    rooms = plenty(TWO) | {"a": Bound(GIB, "a limit")}
    refused = decide([RankNeed(GIB, 0)] * 2, TWO, rooms, lean="auto").refused
    assert refused.startswith(
        "a needs 2080 MiB of host memory to keep 2 bytes per byte of unique state (copies=1, lean)"
    )


def test_run_that_writes_to_disk_is_never_lean_by_itself() -> None:
    rooms = plenty(TWO) | {"a": Bound(3 * GIB, "a limit")}
    assert "4 bytes" in decide([RankNeed(GIB, 0)] * 2, TWO, rooms, lean="auto", writes_to_disk=True).refused


def test_optimizer_state_to_come_needs_room_beside_the_copies() -> None:
    rooms = dict.fromkeys(TWO, Bound(5 * GIB, "the host's available memory"))
    assert decide([RankNeed(GIB, 0)] * 2, TWO, rooms).refused == ""
    decision = decide([RankNeed(GIB, 0, live_bytes=GIB)] * 2, TWO, rooms)
    assert "and 1024 MiB for optimizer state that is yet to come" in decision.refused


def test_rank_whose_own_limit_is_too_small_is_refused() -> None:
    needs = [RankNeed(GIB, 0), RankNeed(GIB, 0, address_space=Bound(GIB, "the process's address space (ulimit -v)"))]
    decision = decide(needs, TWO, plenty(TWO))
    assert decision.refused.startswith("rank 1 (b) needs 4160 MiB")
    assert "ulimit -v" in decision.refused
