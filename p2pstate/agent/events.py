"""What happened on this node, as JSON lines in the run directory and as sentences on the console.

In: events. Out: ``events-<node>.jsonl`` (one object a line; never needed for recovery) and, unless quiet, one readable
line per event on standard error; ``verdict-<node>.json``, the verdict once more, for which room is kept from the start.
A full, slow or unwritable disk costs the record, never the run; a disk that fills up does not cost the verdict.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from p2pstate.agent.output import Writer
from p2pstate.observe.ledger import Ledger
from p2pstate.observe.live import LiveRun
from p2pstate.observe.reading import DAMAGED, read_events
from p2pstate.observe.spans import IncidentSpans

__all__ = ["EventLog"]

VERDICT_BYTES = 4096  # one line, with blanks up to this size: written over in place, which needs no new block
_STDERR = 2


class EventLog:
    """Raises OSError when the run directory cannot be made or written at start."""

    def __init__(self, node: str, directory: str | None, writer: Writer, *, quiet: bool) -> None:
        self._node = node
        self._directory = directory
        self._quiet = quiet
        self._writer = writer
        self._fd: int | None = None
        self._verdict_fd: int | None = None
        path = None
        if directory is not None:
            os.makedirs(directory, exist_ok=True)
            path = Path(directory, f"events-{node}.jsonl")
        self.ledger, damage = _earlier(path)  # of this node's ranks, earlier attempts included
        self.live = LiveRun(self.ledger)
        self.spans: IncidentSpans | None = None  # that tell of its incidents
        if path is not None:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":  # cut off: what comes now is a line of its own
                self._writer.put(self._fd, b"\n")
        if damage:
            sentence = f"{path} is damaged, or of another release ({damage}): the time of earlier attempts is not known"
            self.emit("earlier_events_unknown", sentence, error=damage)

    def keep_room_for_verdict(self) -> None:
        """So that whoever asks how the run ended is told also when the disk is full by then."""
        if self._directory is None:
            return
        path = os.path.join(self._directory, f"verdict-{self._node}.json")
        try:
            self._verdict_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.fstat(self._verdict_fd).st_size < VERDICT_BYTES:  # else one of an earlier process, which still counts
                os.pwrite(self._verdict_fd, _line_of_size(b""), 0)
                os.fsync(self._verdict_fd)
        except OSError as error:
            sentence = f"there is no room for the run's verdict ({error}): it may be lost when the run ends"
            self.emit("verdict_room_failed", sentence, error=str(error))

    def emit(self, event: str, sentence: str = "", **fields: Any) -> None:
        """Record one event; ``sentence`` is what a person reads."""
        if sentence and not self._quiet:
            self._writer.put(_STDERR, f"[{self._node}] {sentence}\n".encode())
        record = {"t": time.time(), "node": self._node, "event": event, **fields}
        self.ledger.add(record)
        self.live.add(record)
        if self.spans is not None:
            self.spans.look(self.live.incidents)
        if self._fd is not None:
            self._writer.put(self._fd, json.dumps(record).encode() + b"\n")
        if event == "verdict" and self._verdict_fd is not None:
            short = {**record, "text": str(fields["text"])[: VERDICT_BYTES // 16]}  # at most 12 bytes a character
            self._writer.put(self._verdict_fd, _line_of_size(json.dumps(short).encode()))

    def close(self) -> None:
        if self.spans is not None:
            self.spans.look(self.live.incidents, ended=True)
            self.spans.close()
        for fd in (self._fd, self._verdict_fd):
            if fd is not None:
                self._writer.put(fd, b"")
        self._fd = self._verdict_fd = None


def _earlier(path: Path | None) -> tuple[Ledger, str]:
    """What earlier attempts have told, and why it is not known, if it is not."""
    ledger = Ledger()
    if path is None or not path.exists():
        return ledger, ""
    try:
        ledger.add_all(read_events(path))
    except DAMAGED as error:
        return Ledger(), repr(error)
    return ledger, ""


def _line_of_size(text: bytes) -> bytes:
    return text.ljust(VERDICT_BYTES - 1) + b"\n"
