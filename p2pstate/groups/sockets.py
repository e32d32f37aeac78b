"""Finding and cutting the connections of a gloo group. Linux only.

In: nothing but /proc/self/fd. Out: the sockets that a constructor opened, and a way to shut them down from any thread.
gloo's own ``abort``, ``shutdown`` and destructors do nothing for a blocked operation; shutting its *connected* sockets
down makes the operation raise within milliseconds. Its listening socket must be left alone: closing it terminates the
process.

Invariants: a descriptor is touched only while it still names the same socket; descriptors are not inherited by
children (close-on-exec, and closed after a fork); a constructor that was given up after a cut (see waiting.py) has no
share in what is opened once the next one has begun.
Known limit: a TCP socket that another thread of the program opens while a group is being connected counts as the
group's, and is shut down with it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import weakref
from types import TracebackType

from p2pstate.errors import Retryable

__all__ = ["Connections"]

_ALL: weakref.WeakSet[Connections] = weakref.WeakSet()
_all_lock = threading.Lock()  # not taken after a fork, where only one thread is left


class Connections:
    """``with Connections() as c: build()`` remembers the TCP sockets that ``build`` opened.

    Raises Retryable on entry when they were cut before they were made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: set[str] = set()
        self._mine: dict[int, str] = {}
        self._open = False
        self._cut = False
        with _all_lock:
            _ALL.add(self)

    def __enter__(self) -> Connections:
        with _all_lock:
            others = list(_ALL)
        for other in others:
            other._give_up()
        with self._lock:
            if self._cut:
                raise Retryable("connecting was not begun: the round is over")
            self._before = set(_sockets().values())
            self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            if self._open:
                self._collect()
            self._open = False
            if self._cut:
                self._shut_down()
        for fd, name in self._mine.items():
            if _name(fd) != name:
                continue
            try:
                fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.fcntl(fd, fcntl.F_GETFD) | fcntl.FD_CLOEXEC)
            except OSError:
                continue  # closed again already

    def cut(self) -> None:
        """Free every operation that waits on these connections. Safe from any thread, and while they are being made."""
        with self._lock:
            self._cut = True
            if self._open:
                self._collect()
            self._shut_down()

    def close_in_child(self) -> None:
        for fd, name in self._mine.items():
            if _name(fd) == name:
                os.close(fd)

    def __len__(self) -> int:
        return len(self._mine)

    def _give_up(self) -> None:
        """If these were cut and are still being made: what is opened from now on is somebody else's."""
        with self._lock:
            if self._open and self._cut:
                self._collect()
                self._shut_down()
                self._open = False

    def _collect(self) -> None:
        self._mine = {fd: name for fd, name in _sockets().items() if name not in self._before and _is_tcp(fd, name)}

    def _shut_down(self) -> None:
        for fd, name in self._mine.items():
            if _name(fd) != name:
                continue
            try:
                sock = socket.socket(fileno=os.dup(fd))
            except OSError:
                continue
            with sock:
                try:
                    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # not connected (any more)


def _name(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _sockets() -> dict[int, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        name = _name(int(entry))
        if name.startswith("socket:"):
            found[int(entry)] = name
    return found


def _is_tcp(fd: int, name: str) -> bool:
    try:
        sock = socket.socket(fileno=os.dup(fd))
    except OSError:
        return False
    with sock:
        return sock.family in (socket.AF_INET, socket.AF_INET6) and _name(fd) == name


def _after_fork_in_child() -> None:
    for connections in list(_ALL):
        connections.close_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
