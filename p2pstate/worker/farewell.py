"""SIGTERM and SIGINT to a worker in its training loop: it leaves between two steps, soon.

In: signals. Out: the reason to leave, for the training thread to see; a call when it has not left in time, at once
where it stands still anyway.

Invariants: a signal is noticed although the training thread is blocked in C, where Python's handlers do not run;
handlers that the user's script has installed stay as they are, and then it decides; children that are forked meanwhile
have the default handlers again, and their signals are not taken for ours. Outside of the loop SIGTERM ends the process
as usual, and SIGINT, which a terminal sends to everybody, is its agent's to handle.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["GRACE_S", "Farewell"]

GRACE_S = 5.0  # for the step that is under way, and its version's way to the buddies
_NUMBERS = (signal.SIGTERM, signal.SIGINT)
_STOCK = (signal.SIG_DFL, signal.SIG_IGN)


class Farewell:
    """One per process. ``reason`` is empty until a signal came; ``on_late`` is called ``GRACE_S`` after it, or as soon
    as the training thread stands between two rounds (:meth:`idle`), where no step is under way."""

    def __init__(self, on_late: Callable[[str], Any]) -> None:
        self.reason = ""
        self._on_late = on_late
        self._is_idle = False
        self._before: dict[int, Any] = {}  # our handlers are installed in place of these
        self._wake = -1
        os.register_at_fork(after_in_child=self.close)

    def listen(self) -> None:
        """From the main thread; elsewhere, or a second time, nothing."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in _NUMBERS:
            if signal.getsignal(number) in _STOCK:
                self._before[number] = signal.signal(number, self._on_signal)
        read, self._wake = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._wake, False)
        others = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        if others != -1:  # the script's own: its handlers run when they can
            signal.set_wakeup_fd(others)
        threading.Thread(target=self._read, args=(read,), name="p2pstate-signals", daemon=True).start()

    def close(self) -> None:
        """Back to the handlers there were; also in a child, whose signals are its own."""
        if self._wake == -1 or threading.current_thread() is not threading.main_thread():
            return
        others = signal.set_wakeup_fd(-1)
        if others != self._wake:
            signal.set_wakeup_fd(others)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._before.clear()
        os.close(self._wake)
        self._wake = -1

    @contextmanager
    def idle(self) -> Iterator[None]:
        """The training thread waits inside the block, with nothing to finish."""
        self._is_idle = True
        if self.reason:
            self._on_late(self.reason)
        try:
            yield
        finally:
            self._is_idle = False

    def _on_signal(self, number: int, _frame: object) -> None:
        self._asked(number)

    def _read(self, fd: int) -> None:
        """On a thread of its own, until the other end is closed."""
        with open(fd, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                for number in numbers:
                    if number in self._before and signal.getsignal(number) == self._on_signal:
                        self._asked(number)

    def _asked(self, number: int) -> None:
        if self.reason:
            return
        self.reason = f"{signal.Signals(number).name} was sent to it"
        timer = threading.Timer(0.0 if self._is_idle else GRACE_S, self._on_late, [self.reason])
        timer.name, timer.daemon = "p2pstate-farewell", True
        timer.start()
