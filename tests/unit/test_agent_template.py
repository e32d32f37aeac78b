"""The template process: signals that a scheduler sends to all processes of a node."""

from __future__ import annotations

import os
import selectors
import signal

import pytest

from p2pstate.agent.template import Template
from rendezvous.channel import Channel


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_template_leaves_signals_to_its_agent_and_ends_with_it(number: signal.Signals) -> None:
    ours, theirs = Channel.pair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        code = 1
        try:
            Template(Channel(theirs, blocking=False)).run()
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    with selectors.DefaultSelector() as selector:
        selector.register(ours.fileno(), selectors.EVENT_READ)
        assert selector.select(30.0)
    assert [message["t"] for message, _ in ours.receive()] == ["template_ready"]
    os.kill(pid, number)
    ours.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
