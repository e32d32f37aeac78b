"""agent/saves.py: what comes after a save: older ones are deleted, and whoever waits for it is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from p2pstate.agent.saves import Saves
from p2pstate.durable.session import End, State
from p2pstate.types import Version

VERSION = Version(1, 10)


class FakeWriter:
    def __init__(self) -> None:
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.reply: Callable[[dict[str, Any]], None] | None = None

    def start(self) -> bool:
        return True

    def order(self, kind: str, where: list[str], reply: Callable[[dict[str, Any]], None], **fields: Any) -> None:
        self.orders.append((kind, fields))
        self.reply = reply

    def drop_order(self) -> None:
        self.reply = None


class Site:
    """A node whose save of ``VERSION`` has just got its marker."""

    def __init__(self, *, leads: bool = True) -> None:
        self.events: list[str] = []
        self.told: list[dict[str, Any]] = []
        self.later: list[Callable[[], None]] = []
        node: Any = SimpleNamespace(call_later=lambda seconds, what: self.later.append(what))
        events: Any = SimpleNamespace(emit=lambda kind, *text, **fields: self.events.append(kind))
        nothing: Any = None
        self.saves = Saves(node, nothing, self.told.append, nothing, events, "a")
        self.writer: Any = FakeWriter()
        self.saves._writer = self.writer
        self.saves.configure("ck", "", 2)
        self.saves._info = self.round = SimpleNamespace(run_id="run", nonce="nonce", reason="a rank died")  # type: ignore[assignment]
        deadline = time.monotonic() + 60
        session: Any = SimpleNamespace(
            version=VERSION, leads=leads, deadline=deadline, state=State.ENDED, failed=lambda error: []
        )
        self.saves._session = session
        self.saves._ended(End("", "000001-step10", 5))

    def ended(self) -> list[tuple[str, str]]:
        return [(message["name"], message["error"]) for message in self.told]


def test_save_is_on_disk_while_older_ones_are_deleted_and_ranks_wait_for_that() -> None:
    site = Site()
    assert site.saves.on_disk == VERSION
    assert site.events == ["saved"]
    assert site.writer.orders == [
        ("retain", {"run": ["run", "nonce"], "keep": 2, "first": "", "damaged": []}),
    ]
    assert site.told == []
    site.writer.reply({"error": "", "problem": ""})
    assert site.ended() == [("000001-step10", "")]
    assert site.events == ["saved"]


def test_node_that_does_not_lead_deletes_nothing() -> None:
    site = Site(leads=False)
    assert site.writer.orders == []
    assert site.ended() == [("000001-step10", "")]


@pytest.mark.parametrize("how", ["the writer dies", "it takes too long", "storage refuses", "another save begins"])
def test_older_saves_that_cannot_be_deleted_make_no_failed_save(how: str) -> None:
    site = Site()
    match how:
        case "the writer dies":
            site.saves._writer_ended("SIGKILL")
        case "it takes too long":
            site.later[-1]()
        case "storage refuses":
            site.writer.reply({"error": "Input/output error", "problem": ""})
        case "another save begins":
            site.saves._fail("another one begins")
    assert site.events == ["saved", "retention_failed"]
    assert site.ended() == [("000001-step10", "")]
    site.later[-1]()
    assert len(site.told) == 1, "told twice"


def test_next_round_lets_the_deletion_go_on() -> None:
    site = Site()
    site.saves.round_begins(site.round)  # type: ignore[arg-type]
    assert site.told == []
    site.writer.reply({"error": "", "problem": ""})
    assert site.ended() == [("000001-step10", "")]
    assert site.events == ["saved"]
