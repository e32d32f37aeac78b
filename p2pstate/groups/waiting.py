"""Waiting for gloo without being at its mercy.

In: a blocking call, or a handle of a collective, and a question ("is this round over?"). Out: the result, or
:class:`Abandoned` soon after the answer became yes.

Cutting sockets frees most blocked operations within milliseconds, but not all: a receive whose peer died in the middle
of a message stays blocked until gloo's own timeout, its connection being closed already. Such a wait is left behind.
Its thread ends at the timeout; it cannot receive anything any more, because every connection of the round has been cut.

Invariants: no wait lasts longer than ``ABANDON_AFTER_S`` past the end of its round; threads that lend themselves to a
call are used again once it has ended, and keep nothing of it alive.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

from p2pstate.errors import Retryable

__all__ = ["ABANDON_AFTER_S", "Abandoned", "call", "wait_collective"]

T = TypeVar("T")

POLL_S = 0.02
ABANDON_AFTER_S = 0.2  # a cut frees what can be freed within milliseconds; this is for a busy machine


class Abandoned(Retryable):
    """The round ended while something waited on its connections."""


class _Call:
    """One function that a lent thread runs, and what came of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.running = threading.Lock()
        self.running.acquire()

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:
            self.error = error
        finally:
            self.running.release()


class _Lender:
    """A thread that runs one call after another, and offers itself again after each."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[_Call] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            _run_and_forget(self.calls)
            _idle.append(self)


def _run_and_forget(calls: SimpleQueue[_Call]) -> None:
    """In a frame of its own, so that an idle thread holds no tensor of the call before."""
    calls.get().run()


_idle: list[_Lender] = []
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of these threads


def call(function: Callable[[], T], is_over: Callable[[], bool], what: str) -> T:
    """Run ``function`` on another thread; raises what it raises, or Abandoned once the round is over."""
    try:
        lender = _idle.pop()
    except IndexError:
        lender = _Lender()
    lender.thread.name = f"p2pstate-{what}"
    running = _Call(function)
    lender.calls.put(running)
    over_since: float | None = None
    while not running.running.acquire(timeout=POLL_S):
        if is_over():
            over_since = over_since or time.monotonic()
            if time.monotonic() - over_since > ABANDON_AFTER_S:
                raise Abandoned(f"{what} was given up: the round is over")
    if running.error is not None:
        raise running.error
    result: T = running.result
    return result


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
