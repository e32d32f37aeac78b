"""groups.status.Status: one error per round, and nothing of an old round reaches into the next."""

from __future__ import annotations

import threading

import pytest

from p2pstate.groups import status as module
from p2pstate.groups.status import Status


@pytest.fixture(autouse=True)
def _settle_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ABANDON_AFTER_S", 0.05)


def join_timers() -> None:
    for thread in threading.enumerate():
        if thread.name == "p2pstate-settle":
            thread.join(5)


def test_first_error_of_a_round_wins_and_is_told_once() -> None:
    status, told = Status(), []
    status.on_first_error = lambda error, epoch: told.append((error, epoch))
    status.connect(1)
    first = RuntimeError("first")
    status.fail(first)
    status.fail(RuntimeError("second"))
    assert status.error is first
    assert told == [(first, 1)]
    assert status.echoing


def test_error_of_an_older_round_is_ignored() -> None:
    status = Status()
    status.connect(2)
    status.fail(RuntimeError("late"), epoch=1)
    assert status.error is None
    assert not status.echoing


def test_error_while_alone_is_ignored() -> None:
    status = Status()
    status.solo = True
    status.fail(RuntimeError("nobody is there"))
    assert status.error is None


def test_futures_that_wait_when_a_round_fails_are_settled_soon() -> None:
    status, settled = Status(), []
    status.connect(1)
    status.settle_later(lambda: settled.append("waiting"))
    status.fail(RuntimeError("x"))
    status.settle_later(lambda: settled.append("too late to wait"))
    join_timers()
    assert settled == ["too late to wait", "waiting"]


def test_futures_of_the_next_round_are_not_settled_by_the_error_of_the_last() -> None:
    status, settled = Status(), []
    status.connect(1)
    status.fail(RuntimeError("x"))
    status.connect(2)
    status.settle_later(lambda: settled.append("healthy"))
    join_timers()
    assert settled == []
