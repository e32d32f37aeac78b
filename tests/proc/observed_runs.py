"""Runs of examples/train_gpt.py under observation, and p2prun with any script at all."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster import Cluster
from ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "examples" / "train_gpt.py")
SMALL = ("--num-layers", "2", "--width", "64", "--context", "32", "--batch", "2")
NUM_STEPS = 18
DEADLINE_S = 240.0  # only a hang takes this long


class Run:
    """A training run of 2 x 2 ranks under observation."""

    def __init__(
        self,
        folder: Path,
        environ: dict[str, str],
        *args: str,
        spares: int = 0,
        steps: int = NUM_STEPS,
        shape: tuple[int, int] = (2, 2),
        program: Sequence[str] = (TRAIN, *SMALL),
    ) -> None:
        self.out = folder / "out"
        script = [*program, "--out", str(self.out), "--steps", str(steps), *args]
        self.cluster = Cluster(
            folder / "run",
            script,
            num_training=shape[0],
            num_spares=spares,
            num_workers=shape[1],
            environ=environ,
        )
        self.history: list[dict[str, Any]] = []
        self._seen = 0

    def wait_for(self, what: str, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first event that fits, of those after the one that was waited for before."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self.history += self.cluster.events.new()
            while self._seen < len(self.history):
                self._seen += 1
                if found(self.history[self._seen - 1]):
                    return self.history[self._seen - 1]
            time.sleep(0.01)
        raise AssertionError(f"no {what} within {DEADLINE_S:.0f} s\n{self.cluster.log_tails()}")

    def wait_step(self, step: int, rank: int = 0) -> dict[str, Any]:
        return self.wait_for(f"step {step}", lambda e: e["event"] == "step" and e["rank"] == rank and e["step"] >= step)

    def pids(self) -> dict[int, int]:
        """Of all ranks, when they have started."""
        found: dict[int, int] = {}
        while len(found) < 4:
            event = self.wait_for("worker_started", lambda e: e["event"] == "worker_started")
            found[event["rank"]] = event["pid"]
        return found

    def all(self, kind: str) -> list[dict[str, Any]]:
        self.history += self.cluster.events.new()
        return [event for event in self.history if event["event"] == kind]

    def end(self) -> dict[str, int | None]:
        deadline = time.monotonic() + DEADLINE_S
        while self.cluster.running():
            assert time.monotonic() < deadline, f"the run does not end\n{self.cluster.log_tails()}"
            time.sleep(0.02)
        assert self.cluster.leftovers() == []
        return self.cluster.exit_codes()


def launch(folder: Path, environ: dict[str, str], *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "p2pstate.cli", *args]
    return subprocess.Popen(
        command,
        env={**os.environ, **environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch_two(folder: Path, environ: dict[str, str], *args: str) -> list[subprocess.Popen[str]]:
    """Two training nodes of one worker each."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    common = ("--nnodes", "2", "--contacts", ",".join(addresses))
    return [
        launch(folder, environ, *common, "--bind", address, "--name", f"node{index}", *args)
        for index, address in enumerate(addresses)
    ]


def script(folder: Path, body: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(body))
    return str(path)
