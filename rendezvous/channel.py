"""Framed messages, with file descriptors, over one Unix stream socket.

In: MessagePack-able dictionaries (key ``"t"`` names the kind) and, beside them, file descriptors. Out: the same at the
other end, in order. Used between an agent and the processes of its node: always two processes of one user on one host,
connected by a socket pair or a Unix socket that checks the user. A frame is ``length (4 bytes) | number of descriptors
(1) | MessagePack``.

Invariants: messages are never reordered or torn; descriptors arrive with the message that carries them; a peer that
does not read cannot block a non-blocking channel (its messages queue up to ``MAX_QUEUED_BYTES``, then
:class:`ChannelClosed`). Limits: a frame is at most ``MAX_FRAME_BYTES``.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
import threading
from collections import deque
from typing import Any

import msgpack

__all__ = ["MAX_FRAME_BYTES", "NO_DESCRIPTOR", "Channel", "ChannelClosed", "Message", "is_of_this_user"]

Message = dict[str, Any]

MAX_FRAME_BYTES = 64 << 20
MAX_QUEUED_BYTES = 16 << 20
MAX_FDS = 16
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)  # a process, or the host, has as many open files as it may have
RECEIVE_BYTES = 1 << 16
_HEAD = struct.Struct("<IB")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * 4)


def is_of_this_user(sock: socket.socket) -> bool:
    """Whether a process of this user is at the other end of a Unix socket: abstract names are open to everybody."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())


class ChannelClosed(Exception):
    """The other end is gone (its process ended), or does not read any more."""


class Channel:
    """One end of a framed Unix socket. Sending is safe from any thread, receiving from one."""

    def __init__(self, sock: socket.socket, *, blocking: bool) -> None:
        sock.setblocking(blocking)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._sock = sock
        self._blocking = blocking
        self._send_lock = threading.Lock()
        self._packer = msgpack.Packer(use_bin_type=True)
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self._queued_bytes = 0
        self._incoming = bytearray()
        self._fds: deque[int] = deque()
        self.closed = False

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """A non-blocking channel for this process, and the plain socket to hand to the other one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(ours, blocking=False), theirs

    def set_blocking(self) -> None:
        """From now on `receive` waits for a message, and `send` for room."""
        self._sock.setblocking(True)
        self._blocking = True

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send one message; descriptors are duplicated by the kernel, the caller keeps its own.

        Raises ChannelClosed when the peer is gone, or has more than ``MAX_QUEUED_BYTES`` waiting.
        """
        if len(fds) > MAX_FDS:
            raise ValueError(f"message {message.get('t')!r} has {len(fds)} descriptors, the limit is {MAX_FDS}")
        with self._send_lock:
            data = self._frame(message, len(fds))
            if self.closed:
                raise ChannelClosed("the channel was closed")
            num_sent = 0
            if not self._outgoing and not fds:
                num_sent = self._send_some(data, [])
                if num_sent == len(data):
                    return
            frame = memoryview(data)[num_sent:]
            if self._blocking:
                self._send_all(frame, list(fds))
                return
            # Queued descriptors are duplicates of our own, so the caller may close his at once.
            self._outgoing.append((frame, [os.dup(fd) for fd in fds]))
            self._queued_bytes += len(frame)
            self._flush()
            if self._queued_bytes > MAX_QUEUED_BYTES:
                raise ChannelClosed(f"the peer has left {self._queued_bytes} bytes unread")

    def _frame(self, message: Message, num_fds: int) -> bytes:
        body: bytes = self._packer.pack(message)
        if len(body) > RECEIVE_BYTES:
            self._packer = msgpack.Packer(use_bin_type=True)  # or it keeps that much memory
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"message {message.get('t')!r} has {len(body)} bytes, the limit is {MAX_FRAME_BYTES}")
        return _HEAD.pack(len(body), num_fds) + body

    def flush(self) -> bool:
        """Go on sending what a full socket buffer held back. True when nothing is left."""
        with self._send_lock:
            if not self.closed:
                self._flush()
            return not self._outgoing

    def receive(self) -> list[tuple[Message, list[int]]]:
        """Every whole message that has arrived. A blocking channel waits for at least one.

        Raises ChannelClosed at end of file, and when the peer sends something else than frames.
        """
        out: list[tuple[Message, list[int]]] = []
        while True:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return out
            except OSError as error:
                raise ChannelClosed(f"the peer is gone: {error}") from error
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(payload[: len(payload) - len(payload) % 4])
                    self._fds.extend(numbers)
            if not data:
                if out:
                    return out
                raise ChannelClosed("the peer closed the channel")
            out += self._whole_frames(data)
            if self._blocking:
                if out:
                    return out
            elif len(data) < RECEIVE_BYTES and not ancillary:
                return out  # there was no more

    @property
    def is_behind(self) -> bool:
        """Does something wait for `flush`?"""
        return bool(self._outgoing)

    def shutdown(self) -> None:
        """End the connection in both directions: a blocked `receive`, here and there, raises ChannelClosed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._send_lock:
            if self.closed:
                return
            self.closed = True
            for _, fds in self._outgoing:
                for fd in fds:
                    os.close(fd)
            self._outgoing.clear()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._sock.close()

    def _whole_frames(self, data: bytes | bytearray) -> list[tuple[Message, list[int]]]:
        """What is complete with `data`; the rest is kept."""
        if self._incoming:
            self._incoming += data
            data = self._incoming
        out = []
        start = 0
        while len(data) - start >= _HEAD.size:
            length, num_fds = _HEAD.unpack_from(data, start)
            if length > MAX_FRAME_BYTES or num_fds > MAX_FDS:
                raise ChannelClosed(f"the peer announced a frame of {length} bytes: not one of ours")
            body = start + _HEAD.size
            end = body + length
            if len(data) < end:
                break
            try:
                message = msgpack.unpackb(data[body:end], raw=False, strict_map_key=False)
            except ValueError as error:
                raise ChannelClosed(f"the peer sent a frame that is not one of ours: {error}") from error
            if not isinstance(message, dict) or len(self._fds) < num_fds:
                raise ChannelClosed("the peer sent a frame that is not one of ours")
            out.append((message, [self._fds.popleft() for _ in range(num_fds)] if num_fds else []))
            start = end
        if data is self._incoming:
            del self._incoming[:start]
        elif start < len(data):
            self._incoming += data[start:]
        return out

    def _send_all(self, frame: memoryview, fds: list[int]) -> None:
        try:
            while len(frame):
                sent = socket.send_fds(self._sock, [frame], fds) if fds else self._sock.send(frame)
                fds = []
                frame = frame[sent:]
        except OSError as error:
            raise ChannelClosed(f"the peer is gone: {error}") from error

    def _send_some(self, frame: bytes | memoryview, fds: list[int]) -> int:
        """Bytes that the socket took; 0 if it is full."""
        try:
            return socket.send_fds(self._sock, [frame], fds) if fds else self._sock.send(frame)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelClosed(f"the peer is gone: {error}") from error

    def _flush(self) -> None:
        while self._outgoing:
            frame, fds = self._outgoing[0]
            sent = self._send_some(frame, fds)
            if sent == 0:
                return
            for fd in fds:
                os.close(fd)
            self._queued_bytes -= sent
            if sent == len(frame):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (frame[sent:], [])
