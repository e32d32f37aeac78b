"""NCCL for one group, on one card, in one round: made, proved, watched and aborted here.

In: a store of the round, the members, a card. Out: a :class:`Communicator` whose backend a ``ProcessGroup`` can use for
tensors of that card, and one thread that asks all of them for errors.

What torch's own watchdog does about errors is switched off (nccl_settings.py). Kernels of a group whose peer died go on
waiting on the card until somebody aborts; then they end with garbage, and everything queued behind them runs on it. So
whoever learns of an error records it first and aborts then, and a version is taken for good only if no error was known
after its last byte had been copied (see gather.py).

Invariants: an abort never blocks its caller, and each communicator is aborted on a thread of its own, at once: one
abort may wait for kernels of another; every thread chooses its card before anything else; nothing is destroyed before
its abort has ended. NCCL is connected eagerly, so that messages between two ranks need no further connection.
Known limits: NCCL's connecting cannot be interrupted (with TORCH_NCCL_USE_COMM_NONBLOCKING=1 it can): a thread that was
given up stays until its peers' processes end. Eagerly connected, unbatched ``isend``s and ``irecv``s of one group run
in the order they were given in: ``batch_isend_irecv`` is for those that cross each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup, distributed_c10d

from p2pstate.groups.waiting import Abandoned, call

__all__ = ["WATCH", "Communicator", "ErrorWatch", "wait_on_host"]

PROBE_TIMEOUT_S = 60.0
POLL_S = 0.02


class Communicator:
    """``rank``: among ``members`` (global ranks). ``name``: in torch's logs. ``num_blocks``: of the card's processors
    at most; 0: as many as NCCL wants."""

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Sequence[int],
        device: torch.device,
        timeout: timedelta,
        *,
        name: str = "",
        num_blocks: int = 0,
    ) -> None:
        self.device = device
        self._size = len(members)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._cut = False
        self._gone = threading.Event()
        options: Any = distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(members)
        options.group_name = name
        if num_blocks:
            options.config.min_ctas, options.config.max_ctas = 1, num_blocks
        self.backend: Any = distributed_c10d.ProcessGroupNCCL(store, rank, len(members), options)

    def connect(self, group: Any) -> None:
        """With all members at the same time; ``group`` uses it from then on.

        Raises what NCCL raises, a RuntimeError, also when the group's timeout is over; Abandoned after a cut.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        try:
            call(lambda: self._connect(group), lambda: self._cut or time.monotonic() > deadline, "connecting-nccl")
        except Abandoned:
            if self._cut:
                raise
            raise RuntimeError(f"NCCL was not connected within {self._timeout.total_seconds():g} s") from None

    def cut(self) -> None:
        """Abort, in the background. Safe from any thread, more than once, and while it is being connected."""
        with self._lock:
            if self._cut:
                return
            self._cut = True
        threading.Thread(target=self._abort, args=(self.backend,), name="p2pstate-abort", daemon=True).start()

    def release(self) -> threading.Event:
        """Cut, and let go; the event is set once the abort has ended."""
        self.cut()
        self.backend = None
        return self._gone

    def error(self) -> str | None:
        """What NCCL reports, unless it was cut here."""
        backend = self.backend
        if self._cut or backend is None:
            return None
        kind = backend.get_error()
        return None if kind.name == "SUCCESS" else f"NCCL reports {kind.name} on {self.device}"

    def _connect(self, group: Any) -> None:
        torch.cuda.set_device(self.device)
        self.backend.eager_connect_single_device(self.device)
        group._register_backend(self.device, ProcessGroup.BackendType.NCCL, self.backend)
        # On a stream of its own: the training thread's may hold anything.
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            probe = torch.ones(1, device=self.device)
            work = group.allreduce([probe])
            wait_on_host(work.is_completed, lambda: self._cut, PROBE_TIMEOUT_S)
            work.wait()
            if int(probe.item()) != self._size:
                raise RuntimeError(f"a new NCCL group of {self._size} ranks counted {int(probe.item())}")

    def _abort(self, backend: Any) -> None:
        try:
            torch.cuda.set_device(self.device)
            backend.abort()
        except RuntimeError:
            pass  # NCCL says that the communicator is broken, which is why it is aborted
        finally:
            self._gone.set()


def wait_on_host(is_done: Callable[[], bool], is_over: Callable[[], bool], timeout_s: float | None) -> None:
    """Wait until something has run on the card, or is over. (A deadline given to NCCL's own ``wait`` makes it abort.)

    Raises RuntimeError when it takes longer than ``timeout_s``.
    """
    began = time.monotonic()
    while not is_done() and not is_over():
        if timeout_s is not None and time.monotonic() - began > timeout_s:
            raise RuntimeError(f"an operation did not end on the card within {timeout_s:g} s")
        time.sleep(POLL_S if time.monotonic() - began > POLL_S else POLL_S / 100)


class ErrorWatch:
    """Asks communicators for errors, every ``POLL_S``, from one thread that lives while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[tuple[Communicator, Callable[[Exception], None]]] = []
        self._running = False

    def add(self, communicator: Communicator, on_error: Callable[[Exception], None]) -> None:
        """``on_error`` is called at most once, before anything is aborted because of it."""
        with self._lock:
            self._watched.append((communicator, on_error))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="p2pstate-nccl-errors", daemon=True).start()

    def remove(self, communicator: Communicator) -> None:
        with self._lock:
            self._watched = [each for each in self._watched if each[0] is not communicator]

    def look(self) -> None:
        """Ask all of them, now."""
        for communicator, on_error in self._all():
            text = communicator.error()
            if text is not None:
                self.remove(communicator)
                on_error(RuntimeError(text))

    def _all(self) -> Sequence[tuple[Communicator, Callable[[Exception], None]]]:
        with self._lock:
            return tuple(self._watched)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._watched:
                    self._running = False
                    return
            self.look()
            time.sleep(POLL_S)


WATCH = ErrorWatch()
