"""What an attempt of a restartable function leaves behind, and which of its ends are failures of its own."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest

from p2pstate import restart
from p2pstate.errors import Retryable
from p2pstate.groups.status import Status
from p2pstate.restart import _Attempts


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Status:
    status = Status()
    status.connect(1)
    monkeypatch.setattr(restart, "STATUS", status)
    return status


def attempt(function: Callable[[], Any], *, max_failures: int = 1) -> tuple[bool, Any]:
    class Context:
        link = None

    return _Attempts(cast(Any, Context()), function, max_failures)._attempt()


class CannotBeShown(ExceptionGroup[ValueError]):
    def __str__(self) -> str:
        raise RuntimeError("cannot be shown")


class Big:
    pass


def test_exception_group_that_cannot_be_shown_is_a_failure_that_holds_nothing(
    status: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[weakref.ref[Big]] = []

    def train() -> None:
        def inner() -> None:
            big = Big()
            kept.append(weakref.ref(big))
            raise ValueError("too much")

        try:
            inner()
        except ValueError as error:
            raise CannotBeShown("several", [error]) from None

    assert attempt(train) == (False, None)
    assert "CannotBeShown: <exception str() failed>" in str(status.error)
    assert "ValueError: too much" in capsys.readouterr().err
    assert kept[0]() is None, "a frame of the failed attempt is still there"


def test_exit_is_the_end_unless_the_attempt_is_over_anyway(status: Status) -> None:
    def train() -> None:
        sys.exit("a connection was lost")

    with pytest.raises(SystemExit):
        attempt(train)
    status.fail(Retryable("rank 1 died"))
    assert attempt(train, max_failures=0) == (False, None)
