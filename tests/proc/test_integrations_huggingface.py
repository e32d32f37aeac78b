"""examples/train_huggingface.py: a killed rank and a killed node, compared bit for bit with an undisturbed run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from cluster import Cluster
from outcome import Comparison, compare_states

pytest.importorskip("transformers", minversion="5", reason="transformers (extra huggingface) is not installed")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WITHIN_S = 180.0
NUM_STEPS = 60  # four epochs of 15 steps, each of two micro-batches
PROCESS_DIES_AT, NODE_DIES_AT = 12, 35


def train(folder: Path, fork_server: dict[str, str], *, faults: bool) -> Path:
    path = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)])
    script = [str(EXAMPLES / "train_huggingface.py"), "--steps", str(NUM_STEPS), "--out", str(folder / "out")]
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
                elif event["event"] == "step" and to_come[:1] == ["process"] and event["step"] >= PROCESS_DIES_AT:
                    run.kill_process(pids[1])
                    to_come.pop(0)
                elif event["event"] == "step" and to_come == ["node"] and event["step"] >= NODE_DIES_AT:
                    run.kill_node(places[0])
                    to_come.pop(0)
            time.sleep(0.02)
        assert not to_come, f"the run was over before: {to_come}"
        assert set(run.exit_codes().values()) == {0}, run.log_tails()
    return folder / "out"


def test_huggingface_trainer_ends_with_the_same_bits_after_a_lost_rank_and_a_lost_node(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    undisturbed = train(tmp_path / "undisturbed", fork_server, faults=False)
    faulted = train(tmp_path / "faulted", fork_server, faults=True)
    compared = Comparison()
    for rank in range(2):
        left, right = (torch.load(folder / f"rank{rank}.pt") for folder in (faulted, undisturbed))
        compare_states(compared, rank, left, right)
    assert compared.num_tensors > 100
    assert not compared.differences
