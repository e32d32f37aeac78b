"""The rules of versions.py: one rule a test. tests/sim/test_versions_model.py has them all at once."""

from __future__ import annotations

import pytest

from p2pstate.interval import NUM_VOTES_UP, Interval
from p2pstate.types import Version
from p2pstate.versions import Course, next_slot, version_to_keep

NOTHING_COMPLETE = Version(0, -1)
V5, V6, V7 = Version(1, 5), Version(1, 6), Version(1, 7)


def under_way(every: int = 1) -> Course:
    """Version 6 is kept, version 7 is being shipped."""
    return Course(every, kept=V6, captured=V7)


def test_course_of_a_start_from_scratch_captures_the_initial_state_and_keeps_nothing() -> None:
    course = Course().begun()
    assert course.due
    assert course.kept is None


def test_course_before_the_first_capture_of_a_round_captures_after_every_commit() -> None:
    assert Course(1, kept=V6).committed(7, NOTHING_COMPLETE) == Course(1, kept=V6, due=True)


def test_course_with_the_version_protected_everywhere_keeps_it_and_captures_the_next() -> None:
    assert under_way().committed(8, V7) == Course(1, kept=V7, captured=V7, due=True)


@pytest.mark.parametrize("complete", [NOTHING_COMPLETE, V6, Version(0, 99)])
def test_course_with_the_version_missing_somewhere_skips_and_keeps_what_it_kept(complete: Version) -> None:
    course = under_way().committed(8, complete)
    assert course == Course(1, kept=V6, captured=V7, num_skipped_in_a_row=1)
    assert course.committed(9, complete).num_skipped_in_a_row == 2


def test_course_that_skipped_captures_at_the_first_commit_after_protection() -> None:
    course = under_way().committed(8, V6).committed(9, V7)
    assert course == Course(1, kept=V7, captured=V7, due=True)


def test_course_of_ranks_that_train_apart_keeps_what_it_kept_and_captures_again_at_once() -> None:
    course = under_way(every=3).committed(8, V7, alike=False)
    assert course == Course(3, kept=V6, due=True, num_skipped_in_a_row=1)
    assert course.captures(Version(1, 8)).committed(9, Version(1, 8)).kept == Version(1, 8)


def test_course_waits_with_giving_up_a_version_until_nothing_of_it_is_on_its_way() -> None:
    assert under_way().committed(8, V6, alike=False) == under_way().committed(8, V6)


@pytest.mark.parametrize("course", [Course(1, kept=V7, captured=V7), Course(1, kept=V7)])
def test_course_gives_up_no_version_that_was_protected_before(course: Course) -> None:
    assert course.committed(8, V7, alike=False) == course.committed(8, V7)


def test_course_that_captured_is_not_due_until_the_next_commit() -> None:
    assert Course(1, kept=V6, due=True).captures(V7) == under_way()


def test_course_covers_a_step_that_is_or_becomes_a_version_and_no_skipped_one() -> None:
    assert Course(1, kept=V6, due=True).covers(7)
    assert under_way().covers(7)
    assert not under_way().committed(8, V6).covers(8)
    assert not Course(1, kept=V6).covers(6), "nothing of this round was captured yet"


def test_course_with_an_interval_captures_only_at_its_multiples() -> None:
    course = Course(3, kept=V5, captured=V6)
    due = [(course := course.committed(step, V6)).due for step in range(7, 13)]
    assert due == [False, False, True, False, False, True]


def test_course_with_an_interval_counts_only_versions_that_were_wanted_as_skipped() -> None:
    course = under_way(every=3)
    skipped = [(course := course.committed(step, V6)).num_skipped_in_a_row for step in range(8, 13)]
    assert skipped == [0, 1, 1, 1, 2]


def test_course_with_an_interval_keeps_a_version_from_the_step_at_which_it_is_known_to_be_protected() -> None:
    course = under_way(every=3).committed(8, V7)
    assert course.kept == V7
    assert not course.due


