"""A file that a scheduler's probes look at: its age says that the agent lives, its content how the node is.

In: the node's own description of itself, every second. Out: one JSON object in ``p2prun --health-file FILE``.
Invariants: written by the thread that runs the node, so the file of an agent that hangs gets old; replaced as a whole;
a full disk costs the content, not the age; gone when the agent has ended well or by a verdict.
Limits: the thread waits for the file system, so the file belongs on a local one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

from rendezvous.node import Node

__all__ = ["HealthFile"]

INTERVAL_S = 1.0


class HealthFile:
    """Raises OSError when the file cannot be written at start."""

    def __init__(self, path: str, node: Node, describe: Callable[[], dict[str, Any]]) -> None:
        self._path = path
        self._new = f"{path}.{os.getpid()}.new"
        self._node = node
        self._describe = describe
        self._write()

    def start(self) -> None:
        self._node.call_later(INTERVAL_S, self._repeat)

    def _repeat(self) -> None:
        try:
            self._write()
        except OSError:
            with contextlib.suppress(OSError):
                os.utime(self._path)
        self.start()

    def _write(self) -> None:
        with open(self._new, "w", encoding="utf-8") as file:
            json.dump(self._describe(), file)
            file.write("\n")
        os.replace(self._new, self._path)

    def close(self) -> None:
        for path in (self._new, self._path):
            with contextlib.suppress(OSError):
                os.unlink(path)
