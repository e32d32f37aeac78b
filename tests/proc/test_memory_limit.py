"""Nodes in a real control group with a memory limit: a run that does not fit is refused before it has begun."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster

MIB = 1 << 20
DEADLINE_S = 120.0  # only a hang takes this long
SCRIPT = """
import sys, torch, p2pstate
p2pstate.init_process_group()
model = torch.nn.Linear(1 << 10, int(sys.argv[1]) << 8, bias=False)  # MiB
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = p2pstate.Replicator(model, optimizer)
for _ in state.run(lambda: optimizer.step(), steps=2):
    pass
"""


def folder_for_groups() -> Path:
    """Where control groups with a memory limit can be made; skips the test where nowhere."""
    for path, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        probe = Path(path) / f"p2pstate-probe-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        made = (probe / file).exists() and os.access(probe / file, os.W_OK)
        probe.rmdir()
        if made:
            return Path(path)
    pytest.skip("no control group with a memory limit can be made here")


@contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """Processes that are started inside are in a control group of their own."""
    top = folder_for_groups()
    own = next(
        line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line or "0::" in line
    )
    before = top / own.rpartition(":")[2].lstrip("/")
    group = top / f"p2pstate-test-{os.getpid()}"
    group.mkdir()
    try:
        legacy = group / "memory.limit_in_bytes"
        (legacy if legacy.exists() else group / "memory.max").write_text(str(num_bytes))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        deadline = time.monotonic() + DEADLINE_S
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        group.rmdir()


def run(folder: Path, num_mib: int, environ: dict[str, str]) -> tuple[int | None, list[dict[str, Any]], str]:
    """(exit code, events, logs) of two nodes of one worker, all agents in a group of 512 MiB; the workers are forked
    outside of it."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [str(script), str(num_mib)]
    with (
        limited(512 * MIB),
        Cluster(folder / "run", command, num_training=2, num_spares=0, num_workers=1, environ=environ) as cluster,
    ):
        cluster.wait_end(DEADLINE_S)
        (code,) = set(cluster.exit_codes().values())
        return code, cluster.events.new(), cluster.log_tails()


def test_run_that_fits_into_its_control_group_keeps_all_copies(tmp_path: Path, fork_server: dict[str, str]) -> None:
    code, events, logs = run(tmp_path, 4, fork_server)
    assert code == 0, logs
    assert [event for event in events if event["event"] in ("lean", "weakness")] == []


def test_run_that_fits_without_copies_on_the_own_nodes_is_lean_and_says_so_once(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    code, events, logs = run(tmp_path, 120, fork_server)
    assert code == 0, logs
    (told,) = [event["text"] for event in events if event["event"] == "lean"]
    assert "MiB of host memory to keep 4 bytes per byte of unique state (copies=1), and" in told
    assert "are left (the memory limit of control group /sys/fs/cgroup" in told
    assert told.endswith(", 512 MiB); so each shard is kept on other nodes only (lean mode)")


def test_run_that_does_not_fit_in_any_way_is_refused_with_the_figures(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    code, _, logs = run(tmp_path, 300, fork_server)
    assert code == 78, logs
    assert "MiB of host memory to keep 2 bytes per byte of unique state (copies=1, lean), and" in logs
    assert "are left (the memory limit of control group /sys/fs/cgroup" in logs
    assert ", 512 MiB): give the run more memory" in logs
