"""Views as changes of the ones before them: nothing is lost, nothing that does not fit is taken."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rendezvous.types import Member, Role, View
from rendezvous.view_delta import ViewDelta, apply_delta, delta_of


def member(index: int, incarnation: int = 1) -> Member:
    return Member(f"n{index}", incarnation, f"10.0.0.{index + 1}:7000", Role.NODE, 8, {"rack": "r1"})


def view_of(places: list[int], spares: list[int], witnesses: list[int], epoch: int = 4) -> View:
    groups = [tuple(member(index) for index in group) for group in (places, spares, witnesses)]
    return View("nonce", epoch, 3, *groups, "before", {})


BEFORE = view_of(list(range(8)), [8, 9], [10])


@given(st.permutations(range(14)), st.lists(st.integers(0, 14), min_size=3, max_size=3), st.integers(0, 3))
def test_view_comes_out_as_it_went_in(order: list[int], cuts: list[int], restarted: int) -> None:
    first, second, third = sorted(cuts)
    groups = [order[:first], order[first:second], order[second:third]]
    members = [tuple(member(i, 2 if i == restarted else 1) for i in group) for group in groups]
    view = View("nonce", 5, 5, *members, "somebody died", {"step": 3})
    delta = ViewDelta.from_plain(msgpack.unpackb(msgpack.packb(delta_of(BEFORE, view).to_plain())))
    assert apply_delta(BEFORE, delta) == view
    assert dict(apply_delta(BEFORE, delta).data) == {"step": 3}


def test_what_stayed_is_not_sent_again() -> None:
    large = View("nonce", 4, 3, tuple(map(member, range(200))), (), (), "before")
    places = (*large.places[:50], member(201), *large.places[51:])
    view = View("nonce", 5, 5, places, (), (), "n50 died")
    delta = delta_of(large, view)
    assert delta.groups == (((0, 50), member(201), (51, 149)), (), ())
    assert len(msgpack.packb(delta.to_plain())) < 200
    assert apply_delta(large, delta) == view


def test_member_that_changed_what_it_says_of_itself_is_sent_whole() -> None:
    moved = dataclasses.replace(member(0), address="10.0.0.99:7000")
    view = View("nonce", 5, 5, (moved, *BEFORE.places[1:]), BEFORE.spares, BEFORE.witnesses, "moved")
    assert apply_delta(BEFORE, delta_of(BEFORE, view)) == view


@pytest.mark.parametrize(
    "delta",
    [
        ViewDelta(6, 5, ((), (), ()), ""),
        ViewDelta(5, 6, ((), (), ()), ""),
        ViewDelta(5, 5, (((0, 12),), (), ()), ""),
        ViewDelta(5, 5, (((2**40, 2**40),), (), ()), ""),
        ViewDelta(5, 5, (((0, 2), (1, 1)), (), ()), ""),
        ViewDelta(5, 5, (((0, 11),) * 4000, (), ()), ""),
        ViewDelta(5, 5, ((), ()), ""),
    ],
)
def test_delta_that_does_not_fit_gives_no_view(delta: ViewDelta) -> None:
    assert apply_delta(BEFORE, delta) is None


@pytest.mark.parametrize(
    "plain", [[], [5, 5, [[], []], "", {}], [5, 5, [[[0]], [], []], "", {}], [5, 5, [1, 2, 3], "", {}]]
)
def test_plain_value_that_is_no_delta_is_refused(plain: list[object]) -> None:
    with pytest.raises(ValueError, match="must be a list"):
        ViewDelta.from_plain(plain)
