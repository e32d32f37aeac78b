"""The least it could take, all ranks at once: one memcpy of the captured bytes, the shipped bytes over plain sockets.

In: sizes, the other ranks over the default group. Out: [began, ended, times] per try and rank, in monotonic seconds,
which processes of one machine share. Small amounts are moved several times per try, so that ranks which start a little
apart still work at once. Memory is touched before the first try. All ranks call everything here at once.
"""

import socket
import threading
import time
from types import TracebackType

import torch
import torch.distributed as dist

MIN_TRY_S = 0.04
MAX_TIMES = 200
PIECE_BYTES = 4 << 20


class Memcpy:
    """Every rank copies ``num_bytes`` of its own."""

    def __init__(self, num_bytes: int) -> None:
        self._source = torch.ones(max(1, num_bytes), dtype=torch.uint8)
        self._target = torch.zeros_like(self._source)
        began = time.monotonic()
        self._target.copy_(self._source)
        self._times = agree_on_times(time.monotonic() - began)

    def once(self) -> list[float]:
        dist.barrier()
        began = time.monotonic()
        for _ in range(self._times):
            self._target.copy_(self._source)
        return [began, time.monotonic(), self._times]


class Sockets:
    """Every rank sends ``num_bytes`` to its ``buddy`` (a permutation of the ranks) and receives what is sent to it.

    A context manager. Raises OSError for a connection that breaks, or is silent for ``deadline_s``.
    """

    def __init__(self, num_bytes: int, buddy: int, deadline_s: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(deadline_s)
            told: list[tuple[int, int, int]] = [(0, 0, 0)] * dist.get_world_size()
            dist.all_gather_object(told, (server.getsockname()[1], buddy, num_bytes))
            self._out = socket.create_connection(("127.0.0.1", told[buddy][0]), deadline_s)
            self._into, _ = server.accept()
            self._into.settimeout(deadline_s)
        (num_incoming,) = [size for _, to, size in told if to == dist.get_rank()]
        self._outgoing = torch.ones(max(1, num_bytes), dtype=torch.uint8)
        self._incoming = torch.zeros(max(1, num_incoming), dtype=torch.uint8)
        began = time.monotonic()
        self._exchange(1)
        self._times = agree_on_times(time.monotonic() - began)

    def __enter__(self) -> "Sockets":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._out.close()
        self._into.close()

    def once(self) -> list[float]:
        dist.barrier()
        began = time.monotonic()
        self._exchange(self._times)
        return [began, time.monotonic(), self._times]

    def _exchange(self, times: int) -> None:
        """Both directions at once, ``times`` times."""
        errors: list[OSError] = []

        def send() -> None:
            try:
                for _ in range(times):
                    for piece in self._outgoing.split(PIECE_BYTES):
                        self._out.sendall(memoryview(piece.numpy()))
            except OSError as error:
                errors.append(error)

        thread = threading.Thread(target=send, name="overhead-send", daemon=True)
        thread.start()
        view = memoryview(self._incoming.numpy())
        for _ in range(times):
            position = 0
            while position < len(view):
                num_bytes = self._into.recv_into(view[position : position + PIECE_BYTES])
                if num_bytes == 0:
                    raise ConnectionError("the other rank closed the connection")
                position += num_bytes
        thread.join()  # ends by the socket's own timeout
        if errors:
            raise errors[0]


def agree_on_times(once_s: float) -> int:
    slowest = torch.tensor([once_s])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(1, min(MAX_TIMES, round(MIN_TRY_S / max(slowest.item(), 1e-9))))