def test_course_that_resumed_captures_at_once_whatever_the_interval_and_forgets_what_was_under_way() -> None:
    course = under_way(every=4).committed(8, V6).resumed(V6)
    assert course == Course(4, kept=V6, due=True)


def test_course_that_resumed_takes_no_version_of_an_older_round_for_its_own() -> None:
    course = Course(1, kept=V7, due=True).captures(Version(2, 7))
    assert course.committed(8, V7).kept == V7
    assert not course.committed(8, V7).due


def adapting(every: int) -> Course:
    return Course(every, kept=V5, captured=V6, interval=Interval(every))


def test_course_whose_interval_adapts_counts_from_the_version_before() -> None:
    course = adapting(4)
    due = [(course := course.committed(step, V6, 4.0)).due for step in range(7, 11)]
    assert due == [False, False, False, True]


def test_course_whose_interval_adapts_captures_a_late_version_at_the_next_step() -> None:
    course = adapting(2)
    for step in (7, 8, 9):
        course = course.committed(step, V5, 2.0)
    assert (course.due, course.num_skipped_in_a_row) == (False, 2)
    assert course.committed(10, V6, 2.0).due


def test_course_whose_interval_adapts_follows_the_largest_need_while_a_version_is_under_way() -> None:
    course = adapting(1)
    for step in range(7, 7 + NUM_VOTES_UP):
        course = course.committed(step, V5, 2.5)
    assert course.every == 3


def test_course_whose_interval_adapts_begins_anew_with_each_round_as_those_do_who_join() -> None:
    assert adapting(5).resumed(V6) == Course(1, kept=V6, due=True, interval=Interval())


@pytest.mark.parametrize(
    ("fatal_losses", "keep"),
    [
        # Node a is gone, and b has what is left of both: the newer one.
        ({V6: ["b"], V7: ["b"]}, V7),
        # V6 is in two places, V7 only just whole: any loss would end it.
        ({V6: [], V7: ["a", "b"]}, V6),
        ({V6: ["a", "b"], V7: []}, V7),
        # Each outlives a loss that the other does not: what was there before is not given up.
        ({V6: ["a"], V7: ["b"]}, V6),
        ({V5: ["a"], V6: ["a", "b"], V7: ["a"]}, V7),
        ({V6: ["a"]}, V6),
        # Two nodes may be lost: V6 is in three places, V7 in two of some shard.
        ({V6: [], V7: ["ab"]}, V6),
        ({V6: ["ab"], V7: ["ab"]}, V7),
        ({V6: ["ab"], V7: ["ac"]}, V6),
        # What ends with a alone ends with a and c as well, and not the other way round.
        ({V6: ["a"], V7: ["ac"]}, V7),
        ({V6: ["ac"], V7: ["a"]}, V6),
    ],
)
def test_version_to_keep(fatal_losses: dict[Version, list[str]], keep: Version) -> None:
    sets = {version: [frozenset(lost) for lost in its] for version, its in fatal_losses.items()}
    assert version_to_keep(sets) == version_to_keep(dict(reversed(sets.items()))) == keep


@pytest.mark.parametrize(
    ("held", "keep", "index"),
    [
        ((V6, V5), V6, 1),
        ((V5, V6), V6, 0),
        ((V7, V6), V6, 0),
        ((V6, None), V6, 1),
        ((None, V6), V6, 0),
        ((V6, V6), V6, 1),
        # Nothing to keep here: an empty one, else the newer one (a start from scratch spares the initial state).
        ((None, None), None, 0),
        ((V6, None), None, 1),
        ((None, V6), None, 0),
        ((V6, V5), None, 0),
        ((V5, V6), None, 1),
        ((None, None), V6, 0),
        ((V5, None), V6, 1),
        ((V5, V7), V6, 0),
        ((Version(2, 1), V7), V6, 1),
    ],
)
def test_next_slot(held: tuple[Version | None, Version | None], keep: Version | None, index: int) -> None:
    assert next_slot(held, keep) == index
