"""The page in which a worker shows what it does: written on one side, read on the other."""

from __future__ import annotations

import os
import threading

import pytest

from p2pstate import trace as trace_module
from p2pstate.trace import MAX_ROWS, Doing, Operation, Trace, map_page, new_page, read


@pytest.fixture
def page() -> memoryview:
    fd = new_page()
    try:
        return map_page(fd)
    finally:
        os.close(fd)


def test_what_is_written_is_read_in_another_mapping() -> None:
    fd = new_page()
    trace, seen = Trace(map_page(fd)), map_page(fd)
    os.close(fd)
    trace.enter_round(4)
    trace.do(Doing.STEPPING)
    row = trace.row("000004-0123456789ab-0000")
    row.begin(4)
    row.leave(row.enter("allreduce"))
    row.enter("reduce_scatter_tensor_coalesced")
    sample = read(seen)
    assert (sample.round, sample.doing) == (4, Doing.STEPPING)
    assert sample.operations == (Operation("000004-0123456789ab-0000", 4, 2, 1, "reduce_scatter_t"),)


def test_everything_that_happens_changes_the_count(page: memoryview) -> None:
    trace = Trace(page)
    row, counts = trace.row("a"), [read(page).count]
    for happens in (
        lambda: trace.do(Doing.FETCHING),
        lambda: row.enter("x"),
        lambda: row.leave(1),
        lambda: trace.commit(1),
    ):
        happens()
        counts.append(read(page).count)
    assert len(set(counts)) == len(counts)


def test_operation_of_an_earlier_round_that_ends_late_changes_nothing(page: memoryview) -> None:
    row = Trace(page).row("a")
    late = [row.enter("allreduce") for _ in range(5)]
    row.begin(2)
    row.enter("allreduce")
    row.leave(late[-1])
    assert read(page).operations == (Operation("a", 2, 1, 0, "allreduce"),)


def test_leaving_an_operation_leaves_those_entered_before_it(page: memoryview) -> None:
    row = Trace(page).row("a")
    first, second = row.enter("x"), row.enter("x")
    row.leave(second)
    row.leave(first)
    assert read(page).operations[0].left == 2


def test_groups_beyond_the_limit_are_not_traced_and_do_no_harm(page: memoryview) -> None:
    trace = Trace(page)
    rows = [trace.row(f"group {number}") for number in range(MAX_ROWS + 3)]
    for row in rows:
        row.begin(1)
        row.leave(row.enter("barrier"))
    assert len(read(page).operations) == MAX_ROWS


def test_usual_step_is_the_median_or_a_part_of_the_longest(page: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(trace_module.time, "monotonic", lambda: now)
    trace = Trace(page)
    turns = []
    for step, turn_s in enumerate([0.0, 1.0, 1.0, 1.0, 1.0, 20.0]):
        now += turn_s
        trace.commit(step)
        turns.append(read(page).turn_s)
    assert turns == [0.0, 0.0, 0.0, 1.0, 1.0, 4.0]
    trace.leave_round()
    now += 500.0  # a recovery is no measure
    trace.commit(6)
    now += 1.0
    trace.commit(7)
    assert read(page).turn_s == 4.0


def test_announced_phases_end_with_the_outer_one_and_are_no_measure(
    page: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(trace_module.time, "monotonic", lambda: now)
    trace = Trace(page)
    trace.commit(1)
    with trace.expect("outer", 50.0):
        with trace.expect("inner", 500.0):
            assert (read(page).expected, read(page).expected_until) == ("outer", 150.0)
        with trace.expect("shorter", 5.0):
            assert (read(page).expected, read(page).expected_until) == ("shorter", 105.0)
        assert (read(page).expected, read(page).expected_until) == ("outer", 150.0)
        now += 30.0
    assert (read(page).expected, read(page).expected_until) == ("", 0.0)
    for step in (2, 3, 4):
        now += 1.0
        trace.commit(step)
    assert read(page).turn_s == 1.0


def test_only_the_training_thread_shows_that_it_waits(page: memoryview) -> None:
    trace = Trace(page)
    thread = threading.Thread(target=trace.poll)
    thread.start()
    thread.join()
    assert read(page).polled_at == 0.0
    trace.poll()
    assert read(page).polled_at > 0.0


def test_page_of_nonsense_is_refused(page: memoryview) -> None:
    page[1] = 77
    with pytest.raises(ValueError, match="77"):
        read(page)
