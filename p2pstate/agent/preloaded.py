"""The process that torchrun's workers are forked from, where ``PYTHON_EXEC=p2pstate-python`` asks for it.

In: the agent's address. Out: a process that has torch imported and listens beside it (template.py --listen), until it
is closed or the agent ends: the end of its standard input tells it; an event when it is ready.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from p2pstate.agent.events import EventLog
from p2pstate.worker.stand_in import NAME, address
from rendezvous.node import Node

__all__ = ["Preloaded"]

CLOSE_S = 2.0


class Preloaded:
    """Everything on the node's thread."""

    def __init__(self, node: Node, events: EventLog, env: Mapping[str, str]) -> None:
        """``env``: the agent's, which is torchrun's."""
        self._node, self._events = node, events
        self._wanted = os.path.basename(env.get("PYTHON_EXEC", "")) == NAME
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, agent: str) -> None:
        """Once, and only where somebody asks for it. It takes seconds; until then python itself starts."""
        if not self._wanted or self._process is not None:
            return
        command = [sys.executable, "-m", "p2pstate.agent.template", "--listen", address(agent)]
        environ = {name: value for name, value in os.environ.items() if name != "P2PSTATE_KEY"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"OMP_NUM_THREADS": "1", **environ}
        )
        assert self._process.stdout is not None
        self._node.add_reader(self._process.stdout.fileno(), self._heard)

    def close(self) -> None:
        if self._process is None:
            return
        self._forget()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _heard(self) -> None:
        """It is ready, or has ended: then python itself goes on starting the workers."""
        assert self._process is not None
        assert self._process.stdout is not None
        if os.read(self._process.stdout.fileno(), 64):
            self._events.emit("preloaded", pid=self._process.pid)
        self._forget()

    def _forget(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        if not self._process.stdout.closed:
            self._node.remove_reader(self._process.stdout.fileno())
            self._process.stdout.close()
