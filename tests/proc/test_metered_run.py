"""The meter in real runs: a delay of known length, and a kill, land in their categories; seconds add up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from p2pstate.observe.goodput import Goodput
from p2pstate.observe.ledger import Ledger
from p2pstate.observe.reading import read_run
from p2pstate.observe.skew import Windows, judge

SCRIPT = str(Path(__file__).parent / "scripts" / "metered.py")
COPY_S = 2.0
DEADLINE_S = 120.0  # only a hang takes this long


def run(
    folder: Path,
    environ: dict[str, str],
    watch: Callable[[dict[str, Any]], None] = lambda event: None,
) -> list[dict[str, Any]]:
    """Two nodes of one worker each, to the end; returns all events. ``watch`` sees them while they come."""
    with Cluster(folder, [SCRIPT], num_training=2, num_spares=0, num_workers=1, environ=environ) as cluster:
        deadline = time.monotonic() + DEADLINE_S
        while cluster.running():
            for event in cluster.events.new():
                watch(event)
            assert time.monotonic() < deadline, cluster.log_tails()
            time.sleep(0.01)
        assert set(cluster.exit_codes().values()) == {0}, cluster.log_tails()
    return list(read_run(folder))


def measure(events: list[dict[str, Any]]) -> dict[int, Goodput]:
    ledger = Ledger()
    ledger.add_all(events)
    return ledger.ranks()


def wall_s(events: list[dict[str, Any]], rank: int) -> float:
    """From the start of a rank's node, or of its first process where there are no nodes, to the last that was measured,
    at the end of its script, by the events' own times."""
    of_rank = [event for event in events if event.get("rank") == rank]
    process = next(event for event in of_rank if event["event"] == "worker_started")
    agents = [e["t"] for e in events if (e["event"], e["node"]) == ("agent_started", process["node"])]
    started = min([process["t"], *agents])
    finished = max(event["t"] for event in of_rank if event["event"] == "finished")
    measured = max(event["clock"]["until"] for event in of_rank if "clock" in event)
    assert measured <= finished
    return float(measured - started)


def test_meter_puts_delays_into_their_categories(tmp_path: Path, fork_server: dict[str, str]) -> None:
    environ = fork_server | {"CHECKPOINT": str(tmp_path / "checkpoints"), "TRACKED": str(tmp_path / "tracked")}
    delays = {"DELAY_BATCH": "1", "DELAY_COPY": str(COPY_S), "DELAY_PHASE": "1", "DELAY_SAVE": "1", "STEPS": "8"}
    delays["TOOK"] = str(tmp_path / "took")
    events = run(tmp_path / "run", environ | delays)
    for rank, found in measure(events).items():
        assert found.wall_s == pytest.approx(wall_s(events, rank), rel=0.01)
        seconds = found.by_category()
        took = json.loads((tmp_path / f"took{rank}").read_text())  # a busy machine makes delays longer
        assert min(took.values()) >= 1.0
        assert seconds["data"] == pytest.approx(took["batch"], rel=0.1)
        assert found.phases("phase") == {"evaluation": pytest.approx(took["phase"], rel=0.1)}
        # The first version is copied while the first step runs, whose vote waits for the rest of the copy.
        first = next(e for e in events if e["event"] == "step" and (e["rank"], e["step"]) == (rank, 1))["clock"][
            "seconds"
        ]
        beside_s = first["useful"] + first["data"]
        assert took["copy"] - beside_s <= 1.1 * first["protection"]
        assert first["protection"] <= 1.1 * took["copy"]
        assert "recovery" not in seconds
        assert "repeated" not in seconds
        assert seconds["saving"] == pytest.approx(took["save"], rel=0.1)  # the last version, at the end of the loop

    step, tracked = json.loads((tmp_path / "tracked").read_text())
    assert step == 8
    took = json.loads((tmp_path / "took0").read_text())
    assert tracked["p2pstate/data_s"] == pytest.approx(took["batch"], rel=0.1)
    assert 0 < tracked["p2pstate/goodput"] < 1

    resumed = run(tmp_path / "again", environ | {"DELAY_REHEARSAL": "0.8", "STEPS": "10"})
    for found in measure(resumed).values():
        seconds = found.by_category()
        assert seconds["startup"] > 2 * 0.8  # from disk, each rank rehearses
        assert seconds["useful"] < 0.8
        assert "repeated" not in seconds


