"""The one error flag of this process, and whether its collectives are real.

In: errors from any training group, aborts ordered by the control plane. Out: the answer to "is this step still good?",
and one call to a listener when the first error of a round arrives.

Invariants: the first error wins until :meth:`Status.connect` starts a new round; from the first error on (and in solo
mode) every collective of every group echoes; an error that belongs to an older round is ignored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from p2pstate.errors import Retryable
from p2pstate.groups.journal import Recording, Replay
from p2pstate.groups.waiting import ABANDON_AFTER_S
from p2pstate.trace import Trace

__all__ = ["STATUS", "PeerLost", "Status"]


class PeerLost(Retryable):
    """A collective outside a training loop cannot be completed: this worker ends and starts again with the others."""


class Status:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.epoch = 0  # the round whose connections are in use; 0: none yet
        self.solo = False  # alone: echo without an error
        self.loud = True  # connected, outside a training loop: an error is raised, not echoed
        self.between_steps = False  # in the body of a training loop: collectives could not match after a fault
        self.error: BaseException | None = None
        self.error_at: float | None = None  # monotonic seconds
        self.on_first_error: Callable[[BaseException, int], None] = lambda error, epoch: None
        self.on_echo: Callable[[], None] = lambda: None  # called by collectives once there is an error; may raise
        self.journal: Recording | Replay | None = None  # of collectives before the loop and in its first steps
        self.trace = Trace()  # the worker gives one that its agent reads
        self._unsettled: set[Callable[[], None]] = set()

    @property
    def echoing(self) -> bool:
        return self.solo or self.error is not None

    def raise_if_loud(self) -> None:
        """Outside a loop nobody would notice an echo: raise PeerLost instead."""
        if self.error is not None and self.loud and not self.solo:
            raise PeerLost(f"a peer was lost while this rank was outside its training loop: {self.error}")

    def refuse_between_steps(self, name: str) -> None:
        """Raises RuntimeError in a loop's body; other threads are not asked what they do."""
        if self.between_steps and threading.current_thread() is threading.main_thread():
            raise RuntimeError(
                f"{name} between two steps: after a fault ranks go on from different places in the loop's body, and a "
                "newcomer has not been there, so it could not match; use collectives inside the step, or in a function "
                "that is given to state.every(n, function), which all ranks run again after a fault"
            )

    def fail(self, error: BaseException, epoch: int | None = None) -> None:
        """Record an error of round ``epoch`` (the current one when not given). Safe from any thread."""
        with self._lock:
            if self.solo or self.error is not None or (epoch is not None and epoch < self.epoch):
                return
            # The traceback would keep tensors of the failed step, and gloo's sockets, alive.
            self.error = error.with_traceback(None)
            self.error_at = time.monotonic()
            # Only what waits now: by the time they are settled the next round may be running.
            waiting, failed_epoch = tuple(self._unsettled), self.epoch
        self.on_first_error(error, failed_epoch)
        timer = threading.Timer(ABANDON_AFTER_S, _settle, [waiting])
        timer.name, timer.daemon = "p2pstate-settle", True
        timer.start()

    def settle_later(self, settle: Callable[[], None]) -> None:
        """``settle`` is called soon after the next error, unless :meth:`settled` comes first.

        For futures that somebody waits on without us: the operation behind one may never end (see waiting.py).
        """
        with self._lock:
            self._unsettled.add(settle)
            late = self.error is not None
        if late:
            settle()

    def settled(self, settle: Callable[[], None]) -> None:
        with self._lock:
            self._unsettled.discard(settle)

    def connect(self, epoch: int) -> None:
        """From now on collectives are real, over the connections of round ``epoch``."""
        with self._lock:
            self.epoch, self.solo, self.error, self.error_at = epoch, False, None, None


def _settle(waiting: tuple[Callable[[], None], ...]) -> None:
    for settle in waiting:
        settle()


STATUS = Status()
