"""agent.output.Writer and agent.events.EventLog: nothing that reads slowly can hold the agent up."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from p2pstate.agent import output
from p2pstate.agent.events import EventLog
from p2pstate.agent.output import Writer
from p2pstate.verdict import RunVerdict, read_verdict


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


def test_verdict_is_found_although_the_disk_has_filled_up(tmp_path: Path) -> None:
    writer = Writer()
    log = EventLog("n", str(tmp_path), writer, quiet=True)
    log.keep_room_for_verdict()
    log.emit("step", rank=0)
    assert read_verdict(tmp_path).code == 75
    size = _disk_is_full(tmp_path)
    log.emit("verdict", code=0, text="finished: " + "\N{MUSICAL SYMBOL G CLEF}" * 5000, scope="run")
    log.close()
    writer.close()
    assert writer.num_lost_bytes > 5000
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == size
    assert read_verdict(tmp_path).code == 0

    writer = Writer()
    again = EventLog("n", str(tmp_path), writer, quiet=True)  # started again on the same disk: what was told stays
    again.keep_room_for_verdict()
    again.close()
    writer.close()
    assert read_verdict(tmp_path).text.startswith("node n: finished: ")


def test_log_without_room_for_a_verdict_says_so_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "verdict-n.json").symlink_to("/dev/full")
    writer = Writer()
    log = EventLog("n", str(tmp_path), writer, quiet=False)
    log.keep_room_for_verdict()
    log.emit("verdict", code=1, text="failed", scope="run")
    log.close()
    writer.close()
    assert "no room for the run's verdict ([Errno 28]" in capfd.readouterr().err
    (tmp_path / "verdict-n.json").unlink()
    assert read_verdict(tmp_path) == RunVerdict(1, "node n: failed")


def _disk_is_full(folder: Path) -> int:
    """From here on nothing can be added to the event file that this process has open. Returns the folder's size."""
    wanted = str(folder / "events-n.jsonl")
    (fd,) = (fd for fd in map(int, os.listdir("/proc/self/fd")) if _path_of(fd) == wanted)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, fd)
    os.close(full)
    return sum(path.stat().st_size for path in folder.iterdir())


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""  # it was the one that listed the others
