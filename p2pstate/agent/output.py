"""Writing to consoles and files without ever making the agent wait.

In: bytes for descriptors, from the node's thread. Out: the same bytes, in order, written by one thread of its own. A
terminal that is stopped or a file system that hangs must not silence a node's heartbeats.

Invariants: ``put`` returns at once; at most ``MAX_QUEUED_BYTES`` wait, what comes beyond is dropped and counted (with
the last error, which the agent reports at its end); ``close`` waits a bounded time.
"""

from __future__ import annotations

import os
import queue
import threading

__all__ = ["Writer"]

MAX_QUEUED_BYTES = 32 << 20
CLOSE_WAIT_S = 2.0


class Writer:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self.num_lost_bytes = 0
        self.last_error = ""
        self._thread = threading.Thread(target=self._run, name="p2pstate-writer", daemon=True)
        self._thread.start()

    def put(self, fd: int, data: bytes) -> None:
        """Write ``data`` to ``fd`` soon. An empty ``data`` closes the descriptor after all that was put before."""
        with self._lock:
            if data and self._queued_bytes + len(data) > MAX_QUEUED_BYTES:
                self.num_lost_bytes += len(data)
                return
            self._queued_bytes += len(data)
        self._queue.put((fd, data))

    def close(self) -> None:
        """Wait for what is queued, for a bounded time."""
        self._queue.put(None)
        self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            fd, data = item
            try:
                if not data:
                    os.close(fd)
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
            except OSError as error:
                self.last_error = str(error)
                self.num_lost_bytes += len(data)
            with self._lock:
                self._queued_bytes -= len(data)
