"""The handles that collectives return: errors in them become values.

In: a work handle of the inner group, or nothing. Out: handles whose ``wait`` and futures never raise: the first error
is recorded for the whole process, the outputs are given defined values, and the caller goes on.

On a card, waiting means that what the caller queues from now on runs after the operation: the host goes on at once, an
error comes to light later (see nccl.py), and what was queued behind it is discarded at the gate or with its version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from p2pstate.groups.nccl import wait_on_host
from p2pstate.groups.status import Status
from p2pstate.groups.uncompiled import uncompiled
from p2pstate.groups.waiting import Abandoned, call, wait_collective

__all__ = ["CardBarrier", "CardWork", "EchoWork", "GuardedWork", "StubbornWork", "card_of"]


def card_of(values: Sequence[Any]) -> torch.device | None:
    """The card that a collective with these arguments runs on; None: it works on host memory."""
    for value in values:
        while isinstance(value, list | tuple) and value:
            value = value[0]
        device = getattr(value, "device", None)  # of a tensor, or of a barrier's options
        if isinstance(device, torch.device):
            return device if device.type == "cuda" else None
    return None


@uncompiled
class EchoWork(Work):
    """Done at once, with the given value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        card = card_of((value,))
        self._future: Future[Any] = Future(devices=None if card is None else [card])
        self._future.set_result(value)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        return None

    def result(self) -> Any:
        return self._future.value()

    def source_rank(self) -> int:
        return 0

    _source_rank = source_rank  # torch calls it by either name

    def get_future(self) -> Future[Any]:
        return self._future


@uncompiled
class GuardedWork(Work):
    """Forwards to ``work``; an error goes to the process's status, ``echo`` then fills the outputs.

    ``on_end``: called when the operation is seen to have ended well, perhaps more than once.
    """

    def __init__(
        self,
        work: Any,
        status: Status,
        epoch: int,
        echo: Callable[[], Any],
        value: Any,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._work, self._status, self._epoch, self._echo, self._value = work, status, epoch, echo, value
        self._on_end = on_end
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._await(timeout or None)  # C++ callers say "no timeout" with zero
        except Exception as error:
            self._failed(error)
        else:
            self._on_end()
        return True

    def _await(self, timeout: timedelta | None) -> None:
        """Return once the operation has ended. Raises what it raised, Abandoned when the round is over."""
        self._status.trace.waits.begin()
        wait_collective(self._work, self._is_over, timeout)

    def is_completed(self) -> bool:
        return self._is_over() or bool(self._work.is_completed())

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> Any:
        self.wait()
        return self._value

    def source_rank(self) -> int:
        try:
            return int(self._work._source_rank())
        except Exception as error:
            self._failed(error)
            return 0

    _source_rank = source_rank  # torch calls it by either name

    def get_future(self) -> Future[Any]:
        if self._future is None:
            self._future = Future()
            # In this order: the callback runs at once when the operation has ended, and takes the other back.
            self._status.settle_later(self._settle)
            self._work.get_future().add_done_callback(self._settle_with)
        return self._future

    def _settle_with(self, done: Future[Any]) -> None:
        try:
            value = done.value()
        except Exception as error:
            self._status.fail(error, self._epoch)
            self._settle()
        else:
            self._on_end()
            self._set_future(value)

    def _settle(self) -> None:
        if self._status.epoch == self._epoch:  # later the outputs may belong to somebody else
            with torch.no_grad():
                self._echo()
        self._set_future(self._value)

    def _set_future(self, value: Any) -> None:
        self._status.settled(self._settle)
        with self._lock:
            if self._future is not None and not self._future.done():
                self._future.set_result(value)

    def _is_over(self) -> bool:
        self._status.trace.poll()
        return self._status.error is not None or self._status.epoch != self._epoch

    def _failed(self, error: Exception) -> None:
        self._status.fail(error, self._epoch)
        self._status.raise_if_loud()
        with torch.no_grad():
            self._echo()


@uncompiled
class StubbornWork(GuardedWork):
    """A handle that does not honour the deadline of a wait, which can therefore not be cut into slices."""

    def _await(self, timeout: timedelta | None) -> None:
        self._status.trace.waits.begin()
        work, args = self._work, () if timeout is None else (timeout,)
        call(lambda: work.wait(*args), self._is_over, "waiting")


@uncompiled
class CardWork(GuardedWork):
    """An operation on a card: the host goes on at once, unless the wait has a deadline."""

    _host_waits = False

    def _await(self, timeout: timedelta | None) -> None:
        if self._host_waits or timeout is not None:
            timeout_s = None if timeout is None else timeout.total_seconds()
            wait_on_host(self._work.is_completed, self._is_over, timeout_s)
        self._work.block_current_stream()  # wait() aborts NCCL itself after an error, which nobody has recorded then
        if self._is_over():
            raise Abandoned("an operation on a card was given up: the round is over")

    def get_future(self) -> Future[Any]:
        """NCCL's own: it is done at once, and whoever waits for it orders streams."""
        self._on_end()
        future: Future[Any] = self._work.get_future()
        return future


@uncompiled
class CardBarrier(CardWork):
    """Waiting for it is to wait for its end, on the host as well."""

    _host_waits = True
