"""Nodes in a real control group with a memory limit: a run that does not fit is refused before it has begun."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


@pytest.mark.parametrize(("num_mib", "code"), [(4, 0), (160, 78)])
def test_copies_that_the_control_group_has_no_room_for_are_refused_with_the_figures(
    num_mib: int, code: int, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    """Two nodes of one worker, all agents in a group of 512 MiB; the workers are forked outside of it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with (
        limited(512 * MIB),
        Cluster(
            tmp_path / "run",
            [str(script), str(num_mib)],
            num_training=2,
            num_spares=0,
            num_workers=1,
            environ=fork_server,
        ) as cluster,
    ):
        deadline = time.monotonic() + DEADLINE_S
        while cluster.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert set(cluster.exit_codes().values()) == {code}, cluster.log_tails()
        told = cluster.log_tails()
    if code:
        assert "MiB of host memory to keep 4 bytes per byte of unique state (copies=1), and" in told
        assert "are left (the memory limit of control group /sys/fs/cgroup" in told
        assert ", 512 MiB)" in told
