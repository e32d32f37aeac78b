"""saving: when a rank wants a version on disk, and what it says of storage that is slower than the interval."""

from __future__ import annotations

from typing import Any

from p2pstate.saving import BUSY, DUE, NOT_DUE, Saving
from p2pstate.settings import CheckpointPolicy
from p2pstate.stats import ProtectionStats
from p2pstate.types import Version


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.on_saved: Any = None
        self.on_save_now: Any = None

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.sent]


def test_save_that_outlasts_the_interval_is_said_once_and_the_next_is_tried() -> None:
    link, stats = FakeLink(), ProtectionStats()
    saving = Saving(link, CheckpointPolicy("ck", 10, None, 2), stats)  # type: ignore[arg-type]
    version = Version(1, 10)
    assert (saving.vote(9), saving.vote(10)) == (NOT_DUE, DUE)
    saving.voted(DUE)
    assert saving.captures(version)
    saving.protected(version)
    assert [saving.vote(step) for step in (11, 19)] == [BUSY, BUSY]
    assert link.kinds() == ["checkpoint", "save"]
    assert [saving.vote(step) for step in (20, 21, 35)] == [BUSY, BUSY, BUSY]
    assert link.kinds() == ["checkpoint", "save", "save_late"]
    link.on_saved(version, "it took too long", "")
    assert (stats.num_saves_late, stats.num_saves_failed) == (1, 1)
    assert saving.vote(36) == DUE


def test_agent_that_asks_gets_the_next_version_whatever_the_interval() -> None:
    link = FakeLink()
    saving = Saving(link, CheckpointPolicy("ck", None, 1e6, 2), ProtectionStats())  # type: ignore[arg-type]
    assert saving.vote(5) == NOT_DUE
    link.on_save_now()
    assert saving.vote(6) == DUE


def test_last_step_is_not_written_again_where_it_was_resumed_from_disk() -> None:
    link = FakeLink()
    saving = Saving(link, CheckpointPolicy("ck", 10, None, 2), ProtectionStats())  # type: ignore[arg-type]
    saving.resumed(30, from_disk=True)
    assert saving.save_last(Version(1, 30), 0.0, lambda: False) == ""
    assert link.kinds() == ["checkpoint"]
    assert "did not end" in saving.save_last(Version(1, 31), 0.0, lambda: False)
    saving.resumed(30)
    assert "did not end" in saving.save_last(Version(2, 30), 0.0, lambda: False)
    assert link.kinds() == ["checkpoint", "save", "save"]
