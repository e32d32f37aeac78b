"""A checkpoint of two ranks resumed on one, three or four: the same tensors, cut anew; positions divided anew."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from observed_runs import DEADLINE_S
from resized import loader_of

from cluster import Cluster

SCRIPT = str(Path(__file__).parent / "scripts" / "resized.py")
BEFORE = 2
KEYS = ("step", "exp_avg", "exp_avg_sq")


def run(
    folder: Path, environ: dict[str, str], form: str, num_ranks: int, steps: int, num_nodes: int = 1
) -> list[dict[str, Any]]:
    """Runs to its end; returns the events."""
    cluster = Cluster(
        folder / f"run{num_ranks}-{steps}",
        [SCRIPT, form, str(folder), str(steps)],
        num_training=num_nodes,
        num_spares=0,
        num_workers=num_ranks // num_nodes,
        environ=environ,
    )
    with cluster:
        for node in cluster.nodes.values():
            node.process.wait(DEADLINE_S)
        assert set(cluster.exit_codes().values()) == {0}, cluster.log_tails()
        return cluster.events.new()


def left(folder: Path, num_ranks: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{num_ranks}-{rank}.pt")
    return found


@pytest.mark.parametrize(("form", "sizes"), [("fsdp", (1, 3)), pytest.param("ddp", (4,), marks=pytest.mark.slow)])
def test_checkpoint_is_resumed_on_another_number_of_ranks(
    form: str, sizes: tuple[int, ...], tmp_path: Path, fork_server: dict[str, str]
) -> None:
    run(tmp_path, fork_server, form, BEFORE, 6)
    before = [left(tmp_path, BEFORE, rank)["ends"] for rank in range(BEFORE)]
    unfaulted = [list(zip(i.tolist(), d.tolist(), strict=True)) for i, _, d in islice(loader_of(0, 1), 9)]
    for num_ranks in sizes:
        events = run(tmp_path, fork_server, form, num_ranks, 9)
        (said,) = [event["said"] for event in events if event["event"] == "resized"]
        assert f"written by {BEFORE} ranks" in said[0]
        ranks = [left(tmp_path, num_ranks, rank) for rank in range(num_ranks)]
        for rank, begins in enumerate(each["begins"] for each in ranks):
            assert torch.equal(begins.pop("rng"), before[rank % BEFORE]["rng"]) == (rank < BEFORE)
            for name, tensor in begins.items():
                expected = before[rank % BEFORE if name.startswith("buffer") else 0][name]
                assert torch.equal(tensor, expected), (num_ranks, rank, name)
        assert all(sorted(each["seen"]) == [7, 8, 9] for each in ranks)
        for step in (7, 8, 9):
            delivered = sorted(sample for each in ranks for sample in each["seen"][step])
            assert delivered == sorted(unfaulted[step - 1]), "the same samples, augmented in the same way"
        for path in (tmp_path / "ck").iterdir():  # the next size resumes from the first checkpoint again
            if not path.name.startswith("000001-"):
                shutil.rmtree(path)


@pytest.mark.parametrize(
    "form",
    ["hsdp", *(pytest.param(form, marks=pytest.mark.slow) for form in ("fsdp_tp", "ddp", "fsdp"))],
)
def test_checkpoint_of_four_ranks_is_read_whole_by_stock_pytorch(
    form: str, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    run(tmp_path, fork_server, form, 4, 3, num_nodes=2)
    ends = left(tmp_path, 4, 0)["ends"]
    parameters = [name for name in ends if f"{name} step" in ends]
    state = {name: {key: torch.zeros_like(ends[f"{name} {key}"]) for key in KEYS} for name in parameters}
    buffers = {n.removeprefix("buffer "): torch.zeros_like(t) for n, t in ends.items() if n.startswith("buffer ")}
    target = {
        "model": {name: torch.zeros_like(ends[name]) for name in parameters} | buffers,
        "optimizer": {"state": state},
    }
    (path,) = (tmp_path / "ck").iterdir()
    dcp.load(target, checkpoint_id=path)
    assert len(parameters) == 6
    for name in parameters:
        assert torch.equal(target["model"][name], ends[name]), name
        assert all(torch.equal(state[name][key], ends[f"{name} {key}"]) for key in KEYS), name
    assert all(torch.equal(buffer, ends[f"buffer {name}"]) for name, buffer in buffers.items())
