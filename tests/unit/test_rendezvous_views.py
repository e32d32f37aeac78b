"""Whose votes are enough, and which view comes next."""

from __future__ import annotations

import itertools

import pytest

from rendezvous.types import Member, MemberKey, Role, View
from rendezvous.views import Plan, Sizes, has_quorum, make_view, natural, plan_view


def member(name: str, incarnation: int = 1, *, role: Role = Role.NODE, num_workers: int = 2) -> Member:
    return Member(name, incarnation, "127.0.0.1:7001", role, num_workers)


def view_of(places: str, spares: str = "", witnesses: str = "", *, epoch: int = 5, round_: int = 3) -> View:
    return View(
        "nonce",
        epoch,
        round_,
        tuple(map(member, places)),
        tuple(map(member, spares)),
        tuple(member(name, role=Role.WITNESS) for name in witnesses),
        "because",
    )


def keys(names: str) -> frozenset[MemberKey]:
    return frozenset(MemberKey(name, 1) for name in names)


ANY = Sizes(1, 9, 9)


@pytest.mark.parametrize(
    ("voters", "votes", "gone", "fenced", "enough"),
    [
        ("abc", "ab", "", "", True),
        ("abc", "a", "", "", False),
        ("abc", "a", "bc", "", False),
        ("abcd", "ab", "", "", False),
        ("abcd", "ab", "c", "", False),
        ("abcd", "ab", "cd", "", True),
        ("ab", "a", "", "", False),
        ("ab", "a", "b", "", True),
        ("ab", "axyz", "", "", False),
        ("a", "a", "", "", True),
        ("a", "", "a", "", False),
        ("abc", "a", "", "bc", True),
        ("abcd", "a", "b", "cd", True),
        ("abc", "b", "", "bc", False),
    ],
)
def test_quorum_after_a_view(voters: str, votes: str, gone: str, fenced: str, enough: bool) -> None:
    view = view_of(voters)
    assert has_quorum(view, keys(votes), keys(gone + fenced), keys(fenced), keys(voters), ANY) is enough


@pytest.mark.parametrize(
    ("votes", "gone", "enough"), [("a", "bc", True), ("a", "b", False), ("", "abc", False), ("ab", "", True)]
)
def test_survivor_goes_on_alone_where_proof_suffices(votes: str, gone: str, enough: bool) -> None:
    sizes = Sizes(1, 9, 9, proof_suffices=True)
    assert has_quorum(view_of("abc"), keys(votes), keys(gone), frozenset(), keys("abc"), sizes) is enough


def test_any_two_quorums_that_can_both_happen_share_a_voter() -> None:
    """`gone` is true for ever, so one of two disjoint quorums would be made of members that the other knows as dead."""
    names = "abcd"
    subsets = ["".join(c) for n in range(len(names) + 1) for c in itertools.combinations(names, n)]
    view = view_of(names)
    for one, other in itertools.product(subsets, subsets):
        if set(one) & set(other):
            continue
        dead_for_one = keys("".join(set(names) - set(one)))
        dead_for_other = keys("".join(set(names) - set(other)))
        both = has_quorum(view, keys(one), dead_for_one, frozenset(), keys(names), ANY) and has_quorum(
            view, keys(other), dead_for_other, frozenset(), keys(names), ANY
        )
        # Both only if each takes the other for proven dead, which cannot be true of members that vote.
        assert not both or (keys(other) <= dead_for_one and keys(one) <= dead_for_other)
        alive_aware = has_quorum(view, keys(one), dead_for_one - keys(other), frozenset(), keys(names), ANY)
        other_aware = has_quorum(view, keys(other), dead_for_other - keys(one), frozenset(), keys(names), ANY)
        assert not (alive_aware and other_aware)


@pytest.mark.parametrize(
    ("max_size", "votes", "known", "enough"),
    [
        (3, "ab", "ab", True),
        (3, "a", "abc", False),
        (4, "ab", "abcd", False),
        (4, "abc", "abcd", True),
        (2, "ab", "abcde", False),  # more came than were announced: they count, too
        (2, "abc", "abcde", True),
    ],
)
def test_quorum_of_the_first_view_is_a_majority_of_the_maximum_size(
    max_size: int, votes: str, known: str, enough: bool
) -> None:
    assert has_quorum(None, keys(votes), frozenset(), frozenset(), keys(known), Sizes(1, 2, max_size)) is enough


def test_first_view_counts_a_restarted_agent_once_and_raises_the_bar() -> None:
    old, new, other, third = MemberKey("b", 1), MemberKey("b", 2), MemberKey("a", 1), MemberKey("c", 1)
    sizes = Sizes(1, 3, 3)
    assert not has_quorum(None, {old, new}, frozenset(), frozenset(), {old, new}, sizes)
    assert not has_quorum(None, {new, other}, frozenset(), frozenset(), {old, new, other}, sizes)
    assert has_quorum(None, {new, other, third}, frozenset(), frozenset(), {old, new, other, third}, sizes)


