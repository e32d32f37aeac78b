"""Random faults, seeded: workers and nodes are killed, stopped, asked to go and their copies damaged, at random moments
and in chosen phases, and the final bits stay the same.

The short version is part of the suite; `-m soak` runs many seeds. A failing seed is in the test's name.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from outcome import compare
from rendezvous.config import Config
from rendezvous.operator import Line
from rendezvous.zmq_transport import ZmqTransport

TRAIN = str(Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py")
SMALL = ("--num-layers", "2", "--width", "64", "--context", "32", "--batch", "2")
PARALLELISMS = {"fsdp2": (), "ddp": ("--ddp", "--batch-norm")}
NUM_STEPS, NUM_FAULTS, NUM_RANKS = 120, 8, 4
KINDS = ("worker", "worker", "pair", "node", "phase", "segv", "term", "stop", "damage")
SIGNALS = {"segv": signal.SIGSEGV, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
PHASES = ("fetching", "stepping", "between", "joining")
DEADLINE_S = 240.0  # only a hang takes this long


class Faults:
    """What is injected into one run, and when: all of it follows from the seed and from what is seen of the run."""

    def __init__(self, seed: int, cluster: Cluster, line: Line) -> None:
        self._chance = random.Random(seed)
        self._cluster = cluster
        self._line = line
        self._next_at = float("inf")
        self._pids: dict[int, int] = {}
        self._nodes: dict[int, str] = {}  # of each rank
        self._places: list[str] = []
        self._spares: list[str] = []
        self._newest = 0
        self._whole_from = 0  # copies may be lost once a version newer than this one is in two places again
        self._whole = False
        self.injected: list[str] = []

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "worker_started":
            self._pids[event["rank"]], self._nodes[event["rank"]] = event["pid"], event["node"]
        elif event["event"] == "view":
            self._places, self._spares = event["places"], event["spares"]
        elif event["event"] == "step":
            if self._newest == 0:
                self._next_at = time.monotonic() + self._chance.uniform(0, 1.0)
            self._newest = max(self._newest, event["step"])
            self._whole = self._whole or (event["protected"] or 0) > self._whole_from

    def inject_if_due(self) -> None:
        if time.monotonic() < self._next_at or self._newest >= NUM_STEPS - 15 or len(self.injected) >= NUM_FAULTS:
            return
        what = self._inject(self._chance.choice(KINDS))
        self.injected.append(f"{what} at step {self._newest}")
        self._next_at = time.monotonic() + self._chance.choice([0.05, 0.3, 0.6, 1.0, 1.5]) * self._chance.uniform(
            0.5, 1.5
        )

    def _inject(self, kind: str) -> str:
        if kind == "node" and self._whole and self._spares and len(self._cluster.running()) > 2:
            self._lose_copies()
            name = self._chance.choice(self._places)
            self._cluster.kill_node(name)
            self._cluster.add_node()
            return name
        rank = self._chance.choice(sorted(self._pids))
        if kind == "damage" and self._whole:
            self._lose_copies()
            damaged = self._ask("corrupt", rank, None)
            return f"damaged copies, {damaged}, and SIGKILL to rank {rank}{self._signal(rank, signal.SIGKILL)}"
        if kind == "phase":
            phase, action = self._chance.choice(PHASES), self._chance.choice(["kill", "stop"])
            return f"{action} rank {rank} while it is {phase}: {self._ask(action, rank, phase)}"
        if kind == "pair":
            pair = self._chance.sample(sorted(self._pids), 2)
            return "SIGKILL to ranks " + ", ".join(f"{each}{self._signal(each, signal.SIGKILL)}" for each in pair)
        number = SIGNALS.get(kind, signal.SIGKILL)
        return f"{number.name} to rank {rank}{self._signal(rank, number)}"

    def _lose_copies(self) -> None:
        self._whole_from, self._whole = self._newest + 2, False  # two versions may be on their way now

    def _signal(self, rank: int, number: signal.Signals) -> str:
        try:
            os.kill(self._pids[rank], number)
        except ProcessLookupError:
            return " (which was replaced a moment ago)"
        return ""

    def _ask(self, action: str, rank: int, phase: str | None) -> object:
        node = self._cluster.nodes[self._nodes[rank]]
        return self._line.ask_one(node.address, "chaos", {"action": action, "rank": rank, "phase": phase}, 5.0)


@contextlib.contextmanager
def operator_line() -> Iterator[Line]:
    config = Config(run_id="run", name="tester", bind="127.0.0.1:0", contacts=())
    transport = ZmqTransport(config)
    try:
        yield Line(config, transport)
    finally:
        transport.close(0.0)


def train(folder: Path, parallelism: str, seed: int | None, environ: dict[str, str]) -> tuple[Path, list[str]]:
    """Run to the end while faults are injected. Returns where the outcome is, and what was injected."""
    out = folder / "out"
    script = ["--chaos", "--hang-floor", "1", TRAIN, "--out", str(out), "--steps", str(NUM_STEPS)]
    script += [*SMALL, *PARALLELISMS[parallelism]]
    shape = {"num_training": 2, "num_spares": int(seed is not None), "num_workers": 2, "environ": environ}
    with Cluster(folder / "run", script, **shape) as cluster, operator_line() as line:
        faults = Faults(seed, cluster, line) if seed is not None else None
        deadline = time.monotonic() + DEADLINE_S
        while cluster.running():
            injected = faults.injected if faults is not None else []
            assert time.monotonic() < deadline, f"the run hangs after {injected}\n{cluster.log_tails()}"
            for event in cluster.events.new():
                if faults is not None:
                    faults.hear(event)
            if faults is not None:
                faults.inject_if_due()
            cluster.dismiss_late()
            time.sleep(0.005)
        codes = cluster.exit_codes()
        assert set(codes.values()) == {0}, f"{codes} after {injected}\n{cluster.log_tails()}"
        left = cluster.leftovers()
        assert left == [], f"{left} after {injected}"
    return out, injected


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, fork_server: dict[str, str]) -> dict[str, Path]:
    return {
        name: train(tmp_path_factory.mktemp(f"undisturbed-{name}"), name, None, fork_server)[0] for name in PARALLELISMS
    }


def check(seed: int, undisturbed: dict[str, Path], tmp_path: Path, environ: dict[str, str]) -> None:
    parallelism = sorted(PARALLELISMS)[seed % 2]
    out, injected = train(tmp_path, parallelism, seed, environ)
    print(f"seed {seed}, {parallelism}, {len(injected)} faults:", *injected, sep="\n  ")
    comparison = compare(out, undisturbed[parallelism], NUM_RANKS)
    assert comparison.identical, "\n".join([parallelism, *injected, *comparison.differences])
    assert injected


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_faults_end_bit_identical(
    seed: int, undisturbed: dict[str, Path], tmp_path: Path, fork_server: dict[str, str]
) -> None:
    check(seed, undisturbed, tmp_path, fork_server)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_random_faults_end_bit_identical(
    seed: int, undisturbed: dict[str, Path], tmp_path: Path, fork_server: dict[str, str]
) -> None:
    check(seed, undisturbed, tmp_path, fork_server)
