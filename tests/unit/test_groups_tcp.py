"""Bulk transfers over TCP: what arrives, and what frees an exchange that is blocked."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import xxhash
from groups_in_processes import start_ranks
from torch.distributed import FileStore, HashStore, PrefixStore

from p2pstate.groups.mesh import Mesh
from p2pstate.groups.tcp import PIECE_BYTES, TcpTransport
from p2pstate.groups.transport import Incoming, Outgoing, Payload, TransferFailed

HOST = "127.0.0.1"
SILENCE_S = 600.0  # nothing here ends by waiting that long
CONNECT_S = 60.0
FREE_S = 30.0  # an exchange that is freed is back at once, also on a busy machine; one that is not hangs
LARGE = 64 << 20  # more than the kernel takes in when nobody reads
SIZES = [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 17]


def pattern(size: int, seed: int) -> bytes:
    return bytes((seed + i * 31) % 251 for i in range(251)) * (size // 251 + 1)


def body_of(size: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray(pattern(size, seed)[:size]))


def at_once(*functions: Callable[[], Any]) -> list[BaseException | Any]:
    """What each returned or raised, each on a thread of its own."""
    outcomes: list[Any] = [TimeoutError("still blocked")] * len(functions)

    def run(number: int) -> None:
        try:
            outcomes[number] = functions[number]()
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + FREE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return outcomes


def connected(size: int) -> list[TcpTransport]:
    store = HashStore()
    meshes = [Mesh(SILENCE_S) for _ in range(size)]
    outcomes = at_once(*[lambda r=r: meshes[r].connect(store, r, size, HOST, CONNECT_S) for r in range(size)])
    assert outcomes == [None] * size
    return [TcpTransport(1, mesh, SILENCE_S) for mesh in meshes]


@pytest.fixture
def pair() -> Iterator[list[TcpTransport]]:
    transports = connected(2)
    yield transports
    for transport in transports:
        assert transport.release().wait(FREE_S)


class Expected:
    """A message to expect into new memory."""

    def __init__(self, sender: int) -> None:
        self.head, self.body, self.digests = b"", memoryview(b""), (b"", b"")
        self.message = Incoming(sender, self._accept, self._arrived)

    def _accept(self, head: bytes, num_bytes: int) -> memoryview:
        self.head, self.body = head, memoryview(bytearray(num_bytes))
        return self.body

    def _arrived(self, computed: bytes, announced: bytes) -> None:
        self.digests = computed, announced


def test_messages_of_every_size_arrive_in_order_from_and_to_every_rank() -> None:
    size = 3
    transports = connected(size)
    expected = {r: [Expected(s) for s in range(size) if s != r for _ in SIZES] for r in range(size)}
    told: dict[int, list[bytes]] = {r: [] for r in range(size)}

    def run(r: int) -> None:
        payloads = [Payload(body_of(n, r), on_digest=told[r].append) for n in SIZES]
        sends = [
            Outgoing(to, f"{r} to {to}".encode(), payload) for to in range(size) if to != r for payload in payloads
        ]
        transports[r].exchange(sends, [each.message for each in expected[r]])

    try:
        assert at_once(*[lambda r=r: run(r) for r in range(size)]) == [None] * size
    finally:
        assert all(transport.release().wait(FREE_S) for transport in transports)
    for r in range(size):
        assert len(told[r]) == len(SIZES), "hashed once, though sent to two ranks"
        for number, each in enumerate(expected[r]):
            sender, num_bytes = each.message.sender, SIZES[number % len(SIZES)]
            assert each.head == f"{sender} to {r}".encode()
            assert each.body == body_of(num_bytes, sender)
            assert each.digests == (xxhash.xxh3_128_digest(each.body),) * 2


def swap_large(transport: TcpTransport, rank: int) -> None:
    transport.exchange([Outgoing(1 - rank, b"", Payload(body_of(LARGE)))], [Expected(1 - rank).message])


def test_cut_frees_an_exchange_that_is_blocked_in_both_directions(pair: list[TcpTransport]) -> None:
    begun = threading.Event()

    def cut() -> None:
        begun.wait(FREE_S)
        time.sleep(0.2)
        pair[0].cut()

    def blocked() -> None:
        begun.set()
        swap_large(pair[0], 0)  # the other side neither reads nor writes

    assert isinstance(at_once(blocked, cut)[0], TransferFailed)
    with pytest.raises(TransferFailed):
        swap_large(pair[0], 0)
    with pytest.raises(TransferFailed):
        swap_large(pair[1], 1)


def test_release_in_the_middle_of_an_exchange_frees_it_and_closes_every_socket(pair: list[TcpTransport]) -> None:
    begun = threading.Event()

    def release() -> bool:
        begun.wait(FREE_S)
        time.sleep(0.1)
        return pair[0].release().wait(FREE_S)

    def blocked() -> None:
        begun.set()
        swap_large(pair[0], 0)

    error, gone = at_once(blocked, release)
    assert isinstance(error, TransferFailed)
    assert gone is True


@pytest.mark.parametrize("after_s", [0.0, 0.3])
def test_message_that_is_refused_frees_its_sender(pair: list[TcpTransport], after_s: float) -> None:
    def refuse(head: bytes, num_bytes: int) -> memoryview:
        time.sleep(after_s)  # by then what fits into the kernel's buffers has come, and the sender is blocked
        raise ValueError("not what was expected")

    refusing = Incoming(0, refuse, lambda *digests: None)
    sent, received = at_once(
        lambda: pair[0].exchange([Outgoing(1, b"", Payload(body_of(LARGE)))], []),
        lambda: pair[1].exchange([], [refusing]),
    )
    assert isinstance(sent, TransferFailed)
    assert str(received) == "not what was expected"


def test_lost_transfer_is_told_while_another_one_of_the_same_exchange_still_moves() -> None:
    transports = connected(3)
    told: list[Exception] = []
    heard, ended, moving = threading.Event(), threading.Event(), []

    def on_error(error: Exception) -> None:
        told.append(error)
        heard.set()

    def send() -> None:
        body = Payload(body_of(LARGE))  # rank 1 does not read it, rank 2 is gone
        try:
            transports[0].exchange([Outgoing(1, b"", body), Outgoing(2, b"", body)], [], on_error)
        finally:
            ended.set()

    def watch() -> bool:
        was_told = heard.wait(FREE_S)
        moving.append(not ended.is_set())
        transports[0].release()
        return was_told

    transports[2].cut()
    error, was_told = at_once(send, watch)
    assert was_told
    assert moving == [True], "nothing moved any more when the error was told"
    assert isinstance(error, TransferFailed)
    assert told == [error]
    assert all(transport.release().wait(FREE_S) for transport in transports)


@pytest.mark.parametrize("sent", [b"", b"p2p", b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 2])
def test_stream_that_is_cut_short_or_no_message_is_an_error(pair: list[TcpTransport], sent: bytes) -> None:
    def send() -> None:
        sock = pair[0]._mesh[1]
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)

    _, received = at_once(send, lambda: pair[1].exchange([], [Expected(0).message]))
    assert isinstance(received, TransferFailed)


def test_body_that_is_cut_short_is_an_error(pair: list[TcpTransport]) -> None:
    arrived: list[Any] = []
    into = Expected(0)
    watched = Incoming(0, into.message.accept, lambda *digests: arrived.append(digests))

    def send() -> None:
        sock = pair[0]._mesh[1]
        sock.sendall(b"p2pbulk1" + (4).to_bytes(8, "little") + (100).to_bytes(8, "little") + b"head" + b"x" * 99)
        sock.shutdown(socket.SHUT_WR)

    _, received = at_once(send, lambda: pair[1].exchange([], [watched]))
    assert isinstance(received, TransferFailed)
    assert into.head == b"head"
    assert arrived == []


def test_byte_changed_on_the_way_shows_in_the_digests(pair: list[TcpTransport]) -> None:
    """The sender's digest is of what it has, the receiver's of what came."""
    into, body = Expected(0), body_of(PIECE_BYTES)
    right = xxhash.xxh3_128_digest(body)
    body[1234] ^= 1
    send = Outgoing(1, b"", Payload(body, right))
    assert at_once(lambda: pair[0].exchange([send], []), lambda: pair[1].exchange([], [into.message])) == [None, None]
    computed, announced = into.digests
    assert announced == right
    assert computed == xxhash.xxh3_128_digest(body)


# -- strangers


def address_of(store: HashStore, rank: int) -> tuple[str, int]:
    host, port = msgpack.unpackb(store.get(f"address/{rank}"))
    return host, port


@pytest.mark.parametrize(
    "said", [b"", b"p2pmesh1" + b"0" * 32 + (1).to_bytes(4, "little"), b"x" * 200], ids=["nothing", "wrong", "noise"]
)
def test_stranger_is_dropped_and_holds_up_nobody(said: bytes) -> None:
    store, meshes = HashStore(), [Mesh(SILENCE_S), Mesh(SILENCE_S)]
    stranger = socket.socket()

    def rank_1() -> None:
        stranger.settimeout(FREE_S)
        stranger.connect(address_of(store, 0))
        stranger.sendall(said)
        time.sleep(0.2)
        meshes[1].connect(store, 1, 2, HOST, CONNECT_S)

    try:
        outcomes = at_once(lambda: meshes[0].connect(store, 0, 2, HOST, CONNECT_S), rank_1)
        assert outcomes == [None, None]
        with suppress(ConnectionResetError):  # dropped with something of it unread
            assert stranger.recv(64) == b"", "a stranger was answered"
    finally:
        stranger.close()
        for mesh in meshes:
            mesh.close()


def test_stranger_who_answers_at_a_ranks_address_is_refused() -> None:
    store, mesh = HashStore(), Mesh(SILENCE_S)
    with socket.create_server((HOST, 0)) as impostor:
        store.set("address/0", msgpack.packb(impostor.getsockname()[:2]))
        store.set("secret", "1" * 32 + "2" * 32)

        def answer() -> None:
            sock, _ = impostor.accept()
            with sock:
                sock.sendall(b"3" * 32)
                sock.recv(100)

        _, outcome = at_once(answer, lambda: mesh.connect(store, 1, 2, HOST, CONNECT_S))
    mesh.close()
    assert isinstance(outcome, TransferFailed)
    assert "does not belong to this round" in str(outcome)


def test_cut_ends_a_connect_that_waits_for_a_rank_that_never_comes() -> None:
    store, mesh = HashStore(), Mesh(SILENCE_S)

    def cut() -> None:
        store.get("address/0")
        time.sleep(0.1)
        mesh.cut()

    outcome, _ = at_once(lambda: mesh.connect(store, 0, 2, HOST, CONNECT_S), cut)
    mesh.close()
    assert isinstance(outcome, TransferFailed)


# -- nothing is left


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_thirty_rounds_leave_no_descriptor_and_no_thread() -> None:
    def one_round(_number: int) -> None:
        transports = connected(2)
        outcomes = at_once(*[lambda r=r: one_swap(transports[r], r) for r in range(2)])
        assert outcomes == [None, None]
        assert all(transport.release().wait(FREE_S) for transport in transports)

    one_round(0)
    before, threads = open_descriptors(), set(threading.enumerate())
    for number in range(30):
        one_round(number)
    assert open_descriptors() == before
    deadline = time.monotonic() + FREE_S
    while left := set(threading.enumerate()) - threads:
        assert time.monotonic() < deadline, f"threads are left: {left}"
        time.sleep(0.01)


def one_swap(transport: TcpTransport, rank: int) -> None:
    transport.exchange([Outgoing(1 - rank, b"", Payload(body_of(1000)))], [Expected(1 - rank).message])


def open_sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # what the listing was read through
    return {link for link in found if link.startswith("socket:")}


def test_forked_child_holds_no_connection(pair: list[TcpTransport]) -> None:
    """A loader's worker that outlives its parent must not keep the parent's peers waiting."""
    ours = {f"socket:[{os.fstat(pair[0]._mesh[1].fileno()).st_ino}]"}
    assert ours <= open_sockets()
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(sending, b"kept" if ours & open_sockets() else b"closed")
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(receiving, 16)
    os.close(receiving)
    os.close(sending)
    assert told == b"closed"
    assert at_once(*[lambda r=r: one_swap(pair[r], r) for r in range(2)]) == [None, None], "the parent's were closed"


# -- processes


def die_in_a_message(line: Any, rank: int, num_ranks: int, folder: str) -> str:
    mesh = Mesh(SILENCE_S)
    mesh.connect(PrefixStore("mesh", FileStore(f"{folder}/store", num_ranks)), rank, num_ranks, HOST, CONNECT_S)
    transport = TcpTransport(1, mesh, SILENCE_S)
    if rank == 0:  # half of it goes out, then nobody reads; and nothing is read here
        line.send("connected")
        transport.exchange([Outgoing(1, b"", Payload(body_of(LARGE)))], [])
        time.sleep(SILENCE_S)

    def accept(head: bytes, num_bytes: int) -> memoryview:
        line.send("begun")
        line.recv()
        return memoryview(bytearray(num_bytes))

    try:
        transport.exchange([Outgoing(0, b"", Payload(body_of(LARGE)))], [Incoming(0, accept, lambda *digests: None)])
    except TransferFailed as error:
        return str(error)
    return "it went on"


def test_peer_killed_in_the_middle_of_a_message_frees_the_other_at_once(tmp_path: Path) -> None:
    children = start_ranks(die_in_a_message, tmp_path, 2)
    try:
        assert children[0].hear() == "connected"
        assert children[1].hear() == "begun"
        os.kill(children[0].pid, signal.SIGKILL)
        children[1].say("go on")
        assert "rank 0" in children[1].result()
    finally:
        for child in children:
            child.end()
