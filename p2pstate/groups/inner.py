"""The real connections behind a group, for one round: built, checked, cut and buried.

In: a store of the round, the members' numeric addresses. Out: an :class:`Inner` whose ``group`` is a stock
``ProcessGroup`` with one backend per device type. gloo is built here; the NCCL backend joins at ``BACKENDS``.

Invariants: an Inner that was returned has carried one small all-reduce among all its members (connecting "succeeds"
even against a stopped process); after :meth:`Inner.cut` no operation of it blocks; groups are destroyed on a thread of
their own, never on one of gloo's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import ProcessGroupGloo

from p2pstate.groups.sockets import Connections

__all__ = ["BACKENDS", "Inner", "build_inner", "bury"]

CONNECT_TIMEOUT_S = 6.0  # gloo multiplies it by five while it connects


def _gloo(store: Store, rank: int, size: int, host: str) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 2
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    return ProcessGroupGloo(store, rank, size, options)


# device type -> (c10d backend type, constructor)
BACKENDS: dict[str, tuple[Any, Callable[[Store, int, int, str], Any]]] = {
    "cpu": (ProcessGroup.BackendType.GLOO, _gloo),
}


class Inner:
    """One group's connections in one round."""

    def __init__(self, epoch: int, group: Any, backends: list[Any], connections: Connections) -> None:
        self.epoch = epoch
        self.group: Any = group
        self._backends = backends
        self._connections = connections

    def cut(self) -> None:
        """Make every blocked operation raise, now. Safe from any thread."""
        self._connections.cut()

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of later operations."""
        self.group.set_timeout(timeout)

    def release(self) -> threading.Event:
        """Cut, and destroy in the background; the event is set once gloo's threads of this group have ended."""
        self.cut()
        things = [self.group, self._backends]
        # Ours must go first: whoever drops the last reference waits for gloo's threads.
        self.group, self._backends = None, []
        return bury(things)


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
    backends: list[Any] = []
    try:
        with connections:
            for device, (kind, make) in BACKENDS.items():
                backends.append(make(store, rank, size, host))
                group._register_backend(torch.device(device), kind, backends[-1])
                group._set_default_backend(kind)
        probe = torch.ones(1)
        group.allreduce([probe]).wait(timedelta(seconds=CONNECT_TIMEOUT_S))
        if int(probe.item()) != size:
            raise RuntimeError(f"a new group of {size} ranks counted {int(probe.item())}")
    except BaseException:
        # The traceback keeps this frame: leave nothing in it whose destructor could wait.
        things, group, backends = [group, backends], None, []
        bury(things)
        raise
    group.set_timeout(timeout)
    return Inner(epoch, group, backends, connections)


def bury(things: list[Any]) -> threading.Event:
    """Drop the last references to groups on a thread of its own: their destructors join gloo's threads, which may take
    until gloo's timeout where an operation cannot be freed (see waiting.py)."""
    gone = threading.Event()

    def dig() -> None:
        things.clear()
        gone.set()

    threading.Thread(target=dig, name="p2pstate-reaper", daemon=True).start()
    return gone
