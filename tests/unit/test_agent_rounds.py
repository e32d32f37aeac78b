"""agent/rounds: how many training nodes the next view may have, how a round begins, and what a process is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pstate.agent.rounds import assignment, decide_start, num_places, round_info
from p2pstate.types import LoopEnds, Start
from rendezvous.types import Member, View

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


def view(**data: Any) -> View:
    members = tuple(Member(name, 1, f"10.0.0.{number}:7000") for number, name in enumerate("ab", 1))
    return View("nonce", 4, 4, members, (), (), "because", data)


@pytest.mark.parametrize(
    ("ballots", "start", "step"),
    [
        ([{"step": 7}, {"step": 9}], Start.IN_PLACE, 9),
        ([{"step": 7, "outside": True}, {}], Start.RESTART, 7),  # somebody is not in the loop any more, or not yet
        ([{"outside": True}, {}], Start.FRESH, -1),  # nobody has anything to resume
        ([{"outside": True}, {"has_state": True}], Start.RESTART, -1),
        ([{"step": 7, "start_over": Start.RESTART}, {"rerun": True}], Start.RESTART, 7),
        ([{"rerun": True}, {}], Start.RERUN, -1),
        ([{"step": 7, "start_over": Start.FRESH}, {"start_over": Start.RESTART}], Start.FRESH, -1),
    ],
)
def test_round_begins_as_what_its_members_have_asks_for(ballots: list[dict[str, Any]], start: str, step: int) -> None:
    wanted, data = decide_start(view(step=-1), ballots)
    assert (wanted, data["start"], data["step"]) == (False, start, step)
    assert data["since"] == (5 if start == Start.FRESH else 0), "what was before a fresh start counts no more"
    assert decide_start(view(), [*ballots, {"wants_round": "rank 1 died"}])[0]


def test_ends_of_training_loops_are_kept_until_a_fresh_start_although_no_ballot_tells_of_them() -> None:
    ends, later = LoopEnds().ended(1, 5), LoopEnds().ended(1, 5).ended(2, 9)
    told = {"step": 7, "ends": later.pack()}
    before = view(step=7, ends=ends.pack())
    assert LoopEnds.unpack(decide_start(before, [{"step": 7}, {}])[1]["ends"]) == ends
    assert LoopEnds.unpack(decide_start(before, [told, {}])[1]["ends"]) == later
    fresh = decide_start(before, [told, {"start_over": Start.FRESH}])[1]["ends"]
    assert LoopEnds.unpack(fresh) == LoopEnds(since=5)
    empty = {"start_over": Start.FRESH, "ends": LoopEnds().with_empty(4, 1).pack()}
    assert LoopEnds.unpack(decide_start(view(step=-1), [empty, {}])[1]["ends"]) == LoopEnds(since=5, empty=(1,))


@pytest.mark.parametrize(
    ("start", "fresh", "restores"),
    [(Start.RESTART, True, True), (Start.FRESH, True, False), (Start.RESTART, False, False)],
)
def test_process_is_told_its_rank_and_whether_it_resumes(
    start: str, fresh: bool, restores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    info = round_info(view(), start, "run", 2)
    message = assignment(info, 3, 2, fresh=fresh, aborted=False)
    assert (message["rank"], message["local_rank"], message["host"], message["restore"]) == (3, 1, "10.0.0.2", restores)
    environ = message["environ"]
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["GROUP_RANK"]) == ("3", "4", "1")
    assert environ["OMP_NUM_THREADS"] == "1", "several workers share the processors"
    assert not any(name.startswith("TORCHELASTIC") for name in environ), "torchrun has told its workers"
    alone = assignment(round_info(view(), start, "run", 1), 1, 1, fresh=fresh, aborted=True, max_restarts=9)
    assert "OMP_NUM_THREADS" not in alone["environ"]
    restarts = {name: alone["environ"][f"TORCHELASTIC_{name}"] for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS")}
    assert restarts == {"RUN_ID": "run", "RESTART_COUNT": "3", "MAX_RESTARTS": "9"}
    assert alone["round"] is None
