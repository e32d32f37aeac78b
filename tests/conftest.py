"""Shared by all tests: a fork server with torch imported, so that a run's processes start in milliseconds.

Tests that start whole runs (tests/proc) are one group for pytest-xdist: they follow one another in one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

READY_WITHIN_S = 120.0
RUNS = Path(__file__).parent / "proc"
FILESYSTEMS = str(Path(__file__).parent / "filesystems")  # fsspec finds them in every process of a run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if config.pluginmanager.hasplugin("xdist") and item.path.is_relative_to(RUNS):
            item.add_marker(pytest.mark.xdist_group("runs"))


@pytest.fixture(scope="session")
def fork_server() -> Iterator[dict[str, str]]:
    """The environment that makes p2prun take its workers from one preloaded process (see agent/template.py)."""
    with tempfile.TemporaryDirectory(prefix="p2p-") as folder:
        path = str(Path(folder) / "forkserver")
        command = [sys.executable, "-m", "p2pstate.agent.template", "--listen", path]
        path_of_modules = os.pathsep.join([FILESYSTEMS, os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path_of_modules}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n", "the fork server did not start"
            yield {"P2PSTATE_FORKSERVER": path, "OMP_NUM_THREADS": "1"}
            server.stdin.close()
            server.terminate()  # a process that a test forked may have the other end of its input
            server.wait(READY_WITHIN_S)
