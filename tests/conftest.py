"""Shared by all tests: a fork server with torch imported, so that a run's processes start in milliseconds.

With pytest-xdist, a file's tests follow one another in one process. The first process begins with the files that start
whole runs (tests/proc), which mostly wait; the others begin with the rest, and then help it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pstate.worker import stand_in

READY_WITHIN_S = 120.0
# Where bytecode is not to be written, each of the hundreds of processes that tests start would compile both packages.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
FILESYSTEMS = str(Path(__file__).parent / "filesystems")  # fsspec finds them in every process of a run


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class RunsFirstInOneProcess(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            wanted = node is self.nodes[0]
            preferred = (file for file in self.workqueue if ("/proc/" in file) is wanted)
            self.workqueue.move_to_end(next(preferred, next(iter(self.workqueue))), last=False)
            super()._assign_work_unit(node)

    return RunsFirstInOneProcess(config, log)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[dict[str, str]]:
    """The environment that makes p2prun take its workers from one preloaded process (see agent/template.py)."""
    address = stand_in.address(f"p2pstate-tests-{secrets.token_hex(8)}")
    command = [sys.executable, "-m", "p2pstate.agent.template", "--listen", address]
    path_of_modules = os.pathsep.join(filter(None, [FILESYSTEMS, os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path_of_modules}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the fork server did not start"
        # On a machine with cards, too, these runs train on the CPU.
        yield {"P2PSTATE_FORKSERVER": address, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        server.stdin.close()
        server.terminate()  # a process that a test forked may have the other end of its input
        server.wait(READY_WITHIN_S)
