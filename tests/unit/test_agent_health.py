"""The health file, on a clock turned by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2pstate.agent.health import INTERVAL_S, HealthFile


class Clockwork:
    """The node's timers."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        assert delay_s == INTERVAL_S
        self.due.append(callback)

    def turn(self) -> None:
        self.due.pop()()


def make(path: Path, state: dict[str, Any]) -> tuple[HealthFile, Clockwork]:
    clockwork = Clockwork()
    health = HealthFile(str(path), clockwork, lambda: state)  # type: ignore[arg-type]
    health.start()
    return health, clockwork


def test_health_file_follows_the_state_and_goes_with_the_agent(tmp_path: Path) -> None:
    state = {"state": "joining"}
    health, clockwork = make(tmp_path / "health", state)
    assert json.loads((tmp_path / "health").read_text()) == {"state": "joining"}
    state["state"] = "training"
    clockwork.turn()
    assert json.loads((tmp_path / "health").read_text()) == {"state": "training"}
    health.close()
    assert list(tmp_path.iterdir()) == []


def test_health_file_gets_old_only_when_the_loop_stands_still(tmp_path: Path) -> None:
    _, clockwork = make(tmp_path / "health", {"state": "training"})
    os.utime(tmp_path / "health", (0, 0))
    assert (tmp_path / "health").stat().st_mtime == 0
    (tmp_path / f"health.{os.getpid()}.new").mkdir()  # nothing can be written any more
    clockwork.turn()
    assert (tmp_path / "health").stat().st_mtime > 0
    assert clockwork.due


def test_health_file_in_no_directory_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        make(tmp_path / "none" / "health", {})
