"""The wall clock of ranks over deaths, moves and restarts, from made-up events; and reading them from files."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from p2pstate.observe.ledger import Ledger
from p2pstate.observe.reading import read_events, read_run, span_of_run


def event(t: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "node": "n0", "event": kind, **fields}


def started(t: float, rank: int = 0, pid: int = 1) -> dict[str, Any]:
    return event(t, "worker_started", rank=rank, pid=pid)


def step(t: float, number: int, rank: int = 0, **seconds: float) -> dict[str, Any]:
    return event(t, "step", rank=rank, step=number, clock={"until": t, "seconds": seconds})


def clock(t: float, rank: int = 0, **seconds: float) -> dict[str, Any]:
    return event(t, "clock", rank=rank, clock={"until": t, "seconds": seconds})


def seconds_of(events: list[dict[str, Any]], rank: int = 0) -> dict[str, float]:
    ledger = Ledger()
    ledger.add_all(events)
    return {name: pytest.approx(value) for name, value in ledger.ranks()[rank].seconds.items()}  # type: ignore[misc]


def test_ledger_adds_what_processes_measured() -> None:
    events = [started(0), step(3, 1, startup=2, useful=1), step(4, 2, useful=0.75, data=0.25), clock(5, shutdown=1)]
    assert seconds_of(events) == {"startup": 2, "useful": 1.75, "data": 0.25, "shutdown": 1}


def test_ledger_divides_the_time_of_a_dead_process_and_the_gap_after_it() -> None:
    events = [
        *(started(0), step(2, 1, useful=2)),
        event(5, "worker_exited", rank=0, pid=1),  # 2 s of a step, and one in which it stood
        *(started(9, pid=2), step(13, 2, **{"recovery.start": 2, "useful": 2})),
    ]
    expected = {"useful": 4, "repeated": 2, "recovery.detect": 1, "recovery.replace": 4, "recovery.start": 2}
    assert seconds_of(events) == expected


def test_ledger_books_processes_that_die_before_a_step_as_start_up_also_after_a_night() -> None:
    failed = [started(0), clock(2, startup=2), event(3, "worker_exited", rank=0, pid=1), started(4, pid=2)]
    killed = [event(6, "worker_exited", rank=0, pid=2)]
    assert seconds_of([*failed, *killed]) == {"startup": 5, "recovery.replace": 1}
    night = [event(10, "view", nonce="a"), started(10), step(12, 1, useful=2), event(13, "verdict", scope="run")]
    morning = [event(90, "view", nonce="b"), started(90), event(95, "worker_exited", rank=0, pid=1)]
    assert seconds_of([*night, *morning]) == {"useful": 2, "startup": 5}


def test_ledger_takes_the_abort_for_the_end_of_a_process_whose_node_is_gone() -> None:
    events = [
        *(started(0), step(1, 1, useful=1)),
        event(4, "abort", round=1),
        *(started(5, pid=2), step(6, 2, useful=1)),
    ]
    expected = {"useful": 2, "repeated": 1, "recovery.detect": 2, "recovery.replace": 1}
    assert seconds_of(events) == expected


def test_ledger_counts_no_process_that_ends_or_tells_something_after_its_successor_has_started() -> None:
    """It was asked to go, or its node was cut off: for a while there are two."""
    elsewhere = {"node": "n1"}
    events = [
        *(started(0), step(2, 1, useful=2), event(3, "abort", round=1), started(4, pid=2) | elsewhere),
        *(step(5, 2, useful=3), event(5.5, "worker_exited", rank=0, pid=1)),
        step(8, 2, **{"recovery.start": 2, "useful": 2}) | elsewhere,
    ]
    expected = {"useful": 4, "repeated": 1, "recovery.replace": 1, "recovery.start": 2}
    assert seconds_of(events) == expected


def test_ledger_takes_the_wait_for_a_node_out_of_the_gap() -> None:
    events = [
        *(event(0, "view", nonce="a"), started(0), step(1, 1, useful=1)),
        *(event(1, "abort", round=1), event(3, "waiting"), event(4, "waiting"), event(13, "view", nonce="a")),
        *(started(13, pid=2), step(14, 2, useful=1)),
    ]
    assert seconds_of(events) == {"useful": 2, "waiting": 10, "recovery.replace": 2}


def test_ledger_books_what_comes_before_the_first_process_as_start_up() -> None:
    """From the start of the node: contacts are found, processes import torch."""
    first = [event(0, "agent_started"), event(3, "view", nonce="a", round=1), started(10), step(12, 1, useful=2)]
    assert seconds_of(first) == {"startup": 10, "useful": 2}
    again = [event(20, "agent_started"), event(21, "view", nonce="b", round=1), started(25), step(26, 2, useful=1)]
    assert seconds_of([*first, *again]) == {"startup": 15, "useful": 3}
    spare = [event(0, "agent_started"), event(3, "view", nonce="a", round=1), event(90, "view", nonce="a", round=2)]
    assert seconds_of([*spare, started(91, rank=3), step(92, 5, rank=3, useful=1)], rank=3) == {
        "startup": 1,
        "useful": 1,
    }


@pytest.mark.parametrize("end", [event(5, "verdict", code=75), event(99, "view", nonce="b")])
def test_ledger_counts_no_time_between_two_runs(end: dict[str, Any]) -> None:
    """The second attempt begins at an older step: what it does again is work in vain."""
    events = [
        *(event(0, "view", nonce="a"), started(0), step(1, 1, useful=1), step(2, 2, useful=1), end),
        *(started(100, pid=2), step(102, 2, startup=1, useful=1), step(103, 3, useful=1)),
    ]
    given = 1 if end["event"] == "view" else 0  # until its process is there
    assert seconds_of(events) == {"useful": 3, "startup": 1 + given, "repeated": 1}


def test_ledger_ends_with_a_rank_that_finished() -> None:
    events = [started(0), step(1, 1, useful=1), event(1, "finished", rank=0), event(9, "worker_exited", rank=0, pid=1)]
    assert seconds_of(events) == {"useful": 1}


@pytest.mark.parametrize("seed", range(10))
def test_ledger_adds_up_to_the_wall_clock_whatever_dies(seed: int) -> None:
    rng = random.Random(seed)
    now, number = 10.0, 0
    events = [started(now)]
    for _ in range(60):
        length = rng.uniform(0.5, 2)
        now += length
        if rng.random() < 0.8:
            number += 1
            events.append(step(now, number, useful=length))
            continue
        kind = rng.choice(["worker_exited", "abort", "nothing"])
        if kind != "nothing":
            events.append(event(now, kind, rank=0, round=1, pid=1))
        now += rng.uniform(0, 3)
        if rng.random() < 0.5:
            events.append(event(now, "waiting"))
            now += rng.uniform(0, 3)
            events.append(event(now, "view", nonce="a"))
        events.append(started(now))
    number += 1
    events.append(step(now + 1, number, useful=1))
    ledger = Ledger()
    ledger.add_all(events)
    assert ledger.total().wall_s == pytest.approx(now + 1 - 10)
    assert min(ledger.total().seconds.values()) >= 0


def test_reading_passes_over_a_line_that_was_cut_off(tmp_path: Path) -> None:
    whole = json.dumps(started(0))
    (tmp_path / "events-n1.jsonl").write_text(f"{whole}\n[1]\n{{}}\n{whole[:20]}")
    assert list(read_events(tmp_path / "events-n1.jsonl")) == [started(0)]


def test_reading_merges_nodes_in_order_of_time(tmp_path: Path) -> None:
    for name, times in (("n0", (1.0, 3.0)), ("n1", (2.0,))):
        (tmp_path / f"events-{name}.jsonl").write_text("".join(json.dumps(started(t)) + "\n" for t in times))
    assert [found["t"] for found in read_run(tmp_path)] == [1.0, 2.0, 3.0]


def test_reading_keeps_a_nodes_order_when_its_clock_is_put_back(tmp_path: Path) -> None:
    events = [started(100), step(103, 1, startup=2, useful=1), step(54, 2, useful=1), step(55, 3, useful=1)]
    (tmp_path / "events-n0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    (tmp_path / "events-n1.jsonl").write_text(json.dumps(event(102, "agent_started")) + "\n")
    read = list(read_run(tmp_path))
    assert [each for each in read if each["event"] != "agent_started"] == events
    assert seconds_of(read) == {"startup": 2, "useful": 3}


@pytest.mark.parametrize("damage", ["", "cut off", "x" * 100_000])
def test_span_of_a_run_is_seen_from_the_ends_of_its_files(damage: str, tmp_path: Path) -> None:
    for name, times in (("n0", (2.0, 5.0)), ("n1", (1.0, 4.0))):
        lines = [json.dumps(started(t)) + "\n" for t in times]
        (tmp_path / f"events-{name}.jsonl").write_text("".join(lines) + damage)
    assert span_of_run(tmp_path) == (1.0, 5.0)


def test_reading_a_folder_without_events_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no events"):
        span_of_run(tmp_path)
    with pytest.raises(ValueError, match="is no directory"):
        span_of_run(tmp_path / "missing")


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, '{"t": NaN, "event": "view"}', '{"t": 1e999, "event": "view"}', '{"t": "1", "event": "view"}'],
)
def test_reading_passes_over_lines_that_no_agent_wrote(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events-n0.jsonl"
    path.write_text(f"{line}\n{json.dumps(event(1, 'view'))}\n")
    assert [each["t"] for each in read_events(path)] == [1]
