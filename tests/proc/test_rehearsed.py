"""`p2prun --rehearse`: a dead worker is replaced by a process that has built its model and rehearsed already."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cluster import Cluster
from outcome import compare
from timeline import Event

TRAIN = str(Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py")
SMALL = ("--num-layers", "2", "--width", "64", "--context", "32", "--batch", "2")
NUM_RANKS, NUM_STEPS = 2, 60
DEADLINE_S = 120.0


def test_rehearsed_process_takes_its_rank_again_and_again_and_ends_bit_identical(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    shape = {"num_training": 2, "num_spares": 0, "num_workers": 1, "environ": fork_server}
    common = [TRAIN, "--steps", str(NUM_STEPS), *SMALL]
    with Cluster(tmp_path / "undisturbed", [*common, "--out", str(tmp_path / "expected")], **shape) as undisturbed:
        for node in undisturbed.running():
            assert node.process.wait(DEADLINE_S) == 0, undisturbed.log_tails()

    # slowly, so that it lasts until another process has rehearsed
    script = ["--rehearse", "1", *common, "--pace", "0.05", "--out", str(tmp_path / "out")]
    with Cluster(tmp_path / "run", script, **shape) as cluster:
        history: list[Event] = []

        def wait_for(kind: str, rank: int, fits: Callable[[Event], bool] = lambda event: True) -> Event:
            seen, deadline = len(history), time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline:
                history.extend(cluster.events.new())
                for event in history[seen:]:
                    seen += 1
                    if event["event"] == kind and event["rank"] == rank and fits(event):
                        return event
                time.sleep(0.01)
            raise AssertionError(f"no {kind} of rank {rank}\n{cluster.log_tails()}")

        pid = wait_for("worker_started", 1)["pid"]
        for _ in range(2):
            rehearsed = wait_for("rehearsed", 1)["pid"]
            assert rehearsed != pid
            cluster.kill_process(pid)
            started = wait_for("worker_started", 1)
            assert (started["pid"], started["rehearsed"]) == (rehearsed, True)
            recovery = wait_for("recovery", 1)
            assert recovery["steps_lost"] <= 1 + recovery["steps_skipped"]
            pid = rehearsed
        for node in cluster.running():
            assert node.process.wait(DEADLINE_S) == 0, cluster.log_tails()
        assert cluster.leftovers() == []
    comparison = compare(tmp_path / "out", tmp_path / "expected", NUM_RANKS)
    assert comparison.identical, "\n".join([*comparison.differences, cluster.log_tails()])
