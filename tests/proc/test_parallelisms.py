"""HSDP, FSDP x TP, uneven FSDP2 and DDP in sub-groups: a worker and a node are killed, the bits stay the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from cluster import Cluster

SCRIPT = str(Path(__file__).with_name("scripts") / "parallel.py")
FORMS = ["hsdp", "fsdp_tp", "fsdp_uneven", "ddp_subgroup"]
NUM_RANKS, NUM_STEPS = 4, 10
DEADLINE_S = 120.0  # only a hang takes this long


def train(folder: Path, form: str, kill: str, environ: dict[str, str]) -> list[dict[str, object]]:
    out = folder / kill.replace(":", "-")
    out.mkdir(parents=True)
    script = [SCRIPT, form, str(out), str(NUM_STEPS), kill]
    spares = int(kill.endswith("node"))
    with Cluster(out / "run", script, num_training=2, num_spares=spares, num_workers=2, environ=environ) as cluster:
        deadline = time.monotonic() + DEADLINE_S
        while cluster.running():
            assert time.monotonic() < deadline, cluster.log_tails()
            for node in cluster.nodes.values():
                node.killed = node.killed or node.process.poll() == -9
            time.sleep(0.02)
        assert set(cluster.exit_codes().values()) == {0}, cluster.log_tails()
        assert cluster.leftovers() == []
    assert kill == "-" or list(out.glob("killed-*"))
    return [torch.load(out / f"final-{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("form", FORMS)
def test_worker_and_node_killed_under_a_parallelism_end_bit_identical(
    form: str, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    expected = train(tmp_path, form, "-", fork_server)
    for kill in ("6:1", "6:2:node"):
        found = train(tmp_path, form, kill, fork_server)
        for rank in range(NUM_RANKS):
            for ours, theirs in zip(found[rank]["state"], expected[rank]["state"], strict=True):
                assert torch.equal(ours, theirs), f"rank {rank} differs after {kill}"
    own, shared = zip(*(result["sizes"] for result in expected), strict=True)
    if form in ("hsdp", "ddp_subgroup"):  # every parameter and optimizer byte is on the other node anyway
        assert max(own) < 64 << 10, own
        assert min(shared) > 0
    else:
        assert max(shared) == 0