def planned(previous: View | None, usable: list[Member], low: int, high: int) -> Plan:
    plan = plan_view(previous, usable, Sizes(low, high, high))
    assert isinstance(plan, Plan), plan
    return plan


def names(members: tuple[Member, ...]) -> str:
    return "".join(m.name for m in members)


@pytest.mark.parametrize(
    ("usable", "low", "places", "spares", "moved"),
    [
        ("abcd", 2, "ab", "cd", False),
        ("bcd", 2, "cb", "d", True),
        ("acd", 2, "ac", "d", True),
        ("cd", 2, "cd", "", True),
        ("abc", 2, "ab", "c", False),
        ("a", 1, "a", "", True),
        ("d", 1, "d", "", True),
    ],
)
def test_survivors_keep_places_and_spares_fill_empty_ones_in_order(
    usable: str, low: int, places: str, spares: str, moved: bool
) -> None:
    plan = planned(view_of("ab", "cd"), [member(name) for name in usable], low, 2)
    assert (names(plan.places), names(plan.spares), plan.moved) == (places, spares, moved)


def test_new_nodes_become_spares_oldest_first_while_places_are_full() -> None:
    usable = [*map(member, "ab"), member("y", 9), member("z", 8)]
    plan = planned(view_of("ab"), usable, 2, 2)
    assert (names(plan.places), names(plan.spares), plan.moved) == ("ab", "zy", False)


def test_missing_place_below_the_maximum_is_filled_as_soon_as_a_node_comes() -> None:
    plan = planned(view_of("a"), [member("a"), member("b")], 1, 2)
    assert (names(plan.places), plan.moved) == ("ab", True)


def test_restarted_agent_waits_while_its_predecessor_may_live() -> None:
    usable = [member("a"), member("b"), member("a", 2)]
    plan = planned(view_of("ab"), usable, 2, 2)
    assert [m.key for m in plan.places + plan.spares] == [MemberKey("a", 1), MemberKey("b", 1)]


def test_first_view_orders_names_as_people_do() -> None:
    usable = [member(name) for name in ("node10", "node2", "node1")]
    plan = planned(None, usable, 2, 2)
    assert [m.name for m in plan.places + plan.spares] == ["node1", "node2", "node10"]
    assert natural("node2") < natural("node10") < natural("nodes")


def test_witnesses_never_get_a_place() -> None:
    usable = [member("a"), member("w", role=Role.WITNESS, num_workers=0), member("v", role=Role.WITNESS)]
    plan = planned(view_of("a", "", "w"), usable, 1, 3)
    assert (names(plan.places), names(plan.witnesses)) == ("a", "wv")


@pytest.mark.parametrize(
    ("previous", "usable", "text"),
    [
        (
            view_of("ab"),
            [member("a")],
            "2 of 2 training nodes are needed, 1 is alive and no spare is left: waiting for a node to join",
        ),
        (view_of("ab"), [], "2 of 2 training nodes are needed, 0 are alive and no spare is left"),
        (None, [member("a")], "2 training nodes are needed, 1 joined: waiting for a node to join"),
        (view_of("ab"), [member("a"), member("c", num_workers=4)], "c has 4 workers instead of 2 and cannot step in"),
    ],
)
def test_places_that_cannot_be_filled_are_explained(previous: View | None, usable: list[Member], text: str) -> None:
    reason = plan_view(previous, usable, Sizes(2, 2, 2))
    assert isinstance(reason, str)
    assert text in reason


@pytest.mark.parametrize(
    ("usable", "wanted", "round_"), [("abc", False, 3), ("abc", True, 6), ("bc", False, 6), ("ab", False, 3)]
)
def test_round_changes_with_the_places_or_on_request_only(usable: str, wanted: bool, round_: int) -> None:
    previous = view_of("ab", "c")
    plan = planned(previous, [member(name) for name in usable], 2, 2)
    view = make_view(previous, plan, "other", "why", wanted, {"k": 1})
    assert (view.epoch, view.round, view.nonce, view.reason, view.data) == (6, round_, "nonce", "why", {"k": 1})


def test_first_view_begins_epoch_round_and_nonce() -> None:
    view = make_view(None, planned(None, [member("a")], 1, 1), "made", "the run starts", False, {})
    assert (view.epoch, view.round, view.nonce) == (1, 1, "made")


@pytest.mark.parametrize("previous", [None, view_of("bc")])
def test_of_two_newcomers_with_one_name_the_older_comes_in(previous: View | None) -> None:
    usable = [member("b"), member("c"), member("a", 3), member("a", 2)]
    plan = plan_view(previous, usable, ANY)
    assert isinstance(plan, Plan)
    assert sorted(str(m.key) for m in plan.places) == ["a#2", "b#1", "c#1"]
