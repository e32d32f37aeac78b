"""Faults beyond the kill matrix: each ends as promised, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from observed_runs import DEADLINE_S, SMALL, TRAIN, Run, launch_two

from outcome import compare
from p2pstate.placement import partners

ENDLESS = ("--steps", "100000", "--pace", "0.05")  # until it is ended; other tests need the processors, too


@pytest.fixture
def start(tmp_path: Path, fork_server: dict[str, str]) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*args: str, **options: Any) -> Run:
        environ = options.pop("environ", fork_server)
        runs.append(Run(tmp_path / str(len(runs)), environ, *args, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.cluster.stop()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, fork_server: dict[str, str]) -> Path:
    """The outcome of an undisturbed run."""
    run = Run(tmp_path_factory.mktemp("expected"), fork_server)
    assert set(run.end().values()) == {0}
    return run.out


def assert_identical(run: Run, expected: Path) -> None:
    comparison = compare(run.out, expected, 4)
    assert comparison.identical, "\n".join([*comparison.differences, run.cluster.log_tails()])


@pytest.mark.parametrize("kill", ["1:1:forward", pytest.param("2:2:backward", marks=pytest.mark.slow), "2:0:in_step"])
def test_kill_in_the_first_steps_restarts_all_workers_and_ends_identical(
    kill: str, start: Callable[..., Run], expected: Path
) -> None:
    run = start("--kill", kill)
    assert set(run.end().values()) == {0}
    assert_identical(run, expected)


def test_newcomer_killed_while_it_joins_is_replaced_again(start: Callable[..., Run], expected: Path) -> None:
    run = start("--kill", "8:1:backward")
    run.pids()
    newcomer = run.wait_for("the replacement", lambda e: e["event"] == "worker_started" and e["rank"] == 1)
    time.sleep(0.2)
    os.kill(newcomer["pid"], signal.SIGKILL)
    second = run.wait_for("its replacement", lambda e: e["event"] == "worker_started" and e["rank"] == 1)
    assert second["pid"] != newcomer["pid"]
    assert set(run.end().values()) == {0}
    assert_identical(run, expected)


def test_both_workers_of_a_node_killed_at_once_resume_from_its_vault(start: Callable[..., Run], expected: Path) -> None:
    run = start()
    pids = run.pids()
    run.wait_step(8)
    for rank in (2, 3):
        os.kill(pids[rank], signal.SIGKILL)
    sources = set()
    for _ in range(2):
        event = run.wait_for("recovery", lambda e: e["event"] == "recovery" and e["rank"] in (2, 3))
        sources.add(event["source"])
    assert sources == {"own vault"}
    assert set(run.end().values()) == {0}
    assert_identical(run, expected)


def test_stopped_rank_does_not_hold_up_the_abort_of_the_others(start: Callable[..., Run], expected: Path) -> None:
    """Survivors that wait in gloo for a live but silent peer are freed while it is still silent."""
    run = start()
    pids = run.pids()
    run.wait_step(6)
    os.kill(pids[3], signal.SIGSTOP)
    time.sleep(0.5)  # the others are in a collective now, waiting for rank 3
    os.kill(pids[1], signal.SIGKILL)
    freed: set[int] = set()
    while freed != {0, 2}:
        freed.add(run.wait_for("rank freed", lambda e: e["event"] == "discarded" and e["rank"] in (0, 2))["rank"])
    os.kill(pids[3], signal.SIGCONT)
    assert set(run.end().values()) == {0}
    assert_identical(run, expected)


@pytest.mark.slow
def test_survivors_of_several_faults_keep_their_processes(start: Callable[..., Run], expected: Path) -> None:
    run = start("--kill", "6:1:forward", "--kill", "12:3:in_step", spares=1)
    before = run.pids()
    assert set(run.end().values()) == {0}
    replaced = [e["rank"] for e in run.all("worker_started") if before.get(e["rank"]) != e["pid"]]
    assert sorted(replaced) == [1, 3]
    assert_identical(run, expected)


def test_node_lost_without_a_spare_ends_the_run_with_the_reason(tmp_path: Path, fork_server: dict[str, str]) -> None:
    endless = (TRAIN, *ENDLESS, "--out", str(tmp_path / "out"), *SMALL)
    nodes = launch_two(tmp_path, fork_server, "--spare-wait", "1", *endless)
    deadline = time.monotonic() + DEADLINE_S
    positions = (tmp_path / "out").glob
    while not any('"step": 5,' in path.read_text() for path in positions("positions-1.*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    nodes[0].kill()
    _, stderr = nodes[1].communicate(timeout=DEADLINE_S)
    assert nodes[1].returncode == 75, stderr
    assert "--spare-wait" in stderr
    assert re.search(r"; step [1-9]\d*, protected in memory, is lost with the run", stderr), stderr
    nodes[0].communicate(timeout=DEADLINE_S)


def test_rank_and_its_buddy_lost_end_the_run_with_what_is_lost(start: Callable[..., Run]) -> None:
    """Four nodes in pairs: losing two that are not partners is survived, losing two partners is not, and is said."""
    run = start(*ENDLESS, spares=4, shape=(4, 1))
    run.wait_step(5)
    places = run.all("view")[-1]["places"]
    pairs = partners(places)
    assert pairs[0] != (1,)
    for name in places[:2]:
        run.cluster.kill_node(name)
    resumed = run.wait_for("recovery", lambda e: e["event"] == "recovery" and e["rank"] in (0, 1))
    assert resumed["source"] == "buddy"
    run.wait_step(resumed["version"][1] + 5, rank=2)
    places = max(run.all("view"), key=lambda e: e["epoch"])["places"]
    for rank in (0, *pairs[0]):
        run.cluster.kill_node(places[rank])
    codes = run.end()
    assert set(codes.values()) == {77}, f"{codes}\n{run.cluster.log_tails()}"
    assert "no live node has shard" in run.cluster.log_tails()


def test_signal_to_every_agent_ends_the_run_at_once(start: Callable[..., Run]) -> None:
    run = start(*ENDLESS)
    run.wait_step(3)
    for node in run.cluster.running():
        node.process.send_signal(signal.SIGTERM)
    assert set(run.end().values()) <= {128 + signal.SIGTERM, 75}


def test_run_without_any_tcpstore_survives_a_worker_and_a_node(start: Callable[..., Run], tmp_path: Path) -> None:
    """TCPStore's constructor ends the process, in agents, templates and workers alike."""
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "sitecustomize.py").write_text(
        textwrap.dedent("""
            import os
            import torch.distributed

            def constructed(self, *args, **kwargs):
                os.write(2, b"TCPStore was constructed\\n")
                os._exit(99)

            torch.distributed.TCPStore.__init__ = constructed
        """)
    )
    path = os.pathsep.join([str(trap), *filter(None, [os.environ.get("PYTHONPATH")])])
    check = subprocess.run(
        [sys.executable, "-c", "import torch.distributed as d; d.TCPStore('127.0.0.1', 0, 1, True)"],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert check.returncode == 99, "the trap does not work"
    environ = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    kills = ("--kill", "5:1:backward", "--kill", "10:0:backward:node")
    run = start(*kills, spares=1, steps=14, shape=(2, 1), environ=environ)
    deadline = time.monotonic() + DEADLINE_S
    while run.cluster.nodes["node0"].process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    run.cluster.nodes["node0"].killed = True
    assert set(run.end().values()) == {0}


def test_loss_of_every_training_node_does_not_start_anew_in_silence(start: Callable[..., Run]) -> None:
    run = start(*ENDLESS, spares=2)
    run.wait_step(10)
    time.sleep(2)  # until the spares have heard of it
    for name in run.all("view")[-1]["places"]:
        run.cluster.kill_node(name)
    codes = run.end()
    assert set(codes.values()) == {77}, f"{codes}\n{run.cluster.log_tails()}"
    assert "training had come to step" in run.cluster.log_tails()


@pytest.mark.slow
def test_spare_node_survives_more_recoveries_than_are_allowed_without_progress(start: Callable[..., Run]) -> None:
    kills = [arg for index in range(7) for arg in ("--kill", f"{4 + 2 * index}:{index % 4}:backward")]
    run = start(*kills, spares=1, steps=20)
    assert set(run.end().values()) == {0}
