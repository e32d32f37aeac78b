"""Who is waited for, from made-up steps; and how waiting for others is measured."""

import time
from typing import Any

import pytest

from p2pstate.observe.skew import MAX_FINDINGS, MAX_POINTS, WINDOW_STEPS, Load, Skew, SkewHistory, Windows, judge
from p2pstate.trace import Trace


def step(rank: int, number: int, waited_s: float, **seconds: float) -> dict[str, Any]:
    return {"event": "step", "rank": rank, "step": number, "waited_s": waited_s, "clock": {"seconds": seconds}}


def skews_of(events: list[dict[str, Any]]) -> list[Skew]:
    windows = Windows(keep=len(events))
    for event in events:
        windows.add(event)
    return [skew for first, loads in sorted(windows.loads.items()) if (skew := judge(first, loads)) is not None]


def load(own_s: float, wall_s: float = 1.0, fetch_s: float = 0.0) -> Load:
    return Load(10, 10 * wall_s, 10 * own_s, 10 * fetch_s, 10)


def test_windows_compare_ranks_by_what_they_do_themselves() -> None:
    """Both ranks take a second a step; rank 1 works all of it, rank 0 waits for it."""
    events = [step(rank, number, (0.6, 0.0)[rank], useful=0.9, data=0.1) for number in range(1, 46) for rank in (0, 1)]
    first, second, rest = skews_of(events)
    assert (first.first_step, first.last_step) == (1, WINDOW_STEPS)
    assert (rest.first_step, rest.last_step) == (41, 45)
    assert (first.slowest, first.fastest) == (1, 0)
    assert (first.slowest_s, first.fastest_s) == (pytest.approx(1.0), pytest.approx(0.4))
    assert list(first.stragglers) == list(second.stragglers) == [1]
    assert "takes 1.00 s of its own, others 0.40 s (steps 1 to 20)" in first.stragglers[1]


def test_rank_that_waits_for_its_batches_is_named() -> None:
    events = [step(rank, number, 0.0, useful=0.9, data=(0.0, 0.3)[rank]) for number in range(1, 21) for rank in (0, 1)]
    (only,) = skews_of(events)
    assert only.starved == {1: "it waits 0.30 s a step for its batch (steps 1 to 20)"}


def test_window_leaves_out_recoveries_and_steps_done_again() -> None:
    windows = Windows()
    windows.add(step(0, 1, 0.2, **{"useful": 1.0, "recovery.pull": 5.0, "startup": 3.0}))
    windows.add(step(0, 2, 0.0, repeated=1.0))
    windows.add({"event": "recovery", "rank": 0, "clock": {"seconds": {"recovery.pull": 1.0}}})
    assert windows.loads == {1: {0: Load(1, 1.0, pytest.approx(0.8), 0.0, 1)}}


def test_window_ends_with_its_last_step_also_when_steps_came_twice() -> None:
    events = [step(rank, number, 0.0, useful=1.0) for number in (1, 2, 3, 2, 3, 4) for rank in (0, 1)]
    (only,) = skews_of(events)
    assert (only.first_step, only.last_step) == (1, 4)


def test_only_the_newest_windows_are_kept() -> None:
    windows = Windows(keep=2)
    for number in range(1, 100):
        windows.add(step(0, number, 0.0, useful=0.1))
    assert sorted(windows.loads) == [61, 81]


def test_steps_that_come_again_have_their_window_also_while_a_run_lives() -> None:
    """A run that goes on from a checkpoint far back."""
    windows = Windows(keep=2)
    for number in (*range(1, 100), 5, 6):
        windows.add(step(0, number, 0.0, useful=0.1))
    assert sorted(windows.loads) == [1, 81]


def test_skew_of_a_long_run_is_kept_in_few_points_with_their_extremes() -> None:
    """Rank 1 straggles in two windows of many, which are looked at before the run is over."""
    skews, num_windows = SkewHistory(), 2 * MAX_POINTS + 100
    for window in range(num_windows):
        for rank in (0, 1):
            slow_s = 9.0 if rank == 1 and window in (700, 1500) else 1.0
            skews.add(step(rank, window * WINDOW_STEPS + 1, 0.0, useful=slow_s))
    skews.finish()
    assert len(skews.points) <= MAX_POINTS
    assert skews.points[-1][0] == (num_windows - 1) * WINDOW_STEPS + 1
    assert [slowest_s for _, slowest_s, _ in skews.points].count(9.0) == 2
    assert {fastest_s for *_, fastest_s in skews.points} == {1.0}
    assert [who for _, who, _ in skews.findings] == ["rank 1 straggles"] * 2


def test_findings_are_counted_and_the_first_kept() -> None:
    skews = SkewHistory()
    for window in range(MAX_FINDINGS + 7):
        for rank in (0, 1):
            skews.add(step(rank, window * WINDOW_STEPS + 1, 0.0, useful=1.0 + 4.0 * rank))
    skews.finish()
    assert (len(skews.findings), skews.num_findings) == (MAX_FINDINGS, MAX_FINDINGS + 7)


@pytest.mark.parametrize(
    ("loads", "stragglers", "starved"),
    [
        ({0: load(0.5), 1: load(0.5), 2: load(0.9)}, [2], []),
        ({0: load(0.5), 1: load(0.5), 2: load(0.7)}, [], []),  # not by much
        ({0: load(0.01), 1: load(0.01), 2: load(0.1)}, [], []),  # of a long step it is not much
        ({0: load(0.001, 0.01), 1: load(0.005, 0.01)}, [], []),  # milliseconds
        ({0: load(0.5), 1: load(0.8, fetch_s=0.4)}, [1], [1]),
        ({0: load(0.5, fetch_s=0.05), 1: load(0.5, fetch_s=0.2)}, [], [1]),
    ],
)
def test_stragglers_and_starved_ranks_are_named(
    loads: dict[int, Load], stragglers: list[int], starved: list[int]
) -> None:
    skew = judge(1, loads)
    assert skew is not None
    assert (list(skew.stragglers), list(skew.starved)) == (stragglers, starved)


def test_one_rank_alone_has_no_skew() -> None:
    assert judge(1, {0: load(0.5)}) is None


def test_waiting_lasts_from_the_newest_beginning_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    trace = Trace()
    row, other = trace.row("world"), trace.row("tensor")
    first = row.enter("allreduce")
    now[0] = 101.0  # work between two collectives
    second = other.enter("allgather")
    now[0] = 101.5
    row.leave(first)
    now[0] = 102.0  # work, then a wait for the second one
    trace.waits.begin()
    now[0] = 102.25
    other.leave(second)
    other.leave(second)  # seen twice
    assert trace.waits.take() == pytest.approx(0.5 + 0.25)
    assert trace.waits.take() == 0
