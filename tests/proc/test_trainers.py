"""Examples with trainers of other projects: a killed rank and a killed node, and the same bits as undisturbed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from cluster import Cluster
from outcome import Comparison, compare_states

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WITHIN_S = 180.0
TRAINERS = [
    ("transformers", "train_huggingface.py", 60),  # four epochs of 15 steps, each of two micro-batches
    ("lightning", "train_lightning.py", 40),  # six epochs of 6 steps and a part of one, each of two batches
    ("lightning", "train_fabric.py", 400),
]


def train(folder: Path, name: str, num_steps: int, fork_server: dict[str, str], *, faults: bool) -> Path:
    path = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)])
    script = [str(EXAMPLES / name), "--steps", str(num_steps), "--out", str(folder / "out")]
    process_dies_at, node_dies_at = num_steps // 5, num_steps // 2
    options = {"num_training": 2, "num_spares": int(faults), "num_workers": 1}
    with Cluster(folder, script, **options, environ={**fork_server, "PYTHONPATH": path}) as run:
        deadline = time.monotonic() + WITHIN_S
        pids: dict[int, int] = {}
        places: list[str] = []
        to_come = ["process", "node"] if faults else []
        while run.running():
            assert time.monotonic() < deadline, run.log_tails()
            for event in run.events.new():
                if event["event"] == "worker_started":
                    pids[event["rank"]] = event["pid"]
                elif event["event"] == "view":
                    places = event["places"]
                elif event["event"] == "step" and to_come[:1] == ["process"] and event["step"] >= process_dies_at:
                    run.kill_process(pids[1])
                    to_come.pop(0)
                elif event["event"] == "step" and to_come == ["node"] and event["step"] >= node_dies_at:
                    run.kill_node(places[0])
                    to_come.pop(0)
            time.sleep(0.02)
        assert not to_come, f"the run was over before: {to_come}"
        assert set(run.exit_codes().values()) == {0}, run.log_tails()
    return folder / "out"


@pytest.mark.trainers
@pytest.mark.parametrize(("package", "name", "num_steps"), TRAINERS)
def test_trainer_ends_with_the_same_bits_after_a_lost_rank_and_a_lost_node(
    tmp_path: Path, fork_server: dict[str, str], package: str, name: str, num_steps: int
) -> None:
    pytest.importorskip(package)
    undisturbed = train(tmp_path / "undisturbed", name, num_steps, fork_server, faults=False)
    faulted = train(tmp_path / "faulted", name, num_steps, fork_server, faults=True)
    compared = Comparison()
    for rank in range(2):
        left, right = (torch.load(folder / f"rank{rank}.pt") for folder in (faulted, undisturbed))
        compare_states(compared, rank, left, right)
    assert compared.num_tensors > 100
    assert not compared.differences
