"""The least it could take, all ranks at once: one memcpy of the captured bytes, the shipped bytes over plain sockets.

In: sizes, the other ranks over the default group. Out: [began, ended, times] per try and rank, in monotonic seconds,
which processes of one machine share. Small amounts are moved several times per try, so that ranks which start a little
apart still work at once.
"""

import socket
import threading
import time

import torch
import torch.distributed as dist

NUM_TRIES = 7
MIN_TRY_S = 0.04
MAX_TIMES = 200
PIECE_BYTES = 4 << 20

Tries = list[list[float]]


def memcpy(num_bytes: int) -> Tries:
    """All ranks call this at once; every rank copies its own ``num_bytes``."""
    source = torch.ones(max(1, num_bytes), dtype=torch.uint8)
    target = torch.zeros_like(source)  # touched: no page faults below
    began = time.monotonic()
    target.copy_(source)
    times = _agree_on_times(time.monotonic() - began)
    tries = []
    for _ in range(NUM_TRIES):
        dist.barrier()
        began = time.monotonic()
        for _ in range(times):
            target.copy_(source)
        tries.append([began, time.monotonic(), times])
    return tries


def sockets(num_bytes: int, buddy: int, deadline_s: float) -> Tries:
    """Every rank sends ``num_bytes`` to its ``buddy`` (a permutation of the ranks) and receives what is sent to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(deadline_s)
        told: list[tuple[int, int, int]] = [(0, 0, 0)] * dist.get_world_size()
        dist.all_gather_object(told, (server.getsockname()[1], buddy, num_bytes))
        out = socket.create_connection(("127.0.0.1", told[buddy][0]), deadline_s)
        into, _ = server.accept()
    with out, into:
        into.settimeout(deadline_s)
        (num_incoming,) = [size for _, to, size in told if to == dist.get_rank()]
        outgoing = torch.ones(max(1, num_bytes), dtype=torch.uint8)
        incoming = torch.zeros(max(1, num_incoming), dtype=torch.uint8)
        began = time.monotonic()
        _exchange(out, into, outgoing, incoming, 1)
        times = _agree_on_times(time.monotonic() - began)
        tries = []
        for _ in range(NUM_TRIES):
            dist.barrier()
            began = time.monotonic()
            _exchange(out, into, outgoing, incoming, times)
            tries.append([began, time.monotonic(), times])
        return tries


def _exchange(
    out: socket.socket, into: socket.socket, outgoing: torch.Tensor, incoming: torch.Tensor, times: int
) -> None:
    """Both directions at once, ``times`` times. Raises OSError, on this thread, for a connection that breaks."""
    errors: list[OSError] = []

    def send() -> None:
        try:
            for _ in range(times):
                for piece in outgoing.split(PIECE_BYTES):
                    out.sendall(memoryview(piece.numpy()))
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=send, name="overhead-send", daemon=True)
    thread.start()
    view = memoryview(incoming.numpy())
    for _ in range(times):
        position = 0
        while position < len(view):
            num_bytes = into.recv_into(view[position : position + PIECE_BYTES])
            if num_bytes == 0:
                raise ConnectionError("the other rank closed the connection")
            position += num_bytes
    thread.join()  # ends by the socket's own timeout
    if errors:
        raise errors[0]


def _agree_on_times(once_s: float) -> int:
    slowest = torch.tensor([once_s])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(1, min(MAX_TIMES, round(MIN_TRY_S / max(slowest.item(), 1e-9))))
