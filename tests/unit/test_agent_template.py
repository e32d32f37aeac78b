"""The template process: signals that a scheduler sends to all processes of a node, and the end of a session."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from p2pstate.agent.template import kill_session
from rendezvous.channel import Channel

TEMPLATE = """
import socket, sys
from p2pstate.agent.template import Template
from rendezvous.channel import Channel
Template(Channel(socket.socket(fileno=int(sys.argv[1])), blocking=False)).run()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_template_leaves_signals_to_its_agent_and_ends_with_it(number: signal.Signals) -> None:
    ours, theirs = Channel.pair()
    command = [sys.executable, "-c", TEMPLATE, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as template, contextlib.closing(ours):
        theirs.close()
        with selectors.DefaultSelector() as selector:
            selector.register(ours.fileno(), selectors.EVENT_READ)
            assert selector.select(60.0)
        assert [message["t"] for message, _ in ours.receive()] == ["template_ready"]
        os.kill(template.pid, number)
        ours.close()
        assert template.wait(60.0) == 0


SPAWNER = """
import multiprocessing, subprocess, sys, time
lock = multiprocessing.get_context("spawn").Lock()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(lock._semlock.name, child.pid, flush=True)
time.sleep(600)
"""


def test_killed_session_leaves_no_process_and_no_semaphore_behind() -> None:
    """Semaphores of processes that are spawned have names, which only multiprocessing's resource tracker takes back."""
    command = [sys.executable, "-c", SPAWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as leader:
        assert leader.stdout is not None
        name, child = leader.stdout.readline().split()
        semaphore = Path("/dev/shm", f"sem.{name.lstrip('/')}")
        assert semaphore.exists()
        kill_session(leader.pid)
        assert leader.wait(60.0) == -signal.SIGKILL
    deadline = time.monotonic() + 60.0
    while (semaphore.exists() or Path("/proc", child, "fd").exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not semaphore.exists()
    assert not Path("/proc", child, "fd").exists() or not os.listdir(f"/proc/{child}/fd")
