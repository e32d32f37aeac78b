"""Fifty recoveries in one run: what outlives all of them, a rank, the agents and the processes that workers are forked
from, has no more memory, threads and descriptors afterwards than early on.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from mishaps import SCRIPT
from observed_runs import Run

NUM_RECOVERIES, WINDOW = 50, 12
# Of a process, from one window to the other. Python's heap settles slowly, and a vault may need one slot of each part
# more, once.
MAX_GROWTH = {"bytes": 4 << 20, "threads": 0.5, "descriptors": 8}
QUIET_STEPS = 20  # from a recovery until what it has replaced is gone, and a new spare is ready


def replaces(rank: int, event: dict[str, Any]) -> bool:
    return event["event"] == "worker_started" and event["rank"] == rank


def look(run: Run, rank_0: int) -> dict[str, dict[str, int]]:
    """What is held by each process that was there from the start."""
    agents = {node.name: psutil.Process(node.process.pid) for node in run.cluster.running()}
    kept = {"rank 0": psutil.Process(rank_0)}
    for name, agent in agents.items():
        (template,) = (child for child in agent.children() if "p2pstate.agent.template" in child.cmdline())
        kept |= {f"the agent of {name}": agent, f"the template of {name}": template}
    return {
        name: {
            "bytes": int(process.memory_full_info().uss) + slots_of(process),
            "threads": process.num_threads(),
            "descriptors": process.num_fds(),
        }
        for name, process in kept.items()
    }


def slots_of(process: psutil.Process) -> int:
    """Mapped memory that others may map as well."""
    return sum(each.shared_dirty for each in process.memory_maps() if "memfd" in each.path)


@pytest.mark.soak
@pytest.mark.parametrize("wrapper", [(), ("--fsdp",)], ids=["ddp", "fsdp2"])
def test_fifty_recoveries_leave_memory_threads_and_descriptors_as_they_were(
    wrapper: tuple[str, ...], tmp_path: Path
) -> None:
    environ = {"OMP_NUM_THREADS": "1"}  # no fork server: every node has a template of its own
    (tmp_path / "out").mkdir()
    run = Run(tmp_path, environ, *wrapper, steps=1_000_000, program=(SCRIPT,))
    try:
        pids = run.pids()
        rank_0, step = pids[0], run.wait_step(5)["step"]
        seen: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, _ in zip(itertools.cycle((1, 2, 3)), range(NUM_RECOVERIES), strict=False):
            os.kill(pids[rank], signal.SIGKILL)
            pids[rank] = run.wait_for("the replacement", partial(replaces, rank))["pid"]
            run.wait_for("recovery", lambda e: e["event"] == "recovery" and e["rank"] == 0)
            step = run.wait_step(step + QUIET_STEPS)["step"]
            for name, held in look(run, rank_0).items():
                for what, number in held.items():
                    seen[name, what].append(number)
        assert all(event["epoch"] <= NUM_RECOVERIES + 1 for event in run.all("recovery"))
    finally:
        run.cluster.stop()
    grown = []
    for (name, what), numbers in seen.items():
        early, late = median(numbers[WINDOW // 2 : WINDOW * 3 // 2]), median(numbers[-WINDOW:])
        print(f"{name}, {what}: {early:.0f} -> {late:.0f}", numbers)
        if late - early > MAX_GROWTH[what]:
            grown.append(f"{name} had {early:.0f} {what} early on and {late:.0f} in the end: {numbers}")
    assert not grown, "\n".join(grown)
