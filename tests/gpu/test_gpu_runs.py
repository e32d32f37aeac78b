"""Whole runs on one card: a worker is killed or hangs; survivors keep their processes, and the bits are the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import Cluster
from kill_points import Kill
from outcome import compare

NUM_RANKS, NUM_STEPS = 4, 24
DEADLINE_S = 240.0
SCRIPT = str(Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py")
SMALL = ("--num-layers", "2", "--width", "64", "--context", "32", "--batch", "2", "--device", "cuda", "--share-cards")
PARALLELISMS = {"fsdp2": (), "ddp": ("--ddp", "--batch-norm")}


def train(folder: Path, parallelism: str, more: list[str], disturb: Callable[[Path], None] | None = None) -> Cluster:
    out = folder / "out"
    script = [SCRIPT, "--out", str(out), "--steps", str(NUM_STEPS), *SMALL, *PARALLELISMS[parallelism], *more]
    deadline = time.monotonic() + DEADLINE_S
    with Cluster(folder / "run", script, num_training=2, num_spares=0, num_workers=2, environ={}) as cluster:
        if disturb is not None:
            disturb(out)
        while cluster.running():
            assert time.monotonic() < deadline, f"the run hangs\n{cluster.log_tails()}"
            time.sleep(0.05)
        assert set(cluster.exit_codes().values()) == {0}, cluster.log_tails()
    return cluster


def pids(out: Path, rank: int) -> list[int]:
    """Of all processes that have had this rank."""
    return [int(path.name.split(".")[1]) for path in out.glob(f"positions-{rank}.*.jsonl")]


@pytest.fixture(scope="module", params=sorted(PARALLELISMS))
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(f"undisturbed-{request.param}")
    train(folder, request.param, [])
    return request.param, folder / "out"


def assert_survived(cluster: Cluster, out: Path, expected: Path, victim: int) -> None:
    comparison = compare(out, expected, NUM_RANKS)
    assert comparison.identical, "\n".join([*comparison.differences, cluster.log_tails()])
    assert [len(pids(out, rank)) for rank in range(NUM_RANKS)] == [1 + (rank == victim) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("phase", ["backward", "in_step", "shipping"])
def test_killed_worker_is_replaced_and_the_others_stay(
    phase: str, undisturbed: tuple[str, Path], tmp_path: Path
) -> None:
    parallelism, expected = undisturbed
    kill = Kill(10, 1, phase)
    cluster = train(tmp_path, parallelism, ["--kill", f"10:1:{phase}"])
    assert (tmp_path / "out" / kill.marker).exists()
    assert_survived(cluster, tmp_path / "out", expected, victim=1)


def test_hung_worker_is_found_and_replaced_and_the_others_stay(undisturbed: tuple[str, Path], tmp_path: Path) -> None:
    parallelism, expected = undisturbed
    victim = 2

    def stop(out: Path) -> None:
        deadline = time.monotonic() + DEADLINE_S
        lines = 0
        while lines < 20:  # some ten steps
            assert time.monotonic() < deadline
            time.sleep(0.02)
            lines = sum(len(path.read_text().splitlines()) for path in out.glob(f"positions-{victim}.*.jsonl"))
        os.kill(pids(out, victim)[0], signal.SIGSTOP)

    cluster = train(tmp_path, parallelism, ["--pace", "0.2"], stop)
    assert_survived(cluster, tmp_path / "out", expected, victim)
