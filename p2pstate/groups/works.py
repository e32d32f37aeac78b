"""The handles that collectives return: errors in them become values.

In: a work handle of the inner group, or nothing. Out: handles whose ``wait`` and futures never raise: the first error is
recorded for the whole process, the outputs are given defined values, and the caller goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from p2pstate.groups.status import Status

__all__ = ["EchoWork", "GuardedWork"]


class EchoWork(Work):
    """Done at once, with the given value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._future: Future[Any] = Future()
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

    def get_future(self) -> Future[Any]:
        return self._future


class GuardedWork(Work):
    """Forwards to ``work``; an error goes to the process's status, ``echo`` then fills the outputs."""

    def __init__(self, work: Any, status: Status, epoch: int, echo: Callable[[], Any], value: Any) -> None:
        super().__init__()
        self._work, self._status, self._epoch, self._echo, self._value = work, status, epoch, echo, value
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timeout)
        except Exception as error:
            self._failed(error)
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        # NCCL works order streams here instead of blocking the host.
        try:
            self._work.block_current_stream()
        except Exception as error:
            self._failed(error)

    def result(self) -> Any:
        self.wait()
        return self._value

    def source_rank(self) -> int:
        try:
            return int(self._work.source_rank())
        except Exception as error:
            self._failed(error)
            return 0

    def get_future(self) -> Future[Any]:
        if self._future is None:
            guarded: Future[Any] = Future()
            self._future = guarded

            def settle(done: torch.futures.Future[Any]) -> None:
                try:
                    guarded.set_result(done.value())
                except Exception as error:
                    self._failed(error)
                    guarded.set_result(self._value)

            self._work.get_future().add_done_callback(settle)
        return self._future

    def _failed(self, error: Exception) -> None:
        self._status.fail(error, self._epoch)
        with torch.no_grad():
            self._echo()
