"""interval: when versions come less often, and when more often again."""

from __future__ import annotations

import random

import pytest

from p2pstate.interval import MAX_EVERY, NUM_MEASURED, NUM_VOTES_DOWN, NUM_VOTES_UP, Interval, need


@pytest.mark.parametrize("step_s", [1.0, 0.25])
@pytest.mark.parametrize(
    ("capture_s", "vote_s", "protected_s", "needed"),
    [
        (0.001, 0.9, 0.5, 1.0),  # cheap, and there before the vote
        (0.001, 0.9, 1.4, 1.5),  # half a step late
        (0.045, 0.9, 0.5, 4.5),  # 4.5 % of a step, and 1 % is allowed
        (0.045, 0.9, 9.9, 10.0),
        (9.0, 9.9, 9.9, 900.0),
        (99.0, 9.9, 9.9, float(MAX_EVERY)),
    ],
)
def test_need_is_what_a_version_takes_to_arrive_and_to_be_afforded(
    capture_s: float, vote_s: float, protected_s: float, needed: float, step_s: float
) -> None:
    series = [[step_s * each] * NUM_MEASURED for each in (capture_s, vote_s, protected_s)]
    assert need(step_s, *series, max_overhead=0.01) == pytest.approx(needed)


def test_need_is_nothing_special_before_enough_was_measured_and_no_outlier_decides() -> None:
    slow, fast = [9.0] * NUM_MEASURED, [0.001] * NUM_MEASURED
    assert need(1.0, slow[1:], fast, fast, 0.01) == 1
    assert need(0.0, slow, slow, slow, 0.01) == 1
    assert need(1.0, [*slow, *fast], fast, fast, 0.01) == 1, "the newest count"
    assert need(1.0, [*fast[:-1], 9.0], fast, fast, 0.01) == 1


def after(interval: Interval, *needs: float) -> Interval:
    for each in needs:
        interval = interval.voted(each)
    return interval


def test_interval_grows_to_the_mildest_of_several_needs_in_a_row() -> None:
    needs = [9.0, 3.2, 5.0, 7.0][:NUM_VOTES_UP]
    assert [after(Interval(), *needs[:count]).every for count in range(len(needs))] == [1] * len(needs)
    assert after(Interval(), *needs) == Interval(4)


def test_need_that_does_not_last_changes_nothing() -> None:
    assert after(Interval(2), *[9.0] * (NUM_VOTES_UP - 1), 2.0) == Interval(2)
    assert after(Interval(8), *[1.0] * (NUM_VOTES_DOWN - 1), 8.0) == Interval(8)
    assert after(Interval(4), *[9.0] * (NUM_VOTES_UP - 1), 1.0, 9.0).every == 4, "another direction begins anew"


def test_interval_shrinks_after_many_votes_to_the_largest_need_with_slack() -> None:
    needs = [2.0] * (NUM_VOTES_DOWN - 1)
    assert after(Interval(8), *needs).every == 8
    assert after(Interval(8), *needs, 3.1) == Interval(4)
    assert after(Interval(4), *[3.1] * (NUM_VOTES_DOWN + 1)) == Interval(4), "without slack it stays"


def test_interval_under_noise_of_a_tenth_settles() -> None:
    noise = random.Random(5)
    interval, seen = Interval(), []
    for _ in range(500):
        interval = interval.voted(3.5 * noise.uniform(0.9, 1.1))
        seen.append(interval.every)
    assert set(seen[NUM_VOTES_UP:]) == {4}
