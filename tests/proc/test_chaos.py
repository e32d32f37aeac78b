"""Random faults, seeded: workers and nodes are killed at random moments, and the final bits stay the same.

The short version is part of the suite; `-m soak` runs many seeds. A failing seed is in the test's name.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from cluster import Cluster
from outcome import compare

TRAIN = str(Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py")
SMALL = ("--num-layers", "2", "--width", "64", "--context", "32", "--batch", "2")
PARALLELISMS = {"fsdp2": (), "ddp": ("--ddp", "--batch-norm")}
NUM_STEPS, NUM_FAULTS, NUM_RANKS = 120, 8, 4
DEADLINE_S = 240.0  # only a hang takes this long


def train(folder: Path, parallelism: str, seed: int | None, environ: dict[str, str]) -> tuple[Path, list[str]]:
    """Run to the end while faults are injected. Returns where the outcome is, and what was injected."""
    chance = random.Random(seed)
    out = folder / "out"
    script = [TRAIN, "--out", str(out), "--steps", str(NUM_STEPS), *SMALL, *PARALLELISMS[parallelism]]
    injected: list[str] = []
    with Cluster(
        folder / "run", script, num_training=2, num_spares=int(seed is not None), num_workers=2, environ=environ
    ) as cluster:
        pids: dict[int, int] = {}
        places: list[str] = []
        spares: list[str] = []
        newest = 0
        protected_from = 0  # a node may die once a version newer than this one is in two places again
        protected = False
        next_at = float("inf")
        deadline = time.monotonic() + DEADLINE_S
        while cluster.running():
            assert time.monotonic() < deadline, f"the run hangs after {injected}\n{cluster.log_tails()}"
            for event in cluster.events.new():
                if event["event"] == "worker_started":
                    pids[event["rank"]] = event["pid"]
                elif event["event"] == "view":
                    places, spares = event["places"], event["spares"]
                elif event["event"] == "step":
                    if seed is not None and newest == 0:
                        next_at = time.monotonic() + chance.uniform(0, 1.0)
                    newest = max(newest, event["step"])
                    protected = protected or (event["protected"] or 0) > protected_from
            if time.monotonic() >= next_at and newest < NUM_STEPS - 15 and len(injected) < NUM_FAULTS:
                victim = chance.choice(["worker", "worker", "pair", "node"])
                if victim == "node" and protected and spares and len(cluster.running()) > 2:
                    protected_from, protected = newest + 2, False  # two may be on their way here
                    name = chance.choice(places)
                    cluster.kill_node(name)
                    cluster.add_node()
                    injected.append(f"{name} at step {newest}")
                else:
                    ranks = chance.sample(range(NUM_RANKS), 2 if victim == "pair" else 1)
                    for rank in ranks:
                        if rank in pids:
                            kill_quietly(pids[rank])
                    injected.append(f"ranks {ranks} at step {newest}")
                next_at = time.monotonic() + chance.choice([0.05, 0.3, 0.6, 1.0, 1.5]) * chance.uniform(0.5, 1.5)
            cluster.dismiss_late()
            time.sleep(0.005)
        codes = cluster.exit_codes()
        assert set(codes.values()) == {0}, f"{codes} after {injected}\n{cluster.log_tails()}"
        assert cluster.leftovers() == []
    return out, injected


def kill_quietly(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # replaced a moment ago
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, fork_server: dict[str, str]) -> dict[str, Path]:
    return {
        name: train(tmp_path_factory.mktemp(f"undisturbed-{name}"), name, None, fork_server)[0] for name in PARALLELISMS
    }


def check(seed: int, undisturbed: dict[str, Path], tmp_path: Path, environ: dict[str, str]) -> None:
    parallelism = sorted(PARALLELISMS)[seed % 2]
    out, injected = train(tmp_path, parallelism, seed, environ)
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
