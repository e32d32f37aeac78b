"""The real transport: ZeroMQ over TCP.

Flows in and out: see transport.py. Every node binds one ROUTER and receives only there; it opens one DEALER for each
peer and sends only there, under automatic routing ids. So a peer that is frozen with old connections can never block
its successor or shadow anybody's identity.
Invariants: all sockets belong to the thread that polls; queues, message size, handshake and linger are bounded; with a
key every connection is encrypted and only clients with the derived key are let in; without one, only loopback is bound
unless the caller insists. A ZeroMQ socket's descriptor speaks up only after somebody found the socket empty, so every
socket is looked at before it is watched, and always read until nothing is left.
A connection on which nothing is acknowledged for as long as a silent member counts as alive is given up and made anew:
the kernel would try it again less and less often, for a quarter of an hour, also after the network has healed.
Where somebody at a peer's address speaks another protocol, or has no key where this node has one, ZeroMQ gives up for
good and tells nobody: the connection is made anew for what is sent later, when an agent of this run may listen there.
A flood of connections can take every descriptor the process may have: what needs one then fails like a lost frame and
is tried again later, and connections that exist go on.
Limits: at most once, no acknowledgement; a frame may be lost when a connection breaks or a queue is full (counted).
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import time
from dataclasses import dataclass

import zmq
import zmq.utils.z85

from rendezvous.channel import NO_DESCRIPTOR
from rendezvous.config import Config, check_exposure, split_endpoint
from rendezvous.discovery import bind_address, own_address
from rendezvous.keys import derive_keys
from rendezvous.open_files import allow_open_files
from rendezvous.transport import Incoming
from rendezvous.types import RendezvousError, split_address
from rendezvous.wire import MAX_MESSAGE_BYTES

SEND_QUEUE = 2000
RECEIVE_QUEUE = 10000
HANDSHAKE_MS = 5000
CONNECT_MS = 2000
RECONNECT_MAX_MS = 1000
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, NUM_KEEPALIVES = 30, 10, 3
MAX_FRAMES_PER_POLL = 500
MAX_PEERS = 4096
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


@dataclass(slots=True)
class _Peer:
    """`given_up`: ZeroMQ does not try to connect again; `again_s`: when a new socket may."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    again_s: float
    connected: bool = False
    given_up: bool = False


@dataclass(slots=True)
class _Attempt:
    probe: socket.socket
    address: str
    until_s: float


@dataclass(slots=True)
class Counters:
    """Frames that went nowhere, by cause."""

    queue_full: int = 0
    no_descriptor: int = 0
    unauthorised: int = 0


def has_curve() -> bool:
    """Can this ZeroMQ encrypt? Its wheels can, some distributions' packages cannot."""
    return bool(zmq.has("curve"))


