"""The template process: signals that a scheduler sends to all processes of a node."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys

import pytest

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
