"""Incidents, the page and the trace, from made-up events of a run with two failures."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from p2pstate.cli import main
from p2pstate.observe import svg
from p2pstate.observe.history import History, make_history
from p2pstate.observe.incidents import Incident, IncidentFinder
from p2pstate.observe.perfetto import TraceWriter
from p2pstate.observe.report import as_html
from p2pstate.observe.timeline import MAX_RANKS, NUM_CELLS

Events = list[dict[str, Any]]


def event(t: float, kind: str, node: str = "n0", **fields: Any) -> dict[str, Any]:
    return {"t": t, "node": node, "event": kind, **fields}


def step(t: float, rank: int, number: int, node: str = "", **seconds: float) -> dict[str, Any]:
    clock = {"until": t, "seconds": seconds or {"useful": 0.9, "data": 0.1}}
    return event(t, "step", node or f"n{rank}", rank=rank, step=number, protected=number - 1, clock=clock, waited_s=0.2)


def recovery(
    t: float, node: str, rank: int, source: str, num_bytes: int, lost: int, phases: dict[str, float]
) -> dict[str, Any]:
    clock = {"until": t, "seconds": {f"recovery.{name}": seconds for name, seconds in phases.items()}}
    fields = {"source": source, "bytes": num_bytes, "steps_lost": lost, "phases": phases, "clock": clock}
    return event(t, "recovery", node, rank=rank, **fields)


def run_events(reason: str = "rank 1 on n1 died: signal 9 (SIGKILL)") -> Events:
    """Two ranks; rank 1 is killed within step 4 at 103.2 s, all have done step 4 at 108 s; node n1 dies at 109."""
    events = [
        event(100, "agent_started", configuration={"script": "train.py"}, environment={"Python": "3.11"}),
        event(100, "view", epoch=1, round=1, nonce="a", places=["n0", "n1"], spares=["n2"], start="fresh", reason=""),
        *(event(100, "worker_started", f"n{rank}", rank=rank, pid=rank) for rank in (0, 1)),
        *(step(100 + number, rank, number) for number in (1, 2, 3) for rank in (0, 1)),
        event(103.2, "worker_exited", "n1", rank=1, pid=1, cause="signal 9 (SIGKILL)"),
        *(event(103.5, "abort", node, round=1, reason=reason) for node in ("n0", "n1")),
        event(103.6, "worker_started", "n1", rank=1, pid=3),
        recovery(106, "n0", 0, "survivor", 0, 1, {"abort": 0.3, "spare": 2.7}),
        recovery(106, "n1", 1, "own vault", 0, 1, {"spare": 0.1, "pull": 0.4}),
        *(step(107, rank, 3, repeated=1.0) for rank in (0, 1)),  # the one that was lost
        step(107.5, 0, 4, useful=0.5),
        step(108, 1, 4),
        event(109, "member_dead", "n0", member="n1", reason="connection refused", proof=True),
        event(109.25, "abort", "n0", round=2, reason="node n1 is gone"),
        event(109.5, "worker_started", "n2", rank=1, pid=9),
        recovery(110, "n2", 1, "buddy", 5_000_000, 0, {"pull": 0.5}),
        step(111, 0, 5, useful=1.0, repeated=2.5),
        step(111, 1, 5, "n2"),
        *(event(112, "finished", node, rank=rank) for rank, node in ((0, "n0"), (1, "n2"))),
        event(113, "verdict", code=0, text="finished: every rank's script ended well"),
    ]
    return sorted(events, key=lambda each: float(each["t"]))


def find_incidents(events: Events) -> list[Incident]:
    finder = IncidentFinder()
    for each in events:
        finder.add(each)
    return finder.incidents


def history_of(events: Events) -> History:
    return make_history(events, (float(events[0]["t"]), float(events[-1]["t"])))


@pytest.fixture
def history() -> History:
    return history_of(run_events())


def test_incidents_have_cause_source_cost_and_phases() -> None:
    killed, node = find_incidents(run_events())
    assert (killed.t, killed.cause, killed.replaced, killed.source) == (103.2, "process", {1}, "own vault")
    assert killed.seconds == pytest.approx(108 - 103.2)
    assert killed.steps_lost == 1
    phases = {name: pytest.approx(seconds) for name, seconds in killed.phases().items()}
    assert phases == {"detect": 0.3, "abort": 0.3, "spare": 2.7, "pull": 0.4, "first step": 2.0}
    assert (node.cause, node.source, node.num_bytes) == ("node", "buddy", 5_000_000)
    assert node.seconds == pytest.approx(2.0)


def test_incident_that_the_run_did_not_survive_is_not_over() -> None:
    events = [each for each in run_events() if each["t"] < 104]
    (incident,) = find_incidents([*events, event(120, "verdict", code=75, text="given up")])
    assert incident.seconds is None


@pytest.mark.parametrize(("told", "cause"), [("hang", "hang"), ("<b>", "other"), (None, "other")])
def test_incident_on_a_node_that_saw_no_sign_has_the_cause_that_it_was_told(told: str | None, cause: str) -> None:
    (incident,) = find_incidents([event(1, "abort", round=1, reason="rank 3 on n7 hangs", cause=told)])
    assert incident.cause == cause


def test_incident_of_a_second_failure_before_progress_is_the_same_one() -> None:
    events = [each for each in run_events() if not 106 <= each["t"] < 109]
    (incident,) = find_incidents(events)
    assert incident.seconds == pytest.approx(111 - 103.2)


def test_incident_tells_when_all_ranks_were_protected_again() -> None:
    """Rank 1 tells of a version on two nodes one step after rank 0; a step told late belongs to the time before."""
    events = [*run_events()[:-1], step(112.5, 1, 6, "n2")]
    for each in events:
        if each["event"] == "step" and 106 <= each["t"] < (107.5 if each["rank"] == 0 else 108):
            each["protected"] = None
    killed, node = find_incidents(events)
    assert killed.protected_s == pytest.approx(108 - 103.2)
    assert node.protected_s == pytest.approx(111 - 109)
    unprotected = [
        each | ({"protected": None} if each["event"] == "step" and each["t"] > 109 else {}) for each in events
    ]
    assert find_incidents(unprotected)[1].protected_s is None


def test_node_that_only_looked_on_tells_the_round_it_joined_apart() -> None:
    """A spare sees one failure, misses the end of the next round, and takes a rank."""
    views = [
        event(t, "view", "n2", epoch=number, round=number, nonce="a", reason=f"for reason {number}")
        for number, t in ((1, 100), (2, 105), (3, 110))
    ]
    events = [views[0], event(104, "abort", "n2", round=1, reason="rank 0 died"), views[1]]
    (looked_on,) = find_incidents(events)
    assert looked_on.looked_on
    events += [views[2], event(110.5, "worker_started", "n2", rank=1, pid=9)]
    first, second = find_incidents(events)
    assert (first.round, second.round, second.reason) == (1, 2, "for reason 3")
    assert (first.looked_on, second.looked_on, second.replaced) == (True, False, {1})


def test_hang_is_an_incident_of_its_own_kind() -> None:
    events = [*run_events(), event(103.1, "hang", "n1", rank=1, pid=1, reason="no progress")]
    assert find_incidents(sorted(events, key=lambda each: float(each["t"])))[0].cause == "hang"


@pytest.mark.parametrize(("sign_at", "cause"), [(3, "other"), (8, "process"), (39, "other")])
def test_death_long_before_a_round_ends_or_after_it_is_no_sign_of_it(sign_at: float, cause: str) -> None:
    """The round ends at 38: the death at 3 is too old, and the one at 39 is told too late."""
    signs = [event(sign_at, "worker_exited", rank=0, pid=1, cause="signal 9")]
    events = [event(1, "view", round=1, nonce="a"), *signs, event(38, "abort", round=1, reason="rank 1 wants a round")]
    assert [incident.cause for incident in find_incidents(events)] == [cause]


def test_death_explains_one_round_only() -> None:
    events = [
        event(1, "view", round=1, nonce="a"),
        event(2, "worker_exited", rank=0, pid=1, cause="signal 9"),
        event(3, "abort", round=1, reason="rank 0 died"),
        event(4, "view", round=2, nonce="a", reason="rank 0 died"),
        event(5, "worker_started", rank=0, pid=2),
        recovery(6, "n0", 0, "survivor", 0, 0, {}),
        step(7, 0, 1),
        event(8, "abort", round=2, reason="rank 1 wants a round"),
    ]
    assert [(incident.cause, incident.nonce) for incident in find_incidents(events)] == [
        ("process", "a"),
        ("other", "a"),
    ]


@pytest.mark.parametrize(
    ("round_", "places", "causes"),
    [(1, ["n0"], []), (2, ["n0", "n1"], ["other"]), (2, ["n0", "n2"], ["node"]), (2, ["n0", "n1", "n2"], ["other"])],
)
def test_next_round_is_an_incident_also_where_nobody_was_told_of_the_end_of_the_one_before(
    round_: int, places: list[str], causes: list[str]
) -> None:
    events = [
        event(1, "view", round=1, nonce="a", places=["n0", "n1"]),
        event(2, "view", round=round_, nonce="a", places=places, reason="for a reason"),
    ]
    assert [incident.cause for incident in find_incidents(events)] == causes


def test_worker_that_ends_after_it_finished_is_no_sign() -> None:
    events = [
        event(1, "view", nonce="a"),
        event(1, "worker_started", rank=0, pid=1),
        event(2, "finished", rank=0),
        event(2, "worker_exited", rank=0, pid=1, cause="exit 0"),
        event(3, "abort", round=1, reason="rank 1 wants a round"),
    ]
    assert [incident.cause for incident in find_incidents(events)] == ["other"]


def test_history_sums_up_a_run(history: History) -> None:
    assert (history.num_failures, history.newest_step, history.steps_lost) == (2, 5, 1)
    assert history.total.wall_s == pytest.approx(22, abs=0.01)
    assert history.rank_mtbf_s == pytest.approx(11, abs=0.01)
    assert history.verdict is not None
    assert history.num_starts == 1


def test_history_of_damaged_events_says_so() -> None:
    for event in ({"t": 1.0, "event": "step", "clock": {}, "rank": 0}, {"t": 1.0, "event": "agent_started"}):
        with pytest.raises(ValueError, match="events are damaged"):
            history_of([event])


def test_page_is_well_formed_needs_nothing_from_elsewhere_and_tells_the_story(history: History) -> None:
    page = as_html(history, "Run 1")
    root = ElementTree.fromstring(
        page.replace("<!doctype html>", "")
        .replace('<meta charset="utf-8">', "")
        .replace('<meta name="viewport" content="width=device-width">', "")
    )
    assert root.tag == "html"
    assert not re.findall(r"(?:src|href)=|https?://|url\(|@import|<script", page)
    for text in (
        "Run 1",
        "SIGKILL",
        "node n1 is gone",
        "own vault",
        "buddy",
        "train.py",
        "steps lost",
        "rank 1",
        "slowest rank",
    ):
        assert text in page
    assert len(root.findall(".//svg")) >= 4


def test_page_shows_phases_that_this_release_does_not_know() -> None:
    of_later = recovery(106, "n1", 1, "own vault", 0, 1, {"teleport": 0.4})
    later = [of_later if each["event"] == "recovery" else each for each in run_events()]
    assert "teleport: 0.400 s" in as_html(history_of(later), "Run")


def test_page_escapes_what_the_run_wrote() -> None:
    page = as_html(history_of(run_events(reason="<script>alert(1)</script> & co")), "<b>")
    assert "<script>" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;" in page


def test_page_of_a_run_that_never_trained_says_so() -> None:
    page = as_html(history_of([event(1, "waiting", reason="1 of 2")]), "Run")
    assert "Nothing was measured" in page
    assert "No step was committed" in page


def test_cells_of_the_timeline_hold_all_the_time(history: History) -> None:
    """The widths in the strips add up to what was measured of each rank, no cell is more than full."""
    drawn = svg.strips([("rank 0", [{"useful": 0.5, "data": 0.5}, {"recovery": 1.0}])], [])
    heights = [float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)"', drawn)]
    assert sum(heights) == pytest.approx(2 * (svg.ROW_HEIGHT - 5), abs=0.2)


def test_cell_that_holds_more_than_there_was_time_is_full() -> None:
    drawn = svg.strips([("rank 0", [{"useful": 1.5, "data": 0.5}])], [])
    heights = [float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)"', drawn)]
    assert sum(heights) == pytest.approx(svg.ROW_HEIGHT - 5, abs=0.2)


def test_waterfall_goes_down_to_what_was_useful() -> None:
    drawn = svg.waterfall({"data": ("waiting", 25.0), "useful": ("useful", 75.0)}, 100.0, "s")
    marks = [(float(x), float(width)) for x, width in re.findall(r'<rect x="([\d.]+)"[^>]* width="([\d.]+)"', drawn)]
    (data_x, data_width), (useful_x, useful_width) = marks
    assert data_width == pytest.approx(useful_width / 3, abs=0.1)
    assert useful_x == svg.LABEL_WIDTH
    assert data_x == pytest.approx(useful_x + useful_width, abs=0.1)


def test_trace_has_a_thread_per_rank_without_overlaps_and_all_the_time() -> None:
    file = io.StringIO()
    writer = TraceWriter(file, begin=100.0)
    history = make_history(run_events(), (100.0, 113.0), writer.add)
    writer.finish(history.incidents, history.end)
    trace = json.loads(file.getvalue())
    slices = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    names = {each["args"].get("name") for each in trace["traceEvents"] if each["ph"] == "M"}
    assert {"n0", "n1", "n2", "rank 0", "rank 1", "incidents"} <= names
    for track in {(each["pid"], each["tid"]) for each in slices}:
        ordered = sorted((e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == track)
        assert all(ts + dur <= after + 1 for (ts, dur), (after, _) in pairwise(ordered)), track
    useful_us = sum(each["dur"] for each in slices if each["name"] == "useful")
    assert useful_us / 1e6 == pytest.approx(history.total.seconds["useful"], rel=1e-3)
    assert any(each["name"] == "incident 1: process" for each in slices)


def write(folder: Path, events: Events) -> None:
    for node in {each["node"] for each in events}:
        lines = [json.dumps(each) + "\n" for each in events if each["node"] == node]
        (folder / f"events-{node}.jsonl").write_text("".join(lines))


def test_command_makes_the_page_and_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, run_events())
    trace = tmp_path / "trace.json"
    assert main(["report", str(tmp_path), "--trace", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("goodput ")
    assert "failure 2 (node) took 2.00 s: node n1 is gone" in shown
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads(trace.read_text())["traceEvents"]


def test_command_gives_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, run_events())
    assert main(["report", str(tmp_path), "--json", "--output", str(tmp_path / "page.html")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failures"] == 2
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"])


def test_history_of_a_long_run_keeps_no_more_than_one_of_a_short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ranks, many steps: the first ranks in the timeline, a fair sample of the steps, and all of the sums."""
    monkeypatch.setattr("p2pstate.observe.history.NUM_SAMPLES", 50)

    def events() -> Iterator[dict[str, Any]]:
        for number in range(1, 101):
            for rank in range(MAX_RANKS + 9, -1, -1):
                yield step(100.0 + number, rank, number, useful=1.0 if rank else 0.5)

    history = make_history(events(), (100.0, 200.0))
    assert sorted(history.timeline.ranks) == list(range(MAX_RANKS))
    assert len(history.ranks) == MAX_RANKS + 10
    assert sum(cell.get("useful", 0.0) for cell in history.timeline.ranks[5]) == pytest.approx(NUM_CELLS)
    assert (len(history.step_samples_s), set(history.step_samples_s) <= {0.5, 1.0}) == (50, True)
    assert history.useful_s == pytest.approx(history.total.seconds["useful"])
    assert f"The first {MAX_RANKS} of {MAX_RANKS + 10} ranks" in as_html(history, "Run")


@pytest.mark.parametrize("option", ["--output", "--trace"])
def test_command_on_a_full_disk_says_what_to_do(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, run_events())
    assert main(["report", str(tmp_path), option, "/dev/full"]) == 1
    assert "cannot be written; give --output and --trace places with room" in capsys.readouterr().err


def test_command_without_a_run_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "holds no events" in capsys.readouterr().err
