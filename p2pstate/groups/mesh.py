"""One authenticated TCP connection from this rank to every other rank of a round.

In: the round's store, this rank and its numeric address. Out: connected, blocking sockets by rank, and a way to shut
them down from any thread.

Every rank listens, publishes its address in the store, connects to all lower ranks and accepts all higher ones. Who
connects shows the round's secret, which rank 0 drew at random and only members can read in the store; who accepts
answers with its second half. Whoever does not know it is dropped, and holds up nobody.

Invariants: all connections exist and both ends have answered when :meth:`Mesh.connect` returns, none is made later (an
address that answers proves that its process lives); nothing is listened to after that; descriptors are not inherited by
children (close-on-exec, and closed after a fork); :meth:`Mesh.cut` also ends a :meth:`Mesh.connect` that is under way.
Known limit: what travels is neither encrypted nor signed, as with gloo and NCCL: the network is trusted, strangers on
it are not.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from contextlib import suppress

import msgpack
from torch._C._distributed_c10d import Store

from p2pstate.groups.transport import TransferFailed

__all__ = ["Mesh"]

_HALF_BYTES = 32  # of the secret, in hex
_HELLO = struct.Struct(f"<8s{_HALF_BYTES}sI")  # magic, first half of the secret, own rank
_MAGIC = b"p2pmesh1"
_SECRET_KEY = "secret"
_NUM_STRANGERS = 64  # connections that have not said who they are; beyond this many the oldest is dropped
_TIMEOUT = struct.Struct("@ll")  # struct timeval

_ALL: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Mesh:
    """``silence_s``: how long a connection may be silent within a transfer before it counts as broken."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._peers: dict[int, socket.socket] = {}
        self._cut = False
        _ALL.add(self)

    def __getitem__(self, rank: int) -> socket.socket:
        return self._peers[rank]

    def connect(self, store: Store, rank: int, size: int, host: str, timeout_s: float) -> None:
        """Connect to all other ranks, which do the same; all wait for the last one to come.

        Raises TransferFailed when a connection cannot be made in time or everything was cut; what the store raises.
        """
        deadline = time.monotonic() + timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = self._adopt(socket.socket(family, socket.SOCK_STREAM))
        try:
            listener.bind((host, 0))
            listener.listen(size + _NUM_STRANGERS)
            store.set(f"address/{rank}", msgpack.packb(listener.getsockname()[:2]))
            if rank == 0:
                store.set(_SECRET_KEY, secrets.token_hex(_HALF_BYTES))
            secret = bytes(store.get(_SECRET_KEY))
            hello, answer = secret[:_HALF_BYTES], secret[_HALF_BYTES:]
            for peer in range(rank):
                address = msgpack.unpackb(store.get(f"address/{peer}"))
                sock = self._adopt(socket.socket(family, socket.SOCK_STREAM))
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                sock.connect(tuple(address))
                sock.sendall(_HELLO.pack(_MAGIC, hello, rank))
                self._peers[peer] = sock
            self._accept(listener, hello, answer, set(range(rank + 1, size)), deadline)
            for peer in range(rank):
                self._hear(peer, answer, deadline)
        except OSError as error:
            raise TransferFailed(f"connecting for bulk transfers failed on rank {rank}: {error}") from None
        finally:
            self._drop(listener)
        for sock in self._peers.values():
            sock.settimeout(None)  # in one system call a blocking socket moves any number of bytes, without the GIL
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, _TIMEOUT.pack(int(self._silence_s), 0))

    def cut(self) -> None:
        """Free whoever waits on these connections, or for them."""
        with self._lock:
            self._cut = True
            for sock in self._sockets:
                with suppress(OSError):  # not connected (yet, or any more)
                    sock.shutdown(socket.SHUT_RDWR)

    @property
    def is_cut(self) -> bool:
        return self._cut

    def close(self) -> None:
        """Only when nobody uses a connection any more."""
        with self._lock:
            self._cut = True
            for sock in self._sockets:
                sock.close()
            self._sockets.clear()
            self._peers.clear()

    def close_in_child(self) -> None:
        for sock in self._sockets:
            sock.close()

    def _adopt(self, sock: socket.socket) -> socket.socket:
        with self._lock:
            if self._cut:
                sock.close()
                raise TransferFailed("connecting was given up: the round is over")
            self._sockets.add(sock)
        return sock

    def _drop(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(sock)
            sock.close()

    def _accept(self, listener: socket.socket, hello: bytes, answer: bytes, missing: set[int], deadline: float) -> None:
        """Let the ranks in ``missing`` in. A connection says who it is, or it is dropped at the end."""
        listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            strangers = _Strangers(selector)
            try:
                while missing:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        raise TransferFailed(f"ranks {sorted(missing)} did not connect in time")
                    for key, _ in selector.select(left_s):
                        if key.fileobj is listener:
                            self._admit(listener, strangers, len(missing) + _NUM_STRANGERS)
                            continue
                        said = strangers.hear(key.fileobj)
                        if said is None:
                            continue
                        sock, peer = key.fileobj, _who(said, hello)
                        assert isinstance(sock, socket.socket)
                        strangers.forget(sock)
                        if peer in missing:
                            missing.discard(peer)
                            sock.sendall(answer)
                            self._peers[peer] = sock
                        else:
                            self._drop(sock)
            finally:
                for sock in strangers.said:
                    self._drop(sock)

    def _admit(self, listener: socket.socket, strangers: _Strangers, max_strangers: int) -> None:
        try:
            new, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # gone again
        new.setblocking(False)
        strangers.add(self._adopt(new))
        if len(strangers.said) > max_strangers:
            oldest = next(iter(strangers.said))
            strangers.forget(oldest)
            self._drop(oldest)

    def _hear(self, peer: int, answer: bytes, deadline: float) -> None:
        sock, heard = self._peers[peer], b""
        while len(heard) < len(answer):
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            more = sock.recv(len(answer) - len(heard))
            if not more:
                raise TransferFailed(f"rank {peer} refused the connection for bulk transfers")
            heard += more
        if not hmac.compare_digest(heard, answer):
            raise TransferFailed(f"what answers at the address of rank {peer} does not belong to this round")


class _Strangers:
    """Connections that have not said yet who they are."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.said: dict[socket.socket, bytes] = {}  # in the order in which they came

    def add(self, sock: socket.socket) -> None:
        self.said[sock] = b""
        self._selector.register(sock, selectors.EVENT_READ)

    def forget(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self.said[sock]

    def hear(self, sock: object) -> bytes | None:
        """All that it says before it is let in, or less if it has hung up. None: more is to come, or it was dropped."""
        if not isinstance(sock, socket.socket) or sock not in self.said:
            return None
        num_missing = _HELLO.size - len(self.said[sock])
        try:
            more = sock.recv(num_missing)
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        self.said[sock] += more
        return self.said[sock] if not more or len(more) == num_missing else None


def _who(said: bytes, hello: bytes) -> int:
    """The rank that a connection claims to be; -1 when it does not know the secret."""
    if len(said) != _HELLO.size:
        return -1
    magic, shown, rank = _HELLO.unpack(said)
    return int(rank) if hmac.compare_digest(magic + shown, _MAGIC + hello) else -1


def _after_fork_in_child() -> None:
    for mesh in list(_ALL):
        mesh.close_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
