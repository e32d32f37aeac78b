"""What one worker writes: to its own log file and, unless quiet, to the console with its rank in front.

In: the descriptors of its standard output and error. Out: whole lines, in the order in which they came.
Invariants: nothing waits (see output.py); what was written before the worker's end is read before its file is closed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from p2pstate.agent.output import Writer
from rendezvous.node import Node

__all__ = ["WorkerOutput"]

MAX_LINE_BYTES = 1 << 16
_CONSOLE = 2


class WorkerOutput:
    """``label``: what stands in front of its lines."""

    def __init__(self, node: Node, writer: Writer, fds: Iterable[int], *, quiet: bool) -> None:
        """``quiet``: the console gets what no file does. The descriptors are its own from now on."""
        self._node, self._writer, self._quiet = node, writer, quiet
        self._pending = {fd: bytearray() for fd in fds}
        self._log: int | None = None
        self.label = "spare"
        for fd in self._pending:
            os.set_blocking(fd, False)
            node.add_reader(fd, lambda fd=fd: self._read(fd))  # type: ignore[misc]

    def open_log(self, path: str) -> None:
        """Raises OSError when the file cannot be made."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def note(self, text: str) -> None:
        """Write something about the worker where its own output goes."""
        if self._log is not None:
            self._writer.put(self._log, text.encode())
        self._show(text.encode())

    def read_rest(self) -> None:
        """Everything that is there by now."""
        for fd in list(self._pending):
            self._read(fd)

    def close(self) -> None:
        for fd in list(self._pending):
            self._close(fd)
        if self._log is not None:
            self._writer.put(self._log, b"")
            self._log = None

    def _read(self, fd: int) -> None:
        pending = self._pending.get(fd)
        if pending is None:
            return
        while True:
            try:
                data = os.read(fd, MAX_LINE_BYTES)
            except BlockingIOError:
                return
            if not data:
                if pending:
                    self._show(bytes(pending) + b"\n")
                self._close(fd)
                return
            if self._log is not None:
                self._writer.put(self._log, data)
            pending += data
            end = pending.rfind(b"\n") + 1
            if not end and len(pending) > MAX_LINE_BYTES:
                end = len(pending)
            if end:
                self._show(bytes(pending[:end]))
                del pending[:end]

    def _show(self, text: bytes) -> None:
        if self._quiet and self._log is not None:
            return
        prefix = f"[{self.label}] ".encode()
        self._writer.put(_CONSOLE, b"".join(prefix + line for line in text.splitlines(keepends=True)))

    def _close(self, fd: int) -> None:
        if self._pending.pop(fd, None) is not None:
            self._node.remove_reader(fd)
            os.close(fd)
