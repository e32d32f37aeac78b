"""An agent that cannot be made leaves nothing open."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from p2pstate.cli import p2prun
from p2pstate.errors import EXIT_CONFIG


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--http", "nowhere", "is no HOST:PORT"),
        ("--http", "127.0.0.1:{taken}", "in use"),
        ("--health-file", "/proc/none/health", "No such file"),
    ],
)
def test_agent_that_cannot_be_made_closes_what_it_has_opened(
    option: str, value: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        descriptors, threads = os.listdir("/proc/self/fd"), threading.active_count()
        broken = [option, value.format(taken=taken.getsockname()[1])]
        assert p2prun(["--nnodes", "1", "--run-dir", str(tmp_path), *broken, str(script)]) == EXIT_CONFIG
        assert (os.listdir("/proc/self/fd"), threading.active_count()) == (descriptors, threads)
    assert says in capsys.readouterr().err