def test_meter_puts_a_kill_into_recovery_and_adds_up_over_processes(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    killed_at = 0.0
    pids: dict[int, int] = {}

    def watch(event: dict[str, Any]) -> None:
        nonlocal killed_at
        if event["event"] == "worker_started":
            pids[event["rank"]] = event["pid"]
        if event["event"] == "step" and event["step"] >= 10 and not killed_at:
            killed_at = time.time()
            os.kill(pids[1], signal.SIGKILL)

    events = run(tmp_path / "run", fork_server | {"STEPS": "25", "SLOW_RANK": "0"}, watch)
    steps = [event for event in events if event["event"] == "step"]
    last = max(event["step"] for event in steps if event["t"] < killed_at)
    usual_s = max(event["clock"]["seconds"].get("useful", 0.0) for event in steps if event["step"] == last)
    for rank, found in measure(events).items():
        assert found.wall_s == pytest.approx(wall_s(events, rank), rel=0.01)
        resumed_at = min(e["t"] for e in steps if e["rank"] == rank and e["t"] > killed_at and e["step"] > last + 1)
        lost_s = sum(found.by_category()[name] for name in ("recovery", "repeated"))
        # The kill came within a step, and one more was done before there was progress.
        assert lost_s == pytest.approx(resumed_at - killed_at, rel=0.1, abs=4 * usual_s)
        assert found.seconds["recovery.restore"] > 0
    windows = Windows(keep=len(events))
    for event in events:
        windows.add(event)
    first = judge(1, windows.loads[1])  # the others wait for it, and leave it alone
    assert first is not None
    assert (first.slowest, first.fastest) == (0, 1)
    assert 0 in first.stragglers
    assert sum(event["event"] == "worker_started" and event["rank"] == 0 for event in events) == 1
    assert any(event["event"] == "goodput" and event["seconds"]["useful"] > 0 for event in events)


@pytest.mark.slow
def test_meter_alone_measures_a_script_that_stock_torchrun_restarts(tmp_path: Path) -> None:
    """Dies in step 8, goes on from the checkpoint of step 5: steps 6 and 7 are repeated."""
    script = str(Path(__file__).parent / "scripts" / "metered_alone.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ended = subprocess.run(
        [*command, script, str(tmp_path), "8"], capture_output=True, text=True, timeout=DEADLINE_S, env=environ
    )
    assert ended.returncode == 0, ended.stderr
    events = list(read_run(tmp_path))
    found = measure(events)[0]
    assert found.wall_s == pytest.approx(wall_s(events, 0), rel=0.01)
    seconds = found.by_category()
    took = defaultdict(list)  # a busy machine makes delays longer
    for line in (tmp_path / "took").read_text().splitlines():
        took[line.split()[0]].append(float(line.split()[1]))
    assert (len(took["save"]), len(took["step"])) == (4, 23)  # of which two were done again, and one died
    assert seconds["saving"] == pytest.approx(sum(took["save"]), rel=0.1)
    assert found.phases("phase") == {"evaluation": pytest.approx(sum(took["phase"]), rel=0.1)}
    assert seconds["repeated"] == pytest.approx(sum(took["step"][8:10]), rel=0.1)
    assert seconds["useful"] == pytest.approx(sum(took["step"][:7] + took["step"][10:]), rel=0.1)
    deaths = [event["t"] for event in events if event["event"] == "worker_started"]
    assert found.seconds["recovery.replace"] == pytest.approx(deaths[1] - before(events, deaths[1]), rel=0.05)


def before(events: list[dict[str, Any]], t: float) -> float:
    """When something was measured last before ``t``."""
    return float(max(event["clock"]["until"] for event in events if "clock" in event and event["t"] < t))
