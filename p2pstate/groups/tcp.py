"""Bulk transfers over plain TCP: the kernel copies straight from and into slots, and the GIL is not held meanwhile.

In: a connected :class:`Mesh`, messages. Out: messages moved and hashed, piece by piece while a piece is in the
processor's cache. On the wire a message is: frame (sizes), head, body, digest; a small one is one system call.

Invariants: one thread at most reads a connection, and one writes it; threads are started when an exchange needs them,
kept for the next one, and end with :meth:`TcpTransport.release`; a body is never copied in this process.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import xxhash

from p2pstate.groups.mesh import Mesh
from p2pstate.groups.transport import (
    DIGEST_BYTES,
    FRAME_BYTES,
    Incoming,
    OnError,
    Outgoing,
    TransferFailed,
    accepted,
    pack_frame,
    unpack_frame,
)

__all__ = ["PIECE_BYTES", "TcpTransport"]

PIECE_BYTES = 4 << 20  # hashed and copied by the kernel while it is in the cache; smaller ones take more turns
Task = Callable[[], None]


class TcpTransport:
    """The connections of round ``epoch``. ``silence_s``: the longest wait for another rank within a transfer."""

    name = "tcp"

    def __init__(self, epoch: int, mesh: Mesh, silence_s: float) -> None:
        self.epoch = epoch
        self._mesh = mesh
        self._silence_s = silence_s
        self._threads = _Threads()
        self._lock = threading.Lock()
        self._busy = self._released = False
        self._gone = threading.Event()

    def exchange(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], on_error: OnError = lambda error: None
    ) -> None:
        with self._lock:
            if self._released:
                raise TransferFailed("a transfer was not begun: the round is over")
            assert not self._busy, "two exchanges at once over one transport"
            self._busy = True
        try:
            sends: dict[int, list[Outgoing]] = {}
            receives: dict[int, list[Incoming]] = {}
            for out in outgoing:
                sends.setdefault(out.to, []).append(out)
            for message in incoming:
                receives.setdefault(message.sender, []).append(message)
            tasks = [partial(self._send_all, rank, messages) for rank, messages in sends.items()]
            tasks += [partial(self._receive_all, rank, expected) for rank, expected in receives.items()]
            self._threads.run(tasks, on_error)
        finally:
            self._leave()

    def cut(self) -> None:
        self._mesh.cut()

    def release(self) -> threading.Event:
        self._mesh.cut()
        with self._lock:
            first, self._released = not self._released, True
            busy = self._busy
        if first and not busy:
            self._close()
        return self._gone

    def _leave(self) -> None:
        """Whoever comes last, the exchange or :meth:`release`, closes the sockets."""
        with self._lock:
            self._busy = False
            last = self._released
        if last:
            self._close()

    def _close(self) -> None:
        self._threads.end()
        self._mesh.close()
        self._gone.set()

    def _send_all(self, rank: int, messages: Sequence[Outgoing]) -> None:
        outlet = _Outlet(self._mesh[rank])
        for message in messages:
            payload = message.payload
            hasher = payload.claim()
            buffers: list[bytes | memoryview] = [pack_frame(message)]
            for start in range(0, len(payload.body), PIECE_BYTES):
                if start:
                    outlet.send(buffers)
                    buffers = []
                piece = payload.body[start : start + PIECE_BYTES]
                if hasher is not None:
                    hasher.update(piece)
                buffers.append(piece)
            if hasher is not None:
                payload.hashed(hasher.digest())
            if outlet.error is None:
                outlet.send([*buffers, payload.digest(self._silence_s)])
        if outlet.error is not None:
            raise TransferFailed(f"sending to rank {rank} failed: {outlet.error}")

    def _receive_all(self, rank: int, expected: Sequence[Incoming]) -> None:
        sock = self._mesh[rank]
        for message in expected:
            try:
                digests = self._receive_one(sock, rank, message)
            except BaseException as error:
                _refuse_the_rest(sock)
                if isinstance(error, OSError):
                    raise TransferFailed(f"receiving from rank {rank} failed: {error}") from None
                raise
            message.arrived(*digests)

    def _receive_one(self, sock: socket.socket, rank: int, message: Incoming) -> tuple[bytes, bytes]:
        """(digest computed here, digest the sender computed)."""
        head_bytes, body_bytes = unpack_frame(_receive_new(sock, FRAME_BYTES, rank), rank)
        body = accepted(message, _receive_new(sock, head_bytes, rank), body_bytes)
        announced = bytearray(DIGEST_BYTES)
        hasher = xxhash.xxh3_128()
        for start in range(0, body_bytes, PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES]
            last = start + PIECE_BYTES >= body_bytes
            _receive(sock, [piece, memoryview(announced)] if last else [piece], rank)
            hasher.update(piece)
        if not body_bytes:
            _receive(sock, [memoryview(announced)], rank)
        if self._mesh.is_cut:  # the kernel may have had all of it before the cut: the memory is somebody else's now
            raise TransferFailed("a transfer was given up: the round is over")
        return hasher.digest(), bytes(announced)


class _Outlet:
    """The writing side of one connection: after its first error nothing is sent any more."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.error: OSError | None = None

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        if self.error is not None:
            return
        views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        try:
            while views:
                num_sent = self._sock.sendmsg(views, (), socket.MSG_NOSIGNAL)
                views = _rest(views, num_sent)
        except OSError as error:
            self.error = error


