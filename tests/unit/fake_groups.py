"""Groups without peers: over an inner one that is a fake, or alone as a newcomer is."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.futures import Future

from p2pstate.groups.group import P2PGroup
from p2pstate.groups.install import install
from p2pstate.groups.registry import Registry
from p2pstate.groups.status import Status

TIMEOUT = timedelta(seconds=30)
WORLD, RANK = 4, 1  # of the process that is alone


class FakeWork:
    """Ends well, or as ``error`` says, or (``ends=False``) never."""

    def __init__(self, error: Exception | None = None, *, ends: bool = True) -> None:
        self.error, self.ends = error, ends
        self.future: Future[Any] = Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ends:
            raise RuntimeError("timed out")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.ends

    def _source_rank(self) -> int:
        if self.error is not None:
            raise self.error
        return 1

    def get_future(self) -> Future[Any]:
        return self.future


class FakeInner:
    """Connections of round ``epoch``; every collective calls ``operation``."""

    card = None

    def __init__(self, operation: Callable[..., Any], epoch: int = 1) -> None:
        self.operation, self.epoch = operation, epoch
        self.calls: list[str] = []
        self.released = False
        self.timeout: timedelta | None = None
        self.group = self

    def __getattr__(self, name: str) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return self.operation(*args, **kwargs)

        return collective

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def watch(self, on_error: Callable[[Exception], None]) -> None:
        """Nothing of it is on a card."""

    def release(self) -> None:
        self.released = True


def connected(operation: Callable[..., Any], *, num_members: int = 2) -> tuple[P2PGroup, Status, FakeInner]:
    status = Status()
    status.loud = False  # as inside a training loop
    status.connect(1)
    group = P2PGroup("key", tuple(range(num_members)), 0, TIMEOUT, status)
    inner = FakeInner(operation)
    group.attach(inner)  # type: ignore[arg-type]
    return group, status, inner


def raising(error: Exception) -> Callable[..., Any]:
    def operation(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    return operation


def returning(work: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: work


def install_solo() -> tuple[Registry, Status]:
    status = Status()
    status.solo = True
    registry = Registry(status)
    registry.rank, registry.world_size = RANK, WORLD
    install(registry, HashStore)
    dist.init_process_group("p2p", store=HashStore(), rank=RANK, world_size=WORLD)
    return registry, status


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
