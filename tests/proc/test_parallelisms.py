"""Every odd kind of state, under every parallelism, from the own vault and from the buddy, bit for bit.

One run per form: a worker is killed, whose state comes from its node's vault, later its node's partner, whose ranks'
state comes from their buddies. What is left has to be what the same training on stock gloo, without p2pstate, leaves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parallel
import pytest
import torch
import zoo
from groups_in_processes import run_ranks

from cluster import Cluster

NUM_STEPS = 9
KILLS = ("6:1", "8:2:node")
DEADLINE_S = 120.0  # only a hang takes this long
QUICK = ("hsdp", "fsdp_tp")


def train(folder: Path, form: str, environ: dict[str, str]) -> list[dict[str, Any]]:
    command = [str(Path(zoo.__file__)), form, str(folder), str(NUM_STEPS), *KILLS]
    with Cluster(folder / "run", command, num_training=2, num_spares=1, num_workers=2, environ=environ) as cluster:
        cluster.wait_end(DEADLINE_S, kills=True)
        assert set(cluster.exit_codes().values()) == {0}, cluster.log_tails()
        sources = [event["source"] for event in cluster.events.new() if event["event"] == "recovery"]
        assert {"own vault", "buddy"} <= set(sources), sources
    assert len(list(folder.glob("killed-*"))) == len(KILLS)
    return [torch.load(folder / f"final-{rank}.pt", weights_only=False) for rank in range(zoo.NUM_RANKS)]


@pytest.mark.parametrize(
    "form", [form if form in QUICK else pytest.param(form, marks=pytest.mark.slow) for form in parallel.FORMS]
)
def test_state_zoo_survives_a_worker_and_a_node_as_on_stock_gloo(
    form: str, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    expected = run_ranks(zoo.train_on_stock_gloo, tmp_path, zoo.NUM_RANKS, form, NUM_STEPS)
    found = train(tmp_path, form, fork_server)
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours["state"].keys() == theirs.keys()
        different = [name for name, value in theirs.items() if ours["state"][name] != value]
        assert not different, f"rank {rank} differs in {different}"
    own, shared = zip(*(result["sizes"] for result in found), strict=True)
    if form in parallel.SHARED:
        assert min(shared) > 0
        assert max(own) < 64 << 10, own
