"""Copies whose bytes were changed in memory, needed because their owner's node is lost (case A1 of the field cases).

The newest copy alone: what is resumed is the version before it. Every copy: the run ends and says what is lost. Wrong
bytes are used in neither case.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cluster import Cluster
from p2pstate.agent.chaos import change_bytes
from p2pstate.slots import Slot
from p2pstate.types import Version

DEADLINE_S = 120.0  # only a hang takes this long
PAUSES = (6, 12)
SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, p2pstate
folder = sys.argv[1]
p2pstate.init_process_group()
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(300, 30)  # each rank has its own
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
state = p2pstate.Replicator(model, optimizer)
def train_step():
    step = state.committed_step + 1
    if rank == 0 and step in {pauses} and not state.rehearsing:
        open(os.path.join(folder, f"at-{{step}}"), "w").close()
        while not os.path.exists(os.path.join(folder, f"go-{{step}}")):
            time.sleep(0.01)
    model(torch.ones(2, 300)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
for step, _ in state.run(train_step, steps=14):
    if step == 8:
        torch.save([p.detach().clone() for p in model.parameters()], os.path.join(folder, f"step8-{{rank}}.pt"))
"""


SKIPPED_AFTER_S = 3.0  # a version that has not come by then was not captured: the one before came too late


def both_copies_of_shard_0(agent_pid: int, newest_step: int, until_s: float) -> dict[Version, int]:
    """Descriptors of the slots of the two copies that the node of this agent has; nothing while it has not, or the
    newest may still come."""
    found = {}
    for entry in os.scandir(f"/proc/{agent_pid}/fd"):
        if os.readlink(entry.path).startswith("/memfd:p2pstate-own0-"):
            fd = os.open(entry.path, os.O_RDWR)
            header = Slot(fd).header()
            if header is not None:
                found[header.version] = fd
            else:
                os.close(fd)
    if len(found) == 2 and (max(found).step == newest_step or time.monotonic() > until_s):
        return found
    for fd in found.values():
        os.close(fd)
    return {}


def wait(what: str, cluster: Cluster, ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := ready()):
        assert time.monotonic() < deadline, f"no {what}\n{cluster.log_tails()}"
        time.sleep(0.02)
    return found


def expected(steps: int) -> list[Any]:
    """Rank 0's parameters, without p2pstate."""
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(steps):
        model(torch.ones(2, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_owner_is_lost_and_the_copy_is_damaged_an_older_one_is_resumed_and_without_one_the_run_says_so(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(pauses=PAUSES))
    shape = {"num_training": 2, "num_workers": 1, "num_spares": 2, "environ": fork_server}
    command = ["--hang-floor", "60", str(script), str(tmp_path)]  # a rank that waits for this test does not hang
    with Cluster(tmp_path / "run", command, **shape) as cluster:
        events: list[dict[str, Any]] = []
        older = 0  # of the copies at the first pause

        def seen(kind: str) -> list[dict[str, Any]]:
            events.extend(cluster.events.new())
            return [event for event in events if event["event"] == kind]

        for pause, which in zip(PAUSES, ("newest", "all"), strict=True):
            wait(f"step {pause}", cluster, (tmp_path / f"at-{pause}").exists)
            owner, keeper = max(seen("view"), key=lambda event: event["epoch"])["places"]
            pid = cluster.nodes[keeper].process.pid
            until_s = time.monotonic() + SKIPPED_AFTER_S
            copies = wait("two copies", cluster, partial(both_copies_of_shard_0, pid, pause - 1, until_s))
            older = older or min(copies).step
            for version in [max(copies)] if which == "newest" else copies:
                change_bytes(copies[version])
            cluster.kill_node(owner)
            (tmp_path / f"go-{pause}").touch()
        wait("end", cluster, lambda: not cluster.running())
        assert set(cluster.exit_codes().values()) == {77}, f"{cluster.exit_codes()}\n{cluster.log_tails()}"
        (resumed,) = [event for event in seen("recovery") if event["rank"] == 0]
        assert (resumed["source"], resumed["version"][1], resumed["steps_lost"]) == (
            "buddy",
            older,
            PAUSES[0] - 1 - older,
        )
        assert len(seen("corrupt")) >= 2
        assert "no live node has shard 0" in cluster.log_tails()
    found = torch.load(tmp_path / "step8-0.pt")
    assert all(map(torch.equal, found, expected(8))), "what was resumed are the right bytes"
