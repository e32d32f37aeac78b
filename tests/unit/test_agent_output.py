"""agent.output.Writer and agent.events.EventLog: nothing that reads slowly can hold the agent up."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from p2pstate.agent import output
from p2pstate.agent.events import EventLog
from p2pstate.agent.output import Writer


def test_writer_whose_reader_is_stuck_returns_at_once_and_counts_what_it_drops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "MAX_QUEUED_BYTES", 1 << 20)
    monkeypatch.setattr(output, "CLOSE_WAIT_S", 0.05)
    read_end, write_end = os.pipe()  # nobody reads; the pipe holds 64 KiB
    writer = Writer()
    for _ in range(64):
        writer.put(write_end, b"x" * (1 << 16))
    writer.close()
    assert writer.num_lost_bytes >= 47 << 16
    os.close(read_end)


def test_writer_keeps_the_order_and_closes_after_the_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "log"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    writer = Writer()
    for number in range(1000):
        writer.put(fd, b"%d\n" % number)
    writer.put(fd, b"")
    writer.close()
    assert path.read_text().split() == [str(number) for number in range(1000)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_writer_on_a_full_disk_goes_on_and_remembers_why() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    writer = Writer()
    writer.put(fd, b"lost")
    writer.put(fd, b"")
    writer.close()
    assert writer.num_lost_bytes == 4
    assert "No space left" in writer.last_error


def test_event_log_writes_one_object_a_line(tmp_path: Path) -> None:
    writer = Writer()
    log = EventLog("n", str(tmp_path / "run"), writer, quiet=True)
    log.emit("view", "a sentence", epoch=3)
    log.emit("step", rank=0)
    log.close()
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "events-n.jsonl").read_text().splitlines()]
    assert [(line["event"], line["node"]) for line in lines] == [("view", "n"), ("step", "n")]