class ZmqTransport:
    """See transport.Transport. Raises RendezvousError if the address cannot be bound, ValueError if it must not be."""

    def __init__(self, config: Config) -> None:
        check_exposure(config)
        allow_open_files(config.max_size)
        self._unacknowledged_ms = int(config.failure_s * 1000)
        self.counters = Counters()
        self._keys = derive_keys(config.key, config.run_id) if config.key is not None else None
        self._peers: dict[str, _Peer] = {}
        self._monitors: dict[int, str] = {}  # by descriptor, as in what follows
        self._dials: dict[int, _Attempt] = {}
        self._dialed: list[tuple[str, bool]] = []
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * MAX_PEERS + 16)
        self._zap: zmq.Socket[bytes] | None = None
        self._refusals: zmq.Socket[bytes] | None = None  # tells of failed handshakes
        self._zap_fd = self._router_fd = self._refusals_fd = -1
        self._more_frames = False
        self._epoll = select.epoll()
        self._epoll.register(self._wake_read, select.EPOLLIN)
        self._closed = False
        try:
            self._router = self._bind(config)
            self._address = own_address(config.bind, config.advertise, self._bound_port(), config.contacts)
        except BaseException:
            self.close(0.0)
            raise

    @property
    def address(self) -> str:
        return self._address

    def _bind(self, config: Config) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.set(zmq.RCVHWM, RECEIVE_QUEUE)
        self._bound(router)
        if self._keys is not None:
            self._zap = self._context.socket(zmq.REP)
            self._zap.set(zmq.LINGER, 0)
            self._zap_fd = self._watch_socket(self._zap)
            self._zap.bind(_ZAP_ENDPOINT)
            router.set(zmq.ZAP_DOMAIN, b"p2pstate")
            router.set(zmq.CURVE_SERVER, 1)
            router.set(zmq.CURVE_SECRETKEY, self._keys.server_secret)
        self._router_fd = self._watch_socket(router)
        self._refusals = router.get_monitor_socket(_REFUSALS)
        self._refusals_fd = self._watch_socket(self._refusals)
        host, port = split_endpoint(config.bind, "bind", any_port=True)
        try:
            router.bind(f"tcp://{bind_address(host, port)}")
        except zmq.ZMQError as error:
            router.close(0)
            if error.errno == zmq.EADDRINUSE:
                raise RendezvousError(
                    f"{config.bind} is taken by another process: it cannot be listened at. Choose another port, or "
                    f"end that process (find it with `ss -ltnp 'sport = :{port}'`)"
                ) from error
            raise RendezvousError(
                f"this node cannot listen at {config.bind} ({error.strerror}): the address must be this host's"
            ) from error
        return router

    def _bound(self, socket: zmq.Socket[bytes]) -> None:
        """What holds for every connection: nothing is too long, and none that leads nowhere is kept."""
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.set(zmq.TCP_MAXRT, self._unacknowledged_ms)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        socket.set(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
        socket.set(zmq.TCP_KEEPALIVE_CNT, NUM_KEEPALIVES)
        socket.set(zmq.IPV6, 1)

    def _watch_socket(self, socket: zmq.Socket[bytes]) -> int:
        """Of a socket that has nothing to read yet. -> its descriptor."""
        socket.get(zmq.EVENTS)
        fd = int(socket.get(zmq.FD))
        self._epoll.register(fd, select.EPOLLIN)
        return fd

    def _bound_port(self) -> int:
        endpoint = self._router.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").decode().rpartition(":")[2])

    # -- sending ----------------------------------------------------------------------------------------------------

    def send(self, address: str, frame: bytes) -> bool:
        peer = self._peers.get(address)
        if peer is not None and peer.given_up and time.monotonic() >= peer.again_s:
            self.forget(address)
            peer = None
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                self.counters.queue_full += 1
                return False
            try:
                peer = self._connect(address)
            except zmq.ZMQError as error:
                if error.errno not in NO_DESCRIPTOR:
                    raise
                self.counters.no_descriptor += 1
                return False
        try:
            peer.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self.counters.queue_full += 1
            return False
        return True

    def _connect(self, address: str) -> _Peer:
        split_address(address)
        dealer = self._context.socket(zmq.DEALER)
        try:
            monitor = self._prepare(dealer)
        except BaseException:
            dealer.close(0)
            raise
        self._monitors[self._watch_socket(monitor)] = address
        dealer.connect(f"tcp://{address}")
        peer = _Peer(dealer, monitor, time.monotonic() + RECONNECT_MAX_MS / 1000)
        self._peers[address] = peer
        return peer

    def _prepare(self, dealer: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Set a dealer up. -> what tells of its connection."""
        dealer.set(zmq.SNDHWM, SEND_QUEUE)
        self._bound(dealer)
        dealer.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        dealer.set(zmq.RECONNECT_IVL, 50)
        dealer.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if self._keys is not None:
            dealer.set(zmq.CURVE_SERVERKEY, zmq.curve_public(self._keys.server_secret))
            dealer.set(zmq.CURVE_SECRETKEY, self._keys.client_secret)
            dealer.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(self._keys.client_secret))
        return dealer.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED | _REFUSALS
        )

    def forget(self, address: str) -> None:
        peer = self._peers.pop(address, None)
        if peer is not None:
            self._close_peer(peer, 0)

    def _close_peer(self, peer: _Peer, linger_ms: int) -> None:
        fd = int(peer.monitor.get(zmq.FD))
        self._epoll.unregister(fd)
        del self._monitors[fd]
        peer.socket.disable_monitor()
        peer.monitor.close(0)
        peer.socket.close(linger_ms)

    # -- connection checks ------------------------------------------------------------------------------------------

    def dial(self, address: str, timeout_s: float) -> None:
        host, port = split_address(address)
        try:
            probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR:
                raise
            self._dialed.append((address, False))
            return
        probe.setblocking(False)
        code = probe.connect_ex((host, port))
        if code == errno.EINPROGRESS:
            self._dials[probe.fileno()] = _Attempt(probe, address, time.monotonic() + timeout_s)
            self._epoll.register(probe, select.EPOLLOUT)
        else:
            probe.close()
            self._dialed.append((address, code == errno.ECONNREFUSED))

    def _end_dial(self, fd: int, refused: bool) -> None:
        attempt = self._dials.pop(fd)
        self._epoll.unregister(fd)
        attempt.probe.close()
        self._dialed.append((attempt.address, refused))

    # -- receiving --------------------------------------------------------------------------------------------------

    def watch(self, fd: int) -> None:
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if not self._closed:
            with contextlib.suppress(FileNotFoundError):
                self._epoll.unregister(fd)

    def wake(self) -> None:
        try:
            self._wake_write.send(b"w")
        except BlockingIOError:
            pass  # enough wake-ups wait already
        except OSError:
            assert self._closed, "only a closed transport has no wake-up line"

    def poll(self, timeout_s: float) -> Incoming:
        found = Incoming()
        ready = self._epoll.poll(0.0 if self._dialed or self._more_frames else max(0.0, timeout_s))
        for fd, _ in ready:
            if fd == self._router_fd:
                self._more_frames = True
            elif fd == self._zap_fd:
                self._authenticate()
            elif fd == self._refusals_fd:
                found.num_unauthorised += self._count_refusals()
            elif fd in self._monitors:
                self._read_monitor(self._monitors[fd], found.lost)
            else:
                self._read_descriptor(fd, found.readable)
        if self._more_frames:
            self._more_frames = self._receive(found.frames)
        if self._dials:
            now = time.monotonic()
            for fd in [fd for fd, attempt in self._dials.items() if attempt.until_s <= now]:
                self._end_dial(fd, refused=False)
        found.dialed, self._dialed = self._dialed, []
        return found

    def _receive(self, frames: list[bytes]) -> bool:
        """-> whether there may be more."""
        for _ in range(MAX_FRAMES_PER_POLL):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if len(parts) == 2:
                frames.append(parts[1])
        return True

    def _read_descriptor(self, fd: int, readable: list[int]) -> None:
        attempt = self._dials.get(fd)
        if attempt is not None:
            self._end_dial(fd, attempt.probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED)
        elif fd == self._wake_read.fileno():
            self._drain_wake()
        else:
            readable.append(fd)

    def _drain_wake(self) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            return

    def _read_monitor(self, address: str, lost: list[str]) -> None:
        peer = self._peers[address]
        while True:
            try:
                event_frame, _ = peer.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            (event,) = struct.unpack_from("=H", event_frame)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                peer.connected = True
            if event == zmq.EVENT_DISCONNECTED and peer.connected:
                peer.connected = False
                lost.append(address)
            # The end of a connection, or of the attempt, is final unless the next attempt is announced.
            peer.given_up = event == zmq.EVENT_DISCONNECTED or bool(event & _REFUSALS)

    def _count_refusals(self) -> int:
        """Failed handshakes since the last call."""
        assert self._refusals is not None
        num_refused = 0
        while True:
            try:
                self._refusals.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self.counters.unauthorised += num_refused
                return num_refused
            num_refused += 1

    def _authenticate(self) -> None:
        """Answer ZeroMQ's question (RFC 27) whether a client's key may connect."""
        assert self._zap is not None
        assert self._keys is not None
        allowed = zmq.utils.z85.decode(zmq.curve_public(self._keys.client_secret))
        while True:
            try:
                request = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            good = len(request) == 7 and request[0] == b"1.0" and request[5] == b"CURVE" and request[6] == allowed
            sequence = request[1] if len(request) > 1 else b""
            code, text = (b"200", b"OK") if good else (b"400", b"unknown key")
            self._zap.send_multipart([b"1.0", sequence, code, text, b"", b""])

    def close(self, linger_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers.values()):
            self._close_peer(peer, int(linger_s * 1000))
        self._peers.clear()
        for attempt in self._dials.values():
            attempt.probe.close()
        self._dials.clear()
        if self._zap is not None:
            self._zap.close(0)
        if hasattr(self, "_router"):
            self._router.disable_monitor()
            self._router.close(0)
        if self._refusals is not None:
            self._refusals.close(0)
        self._wake_read.close()
        self._wake_write.close()
        self._epoll.close()
        self._context.term()
