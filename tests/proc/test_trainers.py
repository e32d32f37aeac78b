"""Examples with trainers of other projects: a killed rank and a killed node, and the same bits as undisturbed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from torchrun_cluster import Torchruns, kill

from cluster import Cluster
from outcome import Comparison, compare_states
from ports import free_ports

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WITHIN_S = 180.0
TRAINERS = [
    ("transformers", "train_huggingface.py", 60),  # four epochs of 15 steps, each of two micro-batches
    ("accelerate", "train_accelerate.py", 60),
    ("lightning", "train_lightning.py", 40),  # ten epochs of 4 steps, each of two batches; faults while it validates
    ("lightning", "train_lightning.py --sharded", 20),
    ("lightning", "train_fabric.py", 200),
    ("torchtitan", "train_torchtitan.py", 80),
]


def train(
    folder: Path, name: str, num_steps: int, fork_server: dict[str, str], *, faults: bool, num_workers: int = 1
) -> Path:
    path = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)])
    name, *options_of_script = name.split()
    script = [str(EXAMPLES / name), *options_of_script, "--steps", str(num_steps), "--out", str(folder / "out")]
    process_dies_at, node_dies_at = num_steps // 5, num_steps // 2
    options = {"num_training": 2, "num_spares": int(faults), "num_workers": num_workers}
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


def assert_same_states(faulted: Path, undisturbed: Path, num_ranks: int = 2) -> None:
    compared = Comparison()
    for rank in range(num_ranks):
        left, right = (torch.load(folder / f"rank{rank}.pt") for folder in (faulted, undisturbed))
        compare_states(compared, rank, left, right)
    assert compared.num_tensors >= 15 * num_ranks
    assert not compared.differences


@pytest.mark.trainers
@pytest.mark.parametrize(("package", "name", "num_steps"), TRAINERS)
def test_trainer_ends_with_the_same_bits_after_a_lost_rank_and_a_lost_node(
    tmp_path: Path, fork_server: dict[str, str], package: str, name: str, num_steps: int
) -> None:
    pytest.importorskip(package)
    undisturbed = train(tmp_path / "undisturbed", name, num_steps, fork_server, faults=False)
    faulted = train(tmp_path / "faulted", name, num_steps, fork_server, faults=True)
    assert_same_states(faulted, undisturbed)


@pytest.mark.trainers
@pytest.mark.parametrize("name", ["train_megatron_style.py", "train_pipeline.py"])
def test_loop_with_more_than_data_parallelism_ends_with_the_same_bits_after_the_same_losses_in_place(
    tmp_path: Path, fork_server: dict[str, str], name: str
) -> None:
    arguments = (name, 60, fork_server)
    undisturbed = train(tmp_path / "undisturbed", *arguments, faults=False, num_workers=2)
    faulted = train(tmp_path / "faulted", *arguments, faults=True, num_workers=2)
    assert_same_states(faulted, undisturbed, num_ranks=4)
    events = [json.loads(line) for path in (tmp_path / "faulted").glob("events-*") for line in path.open()]
    assert {event["start"] for event in events if event["event"] == "view"} == {"fresh", "in_place"}


class AccelerateLaunches(Torchruns):
    """One `accelerate launch` per node."""

    def command(self, options: Sequence[str]) -> list[str]:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--rdzv_backend", "p2p", "--multi_gpu"]
        command += ["--num_machines", "2", "--num_processes", "2", "--max_restarts", "5", "--main_process_ip=127.0.0.1"]
        return [*command, "--rdzv_conf", "last_call_timeout=0.5,timeout=60", *options]


@pytest.mark.trainers
def test_accelerate_launch_with_the_rendezvous_p2p_resumes_from_memory_after_a_lost_rank(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    pytest.importorskip("accelerate")
    undisturbed = train(tmp_path / "undisturbed", "train_accelerate.py", 30, fork_server, faults=False)
    folder = tmp_path / "launched"
    folder.mkdir()
    script = [str(EXAMPLES / "train_accelerate.py"), "--steps", "30", "--pace", "0.1", "--out", str(folder / "out")]
    with contextlib.closing(AccelerateLaunches(folder, "2", script=script)) as running:
        ports = free_ports(3)
        contacts = ",".join(f"127.0.0.1:{port}" for port in ports[:2])
        for number, name in enumerate("ab"):
            where = {"P2PSTATE_CONTACTS": contacts, "P2PSTATE_BIND": f"127.0.0.1:{ports[number]}"}
            running.start(name, "--machine_rank", str(number), "--main_process_port", str(ports[2]), **where)
        running.wait(lambda: "step 8 loss" in running.log("a") + running.log("b"), "eight steps")
        launcher = psutil.Process(running.nodes["b"].pid)
        kill(*(child.pid for child in launcher.children() if script[0] in child.cmdline()))
        assert running.codes("ab", timeout_s=120.0) == [0, 0]
        logs = running.log("a") + running.log("b")
    assert "A TCPSTORE WAS MADE" not in logs
    assert logs.count("resumed step") == 2, logs
    assert_same_states(folder / "out", undisturbed)
