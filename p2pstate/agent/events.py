"""What happened on this node, as JSON lines in the run directory and as sentences on the console.

In: events. Out: ``events-<node>.jsonl`` (one object a line, flushed at once; never needed for recovery) and, unless
quiet, one readable line per event on standard error. A full or unwritable disk costs the record, never the run: the
first failure is reported, later ones are counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import IO, Any

__all__ = ["EventLog"]


class EventLog:
    def __init__(self, node: str, directory: str | None, *, quiet: bool) -> None:
        self._node = node
        self._quiet = quiet
        self._file: IO[str] | None = None
        self.num_lost = 0
        if directory is not None:
            os.makedirs(directory, exist_ok=True)
            self._file = open(os.path.join(directory, f"events-{node}.jsonl"), "a", buffering=1)  # noqa: SIM115

    def emit(self, event: str, sentence: str = "", **fields: Any) -> None:
        """Record one event; ``sentence`` is what a person reads."""
        if sentence and not self._quiet:
            print(f"[{self._node}] {sentence}", file=sys.stderr, flush=True)
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"t": time.time(), "node": self._node, "event": event, **fields}) + "\n")
        except OSError as error:
            if self.num_lost == 0:
                print(f"[{self._node}] events are no longer recorded: {error}", file=sys.stderr, flush=True)
            self.num_lost += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
