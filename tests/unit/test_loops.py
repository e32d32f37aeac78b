"""loops: which of a script's training loops is resumed, and who has to go where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pstate.errors import Retryable
from p2pstate.joined import LostError, MustStartOver, OtherLoop
from p2pstate.loops import check_meeting, check_version, without_loop
from p2pstate.plan_recovery import RankReport, StartOver
from p2pstate.types import NUM_ENDS_KEPT, LoopEnds, Start

ENDS = LoopEnds(3, 2, (10, 14), (10,))


def report(rank: int, loop: int, *, newcomer: bool = False) -> RankReport:
    return RankReport(rank, newcomer, 2, 0 if newcomer else 15, loop=loop, ends=ENDS)


@pytest.mark.parametrize(("step", "loop"), [(1, 1), (10, 1), (11, 2), (14, 2), (15, 3), (99, 3)])
def test_step_belongs_to_the_loop_that_ended_with_it_or_after_it(step: int, loop: int) -> None:
    assert ENDS.loop_of(step) == loop


@pytest.mark.parametrize(
    ("step", "left"),
    [
        (9, LoopEnds(5)),
        (10, LoopEnds(5, 1, (10,), (10,))),
        (12, LoopEnds(5, 1, (10,), (10,))),
        (15, LoopEnds(5, 2, (10, 14), (10,))),
    ],
)
def test_what_ended_after_the_resumed_step_has_not_ended(step: int, left: LoopEnds) -> None:
    assert ENDS.resumed(5, step) == left
    assert ENDS.resumed(5, step) > ENDS


def test_loop_that_ends_without_a_step_and_again_after_a_recovery_counts_once() -> None:
    ends = ENDS.ended(3, 14)
    assert (ends, ends.loop_of(14), ends.loop_of(15)) == (LoopEnds(3, 3, (10, 14, 14), (10,)), 2, 4)
    again = ends.resumed(5, 14)
    assert (again, again.ended(2, 14)) == (LoopEnds(5, 2, (10, 14), (10,)),) * 2
    assert again.ended(2, 14, left=True).left == (10, 14)


def test_only_the_newest_ends_are_kept_and_older_steps_belong_to_no_known_loop() -> None:
    ends = LoopEnds()
    for loop in range(1, NUM_ENDS_KEPT + 3):
        ends = ends.ended(loop, 10 * loop, left=True)
    assert (len(ends.steps), len(ends.left), ends.num) == (NUM_ENDS_KEPT, NUM_ENDS_KEPT, NUM_ENDS_KEPT + 2)
    assert [ends.end_of(loop) for loop in (2, 3, ends.num)] == [-1, 30, 10 * ends.num]
    assert [ends.loop_of(step) for step in (20, 31, 10 * ends.num + 1)] == [0, 4, ends.num + 1]
    assert LoopEnds.unpack(ends.pack()) == ends


@pytest.mark.parametrize(
    "raw", [None, [1, 2], [1, 2, [3], [], []], [1, 1, ["x"], [], []], [1, 0, [4], [], []], [1, 0, [], []]]
)
def test_nonsense_is_no_ends(raw: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        LoopEnds.unpack(raw)


def test_newcomer_behind_goes_on_and_the_others_wait_for_another_round() -> None:
    reports = {0: report(0, 3), 1: report(1, 1, newcomer=True)}
    with pytest.raises(OtherLoop) as raised:
        check_meeting(reports[1], reports, ENDS)
    assert (raised.value.loop, raised.value.together) == (3, False)
    with pytest.raises(Retryable, match="rank 1 has yet to come to training loop 3"):
        check_meeting(reports[0], reports, ENDS)


@pytest.mark.parametrize(
    "reports",
    [{0: report(0, 2), 1: report(1, 3)}, {0: report(0, 2), 1: report(1, 3, newcomer=True)}],
    ids=["survivors-differ", "newcomer-ahead"],
)
def test_ranks_that_cannot_meet_start_again(reports: dict[int, RankReport]) -> None:
    with pytest.raises(MustStartOver) as raised:
        check_meeting(reports[0], reports, ENDS)
    assert raised.value.decision.start == Start.RESTART


def test_version_of_the_loop_that_all_are_in_is_resumed_there() -> None:
    reports = {0: report(0, 3), 1: report(1, 3, newcomer=True)}
    check_meeting(reports[0], reports, ENDS)
    check_version(reports[0], reports, ENDS, ENDS.loop_of(15), 15, 5)


def test_version_of_a_later_loop_sends_all_who_start_together_there() -> None:
    reports = {rank: report(rank, 1, newcomer=True) for rank in range(2)}
    check_meeting(reports[0], reports, ENDS)
    with pytest.raises(OtherLoop) as raised:
        check_version(reports[0], reports, ENDS, ENDS.loop_of(15), 15, 5)
    assert (raised.value.loop, raised.value.together, raised.value.ends) == (3, True, ENDS)


@pytest.mark.parametrize("newcomer", [False, True])
def test_version_of_an_earlier_loop_is_resumed_by_workers_that_start_again(newcomer: bool) -> None:
    reports = {0: report(0, 3, newcomer=newcomer), 1: report(1, 3, newcomer=True)}
    with pytest.raises(MustStartOver, match="training loop 3 has no protected step yet: the newest is step 14"):
        check_version(reports[0], reports, ENDS, ENDS.loop_of(14), 14, 5)


@pytest.mark.parametrize(("ended_at", "empty"), [(14, (3,)), (15, ()), (-1, ())])
def test_loop_without_data_for_a_step_is_remembered_when_all_start_again(ended_at: int, empty: tuple[int, ...]) -> None:
    reports = {0: report(0, 3), 1: replace(report(1, 3), ended_at=ended_at)}
    with pytest.raises(MustStartOver) as raised:
        check_version(reports[0], reports, ENDS, ENDS.loop_of(14), 14, 5)
    told = LoopEnds.unpack(raised.value.ends.pack())
    assert (told.empty, told > ENDS) == (empty, bool(empty))


def test_loop_without_data_for_a_step_is_passed_by_when_training_starts_anew() -> None:
    nothing = MustStartOver(StartOver(Start.FRESH, "no step was protected yet"))
    told = without_loop(nothing, 5, 1, LoopEnds())
    assert isinstance(told, MustStartOver)
    assert (told.decision.start, told.ends) == (Start.FRESH, LoopEnds(since=5, empty=(1,)))
    for other in (MustStartOver(StartOver(Start.RESTART, "unsettled")), LostError("gone")):
        assert without_loop(other, 5, 1, LoopEnds()) is other


def test_empty_loop_is_forgotten_after_the_next_step_and_where_an_older_one_is_resumed() -> None:
    ends = ENDS.with_empty(5, 3)
    again = ends.resumed(6, 14)
    assert again.empty == (3,), "the workers have started again and join in loop 2"
    over = again.ended(2, 14).ended(3, 14)
    assert (over.empty, over.resumed(7, 14).empty) == ((3,), (3,)), "and may have to once more"
    assert over.with_empty(7, 4).empty == (3, 4)
    assert over.ended(4, 16).empty == ends.resumed(6, 12).empty == ()


def test_version_of_a_loop_that_nobody_remembers_is_lost_and_does_not_make_workers_start_again_for_ever() -> None:
    ends = LoopEnds()
    for loop in range(1, NUM_ENDS_KEPT + 3):
        ends = ends.ended(loop, 10 * loop)
    reports = {rank: report(rank, 1, newcomer=True) for rank in range(2)}
    with pytest.raises(LostError, match=r"step 20, .* is more than 256 training loops ago"):
        check_version(reports[0], reports, ends, ends.loop_of(20), 20, 5)


def test_report_survives_its_way() -> None:
    assert RankReport.unpack(report(1, 3).pack()) == report(1, 3)
