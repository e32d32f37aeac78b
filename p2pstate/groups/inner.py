"""The real connections behind a group, for one round: built, checked, cut and buried.

In: a store of the round, the members' numeric addresses. Out: an :class:`Inner` whose ``group`` is a stock
``ProcessGroup``: over gloo for tensors in host memory, and over NCCL for those on a card once there are any.

Invariants: an Inner that was returned has carried one small all-reduce among all its members (connecting "succeeds"
even against a stopped process); after :meth:`Inner.cut` no operation of it blocks; groups are destroyed on a thread of
their own, never on one of gloo's, for which an ending interpreter waits.
Known limit: one that takes longer than ``EXIT_WAIT_S`` to destroy then ends the process with SIGABRT.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import ProcessGroupGloo

from p2pstate.groups.nccl import WATCH, Communicator
from p2pstate.groups.sockets import Connections

__all__ = ["Inner", "build_inner", "bury", "card_inner"]

CONNECT_TIMEOUT_S = 6.0  # gloo multiplies it by five while it connects
MAX_ABORT_S = 600.0  # of NCCL, where half a second is usual
EXIT_WAIT_S = 10.0

_unburied: list[list[Any]] = []
_reapers: set[threading.Thread] = set()


def _gloo(store: Store, rank: int, size: int, host: str) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 2
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    return ProcessGroupGloo(store, rank, size, options)


class Inner:
    """One group's connections in one round. ``gloo``: None in a group for cards alone."""

    def __init__(self, epoch: int, group: Any, gloo: Any, connections: Connections) -> None:
        self.epoch = epoch
        self.group: Any = group
        self._gloo = gloo
        self._connections = connections
        self._communicator: Communicator | None = None

    @property
    def card(self) -> torch.device | None:
        """The card whose tensors this group moves as well."""
        return self._communicator.device if self._communicator is not None else None

    def join_card(self, communicator: Communicator) -> None:
        """Connect it, with all members at the same time; from then on it goes the way of this group."""
        try:
            communicator.connect(self.group)
        except BaseException:
            bury([communicator.backend], [communicator.release()])
            raise
        self._communicator = communicator

    def watch(self, on_error: Callable[[Exception], None]) -> None:
        """Have ``on_error`` called when NCCL reports an error of this group; gloo's come with the operations."""
        if self._communicator is not None:
            WATCH.add(self._communicator, on_error)

    def error(self) -> str | None:
        """What NCCL reports of this group."""
        return self._communicator.error() if self._communicator is not None else None

    def cut(self) -> None:
        """Make every blocked operation raise, now. Safe from any thread."""
        self._connections.cut()
        if self._communicator is not None:
            self._communicator.cut()

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of later operations."""
        self.group.set_timeout(timeout)

    def release(self) -> threading.Event:
        """Cut, and destroy in the background; the event is set once gloo's threads of this group have ended."""
        self.cut()
        things = [self.group, self._gloo]
        # Ours must go first: whoever drops the last reference waits for gloo's threads.
        self.group = self._gloo = None
        if self._communicator is None:
            return bury(things)
        WATCH.remove(self._communicator)
        things.append(self._communicator.backend)
        return bury(things, [self._communicator.release()])


def build_inner(
    store: Store,
    rank: int,
    size: int,
    host: str,
    epoch: int,
    timeout: timedelta,
    connections: Connections,
) -> Inner:
    """Connect to all members (they call this at the same time with stores that share a prefix) and prove it.

    ``connections``: not made yet; whoever has them can cut them while they are being made.
    Raises what gloo raises: RuntimeError, or the store's DistStoreError at the end of the round.
    """
    group: Any = ProcessGroup(store, rank, size)
    gloo: Any = None
    try:
        with connections:
            gloo = _gloo(store, rank, size, host)
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
        probe = torch.ones(1)
        group.allreduce([probe]).wait(timedelta(seconds=CONNECT_TIMEOUT_S))
        if int(probe.item()) != size:
            raise RuntimeError(f"a new group of {size} ranks counted {int(probe.item())}")
    except BaseException:
        # The traceback keeps this frame: leave nothing in it whose destructor could wait.
        things, group, gloo = [group, gloo], None, None
        bury(things)
        raise
    group.set_timeout(timeout)
    return Inner(epoch, group, gloo, connections)


def card_inner(store: Store, rank: int, size: int, epoch: int) -> Inner:
    """For tensors of a card alone, once it has joined one."""
    return Inner(epoch, ProcessGroup(store, rank, size), None, Connections())


def bury(things: list[Any], after: Sequence[threading.Event] = ()) -> threading.Event:
    """Drop the last references to groups on a thread of its own: their destructors join gloo's threads, which may take
    until gloo's timeout where an operation cannot be freed (see waiting.py). ``after``: what has to have ended before.
    """
    gone = threading.Event()

    def dig() -> None:
        if all(event.wait(MAX_ABORT_S) for event in after):
            things.clear()
            gone.set()
        else:
            _unburied.append(things)  # destroying what is still in use ends the process
        _reapers.discard(threading.current_thread())

    reaper = threading.Thread(target=dig, name="p2pstate-reaper", daemon=True)
    _reapers.add(reaper)
    reaper.start()
    return gone


@atexit.register
def _wait_for_reapers() -> None:
    """The interpreter's end would unwind the stack of one that is in a destructor, which C++ answers with SIGABRT: a
    script that ends with ``destroy_process_group()``."""
    deadline = time.monotonic() + EXIT_WAIT_S
    for reaper in list(_reapers):
        reaper.join(max(0.0, deadline - time.monotonic()))
