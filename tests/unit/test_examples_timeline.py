"""The demo's account of a run: what counts as survived, and how long it took."""

from typing import Any

import pytest

from timeline import Timeline


def event(t: float, name: str, /, node: str = "node1", **fields: Any) -> dict[str, Any]:
    return {"t": t, "node": node, "event": name, **fields}


def step(t: float, rank: int, number: int) -> dict[str, Any]:
    return event(t, "step", rank=rank, step=number, seconds=0.1, protected=None, loss=1.5 if rank == 0 else None)


def started(t: float, rank: int, pid: int, node: str) -> dict[str, Any]:
    return event(t, "worker_started", node, rank=rank, local_rank=0, pid=pid, warm=True)


def recovery(t: float, rank: int, source: str, num_bytes: int, steps_lost: int = 0, **phases: float) -> dict[str, Any]:
    fields = {"phases": phases, "source": source, "bytes": num_bytes, "version": [1, 4], "steps_lost": steps_lost}
    return event(t, "recovery", rank=rank, epoch=2, **fields)


def killed(t: float, *victims: int) -> dict[str, Any]:
    return event(t, "injected", kind="worker", what="SIGKILL", victims=list(victims))


@pytest.fixture
def timeline() -> Timeline:
    """Two ranks that have committed step 4."""
    timeline = Timeline(num_ranks=2)
    timeline.add([started(100.0, 0, 50, "node0"), started(100.0, 1, 51, "node1")])
    timeline.add([step(101.0, 0, 4), step(101.0, 1, 4)])
    return timeline


def test_timeline_step_is_the_newest_that_all_ranks_committed(timeline: Timeline) -> None:
    assert timeline.step == 4
    timeline.add([step(101.5, 0, 5)])
    assert timeline.step == 4
    assert Timeline(num_ranks=2).step == 0


def test_timeline_failure_lasts_until_every_rank_is_past_the_last_step_before(timeline: Timeline) -> None:
    timeline.add([killed(102.0, 1), step(102.5, 0, 5), step(103.0, 1, 4)])
    assert timeline.recovering
    timeline.add([step(103.25, 1, 5)])
    (failure,) = timeline.failures
    assert not timeline.recovering
    assert failure.seconds == pytest.approx(1.25)


def test_timeline_step_committed_before_the_signal_but_told_later_does_not_count_as_new(timeline: Timeline) -> None:
    timeline.add([killed(102.0, 1)])
    timeline.add([step(101.9, 0, 5), step(103.0, 0, 5), step(103.0, 1, 5)])
    assert timeline.failures[0].last_step == 5
    assert timeline.recovering
    timeline.add([step(104.0, 0, 6), step(104.5, 1, 6)])
    assert timeline.failures[0].seconds == pytest.approx(2.5)


def test_timeline_failure_tells_source_of_the_victims_and_longest_phases(timeline: Timeline) -> None:
    timeline.add([killed(102.0, 1), started(102.2, 1, 99, "node1")])
    timeline.add(
        [recovery(102.5, 0, "survivor", 0, abort=0.2, pull=0.1), recovery(102.6, 1, "buddy", 700, 2, pull=0.3)]
    )
    lines = timeline.add([step(103.0, 0, 5), step(103.0, 1, 5)])
    (failure,) = timeline.failures
    assert (failure.source, failure.num_bytes, failure.steps_lost) == ("buddy", 700, 2)
    assert failure.longest_phases() == {"abort": 0.2, "pull": 0.3}
    assert any("survivors kept their processes: 0 (50)" in line for line in lines)


def test_timeline_second_failure_is_counted_apart_from_the_first(timeline: Timeline) -> None:
    timeline.add([killed(102.0, 1), recovery(102.5, 1, "own vault", 0), step(103.0, 0, 5), step(103.0, 1, 5)])
    timeline.add([killed(104.0, 0), recovery(104.5, 0, "buddy", 9), step(105.0, 0, 6), step(106.0, 1, 6)])
    assert [failure.source for failure in timeline.failures] == ["own vault", "buddy"]
    assert [failure.seconds for failure in timeline.failures] == [pytest.approx(1.0), pytest.approx(2.0)]
    assert timeline.failures[1].last_step == 5


def test_timeline_ranks_follow_their_processes_to_another_node(timeline: Timeline) -> None:
    assert timeline.ranks_on("node0") == {0}
    timeline.add([started(102.0, 0, 77, "node2")])
    assert (timeline.ranks_on("node0"), timeline.ranks_on("node2"), timeline.pids[0]) == (set(), {0}, 77)


def test_timeline_events_it_does_not_know_are_passed_over(timeline: Timeline) -> None:
    assert timeline.add([event(105.0, "something_new", detail=1)]) == []


def test_save_is_told_once_by_a_node_that_took_part_and_not_by_one_that_only_heard_of_it() -> None:
    saved = {"event": "saved", "step": 10, "epoch": 1, "name": "step-10", "reason": "due"}
    timeline = Timeline(2)
    assert timeline.add([saved | {"t": 1.0, "node": "spare", "bytes": 0, "seconds": None}]) == []
    (line,) = timeline.add([saved | {"t": 1.1, "node": "a", "bytes": 2_000_000, "seconds": 0.5}])
    assert "step 10: 2.0 MB in 0.50 s" in line
    assert timeline.add([saved | {"t": 1.2, "node": "b", "bytes": 2_000_000, "seconds": 0.5}]) == []
