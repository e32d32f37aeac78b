"""SIGTERM and SIGINT: whoever is asked to go finishes its step, and nobody loses one.

Also where not every step becomes a version, because copies do not keep up (here: because only every third is to).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mishaps import DEADLINE_S, NUM_STEPS, SCRIPT

from cluster import Cluster


class Watched:
    """A run of scripts/mishaps.py, two nodes of two workers and one spare node, as it goes."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.out = folder / "out"
        self.out.mkdir()
        script = [SCRIPT, "--out", str(self.out), "--steps", str(NUM_STEPS), "--every", "3"]
        self.cluster = Cluster(folder / "run", script, num_training=2, num_spares=1, num_workers=2, environ=environ)
        self.events: list[dict[str, Any]] = []

    def all(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        self.events += self.cluster.events.new()
        fitting = [event for event in self.events if event["event"] == kind]
        return [event for event in fitting if all(event.get(key) == value for key, value in fields.items())]

    def wait_for(self, kind: str, **fields: Any) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := self.all(kind, **fields)):
            assert time.monotonic() < deadline, f"no {kind} {fields}\n{self.cluster.log_tails()}"
            time.sleep(0.01)
        return found[0]

    def end(self) -> dict[str, int | None]:
        deadline = time.monotonic() + DEADLINE_S
        while self.cluster.running():
            assert time.monotonic() < deadline, f"the run does not end\n{self.cluster.log_tails()}"
            time.sleep(0.02)
        return self.cluster.exit_codes()


@pytest.fixture
def run(tmp_path: Path, fork_server: dict[str, str]) -> Iterator[Watched]:
    watched = Watched(tmp_path, fork_server)
    yield watched
    watched.cluster.stop()


def test_node_and_workers_that_are_asked_to_go_lose_no_step(run: Watched) -> None:
    places = run.wait_for("view", epoch=1)["places"]
    for step, number in ((6, signal.SIGTERM), (12, signal.SIGINT)):
        run.wait_for("step", step=step, rank=1)
        started = run.all("worker_started", rank=1)
        os.kill(started[-1]["pid"], number)
        ended = run.wait_for("worker_exited", rank=1, pid=started[-1]["pid"])
        assert "exit 75" in ended["cause"]
        aborts = [event["reason"] for event in run.all("abort")]
        assert any(f"{signal.Signals(number).name} was sent to it" in reason for reason in aborts), aborts
    run.wait_for("step", step=20, rank=1)
    leaver = next(name for name in places if name != places[0])
    run.cluster.nodes[leaver].process.send_signal(signal.SIGTERM)
    codes = run.end()
    assert codes.pop(leaver) == 128 + signal.SIGTERM, run.cluster.log_tails()
    assert set(codes.values()) == {0}, run.cluster.log_tails()
    assert run.all("leaving", node=leaver)
    recoveries = run.all("recovery")
    assert {event["epoch"] for event in recoveries} == {2, 3, 4}, recoveries
    assert all(event["steps_lost"] == 0 for event in recoveries), recoveries


def test_signal_to_all_processes_ends_the_run_soon(run: Watched) -> None:
    run.wait_for("step", step=6, rank=0)
    began = time.monotonic()
    for event in run.all("worker_started"):
        os.kill(event["pid"], signal.SIGTERM)
    for node in run.cluster.running():
        node.process.send_signal(signal.SIGTERM)
    codes = run.end()
    assert time.monotonic() - began < DEADLINE_S / 2
    assert set(codes.values()) <= {128 + signal.SIGTERM, 75}, run.cluster.log_tails()
    assert run.cluster.leftovers() == []
