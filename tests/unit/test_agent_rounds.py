"""agent/rounds.num_places: how many training nodes the next view may have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pstate.agent.rounds import num_places

PREVIOUS: Any = SimpleNamespace(places=("a", "b", "c"))


@pytest.mark.parametrize(
    ("ballots", "expected"),
    [
        ([], (3, 3)),
        ([{}, {"step": 4}], (3, 3)),
        ([{}, {"places": [2, 3]}], (2, 3)),  # one of them has seen to it that fewer can go on
        ([{"places": [2, 3]}, {"places": [2, 3]}], (2, 3)),
        ([{"places": [3, 4]}, {}], (3, 4)),
    ],
)
def test_next_view_has_as_many_places_unless_a_member_allows_others(
    ballots: list[dict[str, Any]], expected: tuple[int, int]
) -> None:
    assert num_places(PREVIOUS, ballots) == expected
