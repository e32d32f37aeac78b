"""What stands for torch's bindings of CUDA and NCCL on a machine without a card."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ErrorType
from torch.futures import Future

CARD = torch.device("cpu")  # plays a card: tensors on it can be made here
DEADLINE_S = 30.0


class FakeOptions:
    def __init__(self) -> None:
        self._timeout: timedelta | None = None
        self.config = type("Config", (), {"min_ctas": -1, "max_ctas": -1})()


class FakeNccl:
    """One backend. ``calls``: of all of them, with the thread."""

    Options = FakeOptions
    calls: list[tuple[str, str]] = []  # noqa: RUF012 (one list for all is meant)
    blocked: threading.Event | None = None  # connecting waits for it
    fails = ""

    def __init__(self, store: Any, rank: int, size: int, options: FakeOptions) -> None:
        self.options, self.size = options, size
        self.state = ErrorType.SUCCESS
        self._say("make")

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._say("connect")
        if FakeNccl.blocked is not None:
            FakeNccl.blocked.wait(DEADLINE_S)
        if FakeNccl.fails == "connect":
            raise RuntimeError("NCCL error: remote process exited")

    def abort(self) -> None:
        self._say("abort")
        if FakeNccl.fails == "abort":
            raise RuntimeError("NCCL communicator is broken")

    def get_error(self) -> ErrorType:
        return self.state

    @staticmethod
    def _say(what: str) -> None:
        FakeNccl.calls.append((what, threading.current_thread().name))


class FakeCardWork:
    def __init__(self, *, ends: bool = True, error: Exception | None = None) -> None:
        self.ends, self.error, self.num_blocks = ends, error, 0
        self.future: Future[Any] = Future()

    def is_completed(self) -> bool:
        return self.ends

    def block_current_stream(self) -> None:
        self.num_blocks += 1

    def wait(self) -> bool:
        """torch aborts NCCL in it, at the end of a deadline and after an error."""
        if self.error is not None:
            FakeNccl._say("abort")
            raise self.error
        return True

    def get_future(self) -> Future[Any]:
        return self.future


class FakeProcessGroup:
    """What a backend is registered with; ``counts``: what its sums say."""

    def __init__(self, counts: int = 2, operation: Callable[[], Any] = FakeCardWork) -> None:
        self.counts, self.operation = counts, operation
        self.names: list[str] = []

    def _register_backend(self, device: torch.device, kind: Any, backend: Any) -> None:
        FakeNccl._say("register")

    def allreduce(self, tensors: list[torch.Tensor], *_: Any) -> Any:
        tensors[0].fill_(self.counts)
        return self._note("allreduce")

    def send(self, *_: Any) -> Any:
        return self._note("send")

    def barrier(self, *_: Any) -> Any:
        return self._note("barrier")

    def _start_coalescing(self, device: torch.device) -> None:
        self._note("start")

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._note("end")

    def _note(self, name: str) -> Any:
        self.names.append(name)
        return self.operation()