def _refuse_the_rest(sock: socket.socket) -> None:
    """Nothing more is read: whoever is still sending gets an error."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
        # A sender that waits for room would wait on: room makes it send, and what comes now is answered with a reset.
        while sock.recv(PIECE_BYTES, socket.MSG_DONTWAIT):
            pass


def _receive_new(sock: socket.socket, num_bytes: int, rank: int) -> bytes:
    raw = bytearray(num_bytes)
    _receive(sock, [memoryview(raw)], rank)
    return bytes(raw)


def _receive(sock: socket.socket, views: list[memoryview], rank: int) -> None:
    while views := [view for view in views if len(view)]:
        num_bytes = sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if num_bytes == 0:
            raise TransferFailed(f"the connection of rank {rank} ended in the middle of a transfer")
        views = _rest(views, num_bytes)


def _rest(views: list[memoryview], num_done: int) -> list[memoryview]:
    """What of ``views`` comes after the first ``num_done`` bytes."""
    rest = []
    for view in views:
        if num_done < len(view):
            rest.append(view[num_done:])
        num_done = max(0, num_done - len(view))
    return rest


class _Threads:
    """Runs tasks all at once: the first on the calling thread, each other one on a thread that waits for its next."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Task, _Joint] | None] = queue.SimpleQueue()
        self._num_threads = 0

    def run(self, tasks: Sequence[Task], on_error: OnError) -> None:
        """Returns once all have ended; raises the first error, and tells ``on_error`` of it at once."""
        joint = _Joint(len(tasks), on_error)
        while self._num_threads < len(tasks) - 1:
            threading.Thread(target=self._work, name="p2pstate-bulk", daemon=True).start()
            self._num_threads += 1
        for task in tasks[1:]:
            self._queue.put((task, joint))
        if tasks:
            joint.run(tasks[0])
            joint.wait()

    def end(self) -> None:
        for _ in range(self._num_threads):
            self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            task, joint = item
            joint.run(task)
            del item, task, joint  # they hold memory of slots


class _Joint:
    """Waits for several tasks; keeps the first error."""

    def __init__(self, num_tasks: int, on_error: OnError) -> None:
        self._left = threading.Semaphore(0)
        self._num_tasks = num_tasks
        self._on_error = on_error
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def run(self, task: Task) -> None:
        try:
            task()
        except Exception as error:
            with self._lock:
                first, self._error = self._error is None, self._error or error.with_traceback(None)
            if first:  # without its frames, which hold memory of slots
                self._on_error(error)
        finally:
            self._left.release()

    def wait(self) -> None:
        for _ in range(self._num_tasks):
            self._left.acquire()  # every task ends by itself: at the latest when its connection has been silent
        if self._error is not None:
            raise self._error
