"""Waiting for gloo without being at its mercy.

In: a blocking call, or a handle of a collective, and a question ("is this round over?"). Out: the result, or
:class:`Abandoned` soon after the answer became yes.

Cutting sockets frees most blocked operations within milliseconds, but not all: a receive whose peer died in the middle
of a message stays blocked until gloo's own timeout, its connection being closed already. Such a wait is left behind.
Its thread ends at the timeout; it cannot receive anything any more, because every connection of the round has been cut.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from p2pstate.errors import Retryable

__all__ = ["ABANDON_AFTER_S", "Abandoned", "call", "wait_collective"]

T = TypeVar("T")

POLL_S = 0.02
ABANDON_AFTER_S = 0.2  # a cut frees what can be freed within milliseconds; this is for a busy machine


class Abandoned(Retryable):
    """The round ended while something waited on its connections."""


def call(function: Callable[[], T], is_over: Callable[[], bool], what: str) -> T:
    """Run ``function`` on a thread of its own; raises what it raises, or Abandoned once the round is over."""
    done = threading.Event()
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name=f"p2pstate-{what}", daemon=True).start()
    over_since: float | None = None
    while not done.wait(POLL_S):
        if is_over():
            over_since = over_since or time.monotonic()
            if time.monotonic() - over_since > ABANDON_AFTER_S:
                raise Abandoned(f"{what} was given up: the round is over")
    if errors:
        raise errors[0]
    return result[0]


def wait_collective(work: Any, is_over: Callable[[], bool], timeout: timedelta | None = None) -> None:
    """Wait for the handle of a gloo collective; raises what it raises, or Abandoned once the round is over."""
    deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
    over_since: float | None = None
    while True:
        left = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
        try:
            work.wait(timedelta(seconds=max(left, 0.001)))
            return
        except RuntimeError:
            # The work's own error, or only the end of this slice: c10d has one type for both.
            if work.is_completed():
                work.wait()
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise
        if is_over():
            over_since = over_since or time.monotonic()
            if time.monotonic() - over_since > ABANDON_AFTER_S:
                raise Abandoned("a collective was given up: the round is over")
