"""--nnodes MIN:MAX with a checkpoint directory: fewer nodes go on by themselves, and more once there are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from observed_runs import DEADLINE_S, launch

from p2pstate.data import Shuffled
from ports import free_ports

SCRIPT = str(Path(__file__).parent / "scripts" / "resized.py")
NUM_SAMPLES, GLOBAL_BATCH = 4096, 12  # as in the script


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [line for path in run_dir.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def wait_for(what: str, found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not found():
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S:g} s"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("grows", "num_steps"), [(False, 30), pytest.param(True, 150, marks=pytest.mark.slow)], ids=["fewer", "fewer, more"]
)
def test_run_goes_on_with_fewer_nodes_and_with_more_when_one_comes_back(
    grows: bool, num_steps: int, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(4)]
    run_dir = tmp_path / "run"
    common = ["--nnodes", "2:3", "--contacts", ",".join(addresses[:3]), "--spare-wait", "1", "--run-dir", str(run_dir)]
    script = [SCRIPT, "fsdp", str(tmp_path), str(num_steps), "0.1"]

    def node(index: int) -> Any:
        own = ["--bind", addresses[index], "--name", f"node{index}"]
        return launch(tmp_path, fork_server, *common, *own, *script)

    nodes = [node(index) for index in range(3)]
    wait_for("step 10", lambda: any(event["step"] >= 10 for event in events(run_dir, "step")))
    nodes[2].kill()
    wait_for("start on two", lambda: any(event["now"] == 2 for event in events(run_dir, "resized")))
    if grows:
        nodes.append(node(3))
        wait_for("start on three", lambda: any(event["now"] == 3 for event in events(run_dir, "resized")))
    output = [each.communicate(timeout=DEADLINE_S)[1] for each in nodes]
    assert [each.returncode for index, each in enumerate(nodes) if index != 2] == [0] * (len(nodes) - 1), output

    seen = {}
    for path in tmp_path.glob(f"{3 if grows else 2}-*.pt"):  # of the last ranks, from the step on that they resumed
        for step, samples in torch.load(path)["seen"].items():
            seen.setdefault(step, []).extend(index for index, _ in samples)
    order = Shuffled(NUM_SAMPLES, seed=1).draw(0, np.arange(num_steps * GLOBAL_BATCH))[0].tolist()
    assert max(seen) == num_steps
    for step, indices in seen.items():
        assert sorted(indices) == sorted(order[(step - 1) * GLOBAL_BATCH : step * GLOBAL_BATCH]), step
    sizes = [[event["before"], event["now"]] for event in sorted(events(run_dir, "resized"), key=lambda e: e["t"])]
    assert sizes == [[3, 2], [2, 3]] if grows else [[3, 2]]
