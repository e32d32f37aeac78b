"""The ZeroMQ transport on real sockets: exposure, keys, full queues, broken and refused connections."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.utils.z85

from namespaces import Namespaces, why_not
from rendezvous import zmq_transport
from rendezvous.config import Config
from rendezvous.keys import derive_keys
from rendezvous.transport import Incoming
from rendezvous.types import RendezvousError, split_address
from rendezvous.wire import MAX_MESSAGE_BYTES
from rendezvous.zmq_transport import ZmqTransport

KEY = b"0123456789abcdef"


@pytest.fixture
def opened() -> Iterator[Callable[..., ZmqTransport]]:
    with ExitStack() as stack:

        def open_one(bind: str = "127.0.0.1:0", **more: Any) -> ZmqTransport:
            transport = ZmqTransport(Config("run", "a", bind, **more))
            stack.callback(transport.close, 0.0)
            return transport

        yield open_one


def poll_until(transport: ZmqTransport, found: Callable[[Incoming], object], timeout_s: float = 10.0) -> Incoming:
    """Everything that came until `found` holds for it."""
    total = Incoming()
    until_s = time.monotonic() + timeout_s
    while not found(total):
        assert time.monotonic() < until_s, f"nothing of the kind in {timeout_s} s, only {total}"
        more = transport.poll(0.05)
        total.frames += more.frames
        total.lost += more.lost
        total.dialed += more.dialed
        total.readable += more.readable
        total.num_unauthorised += more.num_unauthorised
    return total


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "[::1]:0"])
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_frames_arrive_whole_and_in_order(opened: Callable[..., ZmqTransport], bind: str, key: bytes | None) -> None:
    try:
        one, other = opened(bind, key=key), opened(bind, key=key)
    except RendezvousError:
        if "::1" not in bind:
            raise
        pytest.skip("this host has no IPv6 loopback")
    frames = [b"%d" % index * 1000 for index in range(200)]
    for frame in frames:
        assert one.send(other.address, frame)
    assert poll_until(other, lambda found: len(found.frames) >= 200).frames == frames


def test_frames_beyond_what_one_poll_takes_come_with_the_next(
    opened: Callable[..., ZmqTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left over does not announce itself again."""
    monkeypatch.setattr(zmq_transport, "MAX_FRAMES_PER_POLL", 3)
    one, other = opened(), opened()
    one.send(other.address, b"connected")
    poll_until(other, lambda found: found.frames)
    frames = [b"%d" % index for index in range(20)]
    for frame in frames:
        one.send(other.address, frame)
    received = []
    until = time.monotonic() + 30.0
    while len(received) < len(frames) and time.monotonic() < until:
        new = other.poll(10.0).frames
        assert len(new) <= 3
        received += new
    assert received == frames
    other.close(0.0)
    other.unwatch(0)  # what is closed watches nothing


def test_address_tells_the_port_that_was_bound(opened: Callable[..., ZmqTransport]) -> None:
    host, _, port = opened().address.rpartition(":")
    assert host == "127.0.0.1"
    socket.create_connection((host, int(port)), 5).close()


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "10.1.2.3:0", "[::]:0", "some-host:0"])
def test_bind_beyond_loopback_without_key_is_refused(bind: str) -> None:
    with pytest.raises(ValueError, match="no key is set: whoever reaches it could join or end the run"):
        ZmqTransport(Config("run", "a", bind))


@pytest.mark.parametrize("more", [{"key": KEY}, {"insecure": True}])
def test_bind_beyond_loopback_is_allowed_with_key_or_on_request(
    opened: Callable[..., ZmqTransport], more: dict[str, Any]
) -> None:
    assert opened("0.0.0.0:0", contacts=("127.0.0.1:1",), **more).address.startswith("127.0.0.1:")


def test_taken_port_is_one_clear_error(opened: Callable[..., ZmqTransport]) -> None:
    taken = opened().address
    with pytest.raises(RendezvousError, match=f"{re.escape(taken)} is taken by another process"):
        opened(taken)


def test_address_of_another_host_is_one_clear_error(opened: Callable[..., ZmqTransport]) -> None:
    with pytest.raises(RendezvousError, match=r"cannot listen at 192\.0\.2\.1:0"):
        opened("192.0.2.1:0", key=KEY)


@pytest.mark.parametrize(
    ("other", "own"),
    [
        ({"key": b"another key of 16"}, KEY),
        ({"key": KEY, "run": "other"}, KEY),
        ({}, KEY),
        ({"key": KEY}, None),
    ],
)
def test_client_without_the_key_of_this_run_is_not_heard_but_noticed(
    opened: Callable[..., ZmqTransport], other: dict[str, Any], own: bytes | None
) -> None:
    server = opened(key=own)
    stranger = ZmqTransport(Config(other.get("run", "run"), "b", "127.0.0.1:0", key=other.get("key")))
    friend = opened(key=own)
    try:

        def knock(found: Incoming) -> bool:  # whoever ends the handshake first, the other one notices nothing
            stranger.send(server.address, b"let me in")
            stranger.poll(0.05)
            return bool(found.num_unauthorised)

        poll_until(server, knock)
        friend.send(server.address, b"hello")
        found = poll_until(server, lambda found: found.frames)
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            stranger.poll(0.01)
            found.frames += server.poll(0.05).frames
        assert found.frames == [b"hello"]
    finally:
        stranger.close(0.0)


def test_client_that_knows_only_the_public_server_key_is_turned_away(opened: Callable[..., ZmqTransport]) -> None:
    server = opened(key=KEY)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        client = context.socket(zmq.DEALER)
        client.set(zmq.LINGER, 0)
        public, secret = zmq.curve_keypair()
        client.set(zmq.CURVE_PUBLICKEY, public)
        client.set(zmq.CURVE_SECRETKEY, secret)
        client.set(zmq.CURVE_SERVERKEY, zmq.curve_public(derive_keys(KEY, "run").server_secret))
        client.connect(f"tcp://{server.address}")
        client.send(b"let me in")
        until_s = time.monotonic() + 10.0
        while server.counters.unauthorised == 0:
            assert time.monotonic() < until_s
            assert server.poll(0.05).frames == []
    finally:
        context.destroy(0)


def test_derived_keys_depend_on_secret_and_run_and_are_valid() -> None:
    keys = derive_keys(KEY, "run")
    assert keys == derive_keys(KEY, "run")
    others = [derive_keys(KEY, "run2"), derive_keys(KEY + b"x", "run")]
    secrets = {keys.server_secret, keys.client_secret}
    for other in others:
        secrets |= {other.server_secret, other.client_secret}
    assert len(secrets) == 6
    assert all(len(zmq.utils.z85.decode(secret)) == 32 and len(zmq.curve_public(secret)) == 40 for secret in secrets)


def test_full_queue_drops_and_counts_instead_of_blocking(
    opened: Callable[..., ZmqTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_transport, "SEND_QUEUE", 10)
    transport = opened()
    with socket.socket() as nobody_reads:
        nobody_reads.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody_reads.getsockname()[1]}"
        begun_s = time.monotonic()
        results = [transport.send(address, b"x") for _ in range(100)]
        assert time.monotonic() - begun_s < 5.0
    assert results.count(False) == transport.counters.queue_full > 0


def test_lost_connection_is_reported_and_a_check_finds_it_refused(opened: Callable[..., ZmqTransport]) -> None:
    here, there = opened(), opened()
    here.send(there.address, b"hello")
    poll_until(there, lambda found: found.frames)
    here.poll(0.1)
    address = there.address
    here.dial(address, 5.0)
    assert poll_until(here, lambda found: found.dialed).dialed == [(address, False)]
    there.close(0.0)
    assert poll_until(here, lambda found: found.lost).lost == [address]
    here.dial(address, 5.0)
    assert poll_until(here, lambda found: found.dialed).dialed == [(address, True)]


def test_check_without_an_answer_ends_at_its_deadline(opened: Callable[..., ZmqTransport]) -> None:
    transport = opened()
    with socket.socket() as listener, ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):  # fill the queue of connections that nobody accepts
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        transport.dial(f"127.0.0.1:{port}", 0.3)
        ((address, refused),) = poll_until(transport, lambda found: found.dialed).dialed
    assert (address, refused) == (f"127.0.0.1:{port}", False)


def test_too_long_frame_ends_the_connection_and_not_the_receiver(opened: Callable[..., ZmqTransport]) -> None:
    server, client, other = opened(), opened(), opened()
    client.send(server.address, b"x" * (MAX_MESSAGE_BYTES + 1))
    poll_until(client, lambda found: found.lost)
    other.send(server.address, b"still here")
    assert poll_until(server, lambda found: found.frames).frames == [b"still here"]


def test_agent_that_starts_where_something_else_listened_before_is_reached(
    opened: Callable[..., ZmqTransport],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupant:
        address = f"127.0.0.1:{occupant.getsockname()[1]}"
        sender = opened(key=KEY)
        sender.send(address, b"lost")
        stranger, _ = occupant.accept()
        with stranger, suppress(ConnectionResetError):
            stranger.sendall(bytes(200))
            stranger.recv(1)
    receiver = opened(address, key=KEY)

    def retry(found: Incoming) -> bool:
        sender.send(address, b"hello")
        sender.poll(0.02)
        return bool(found.frames)

    assert poll_until(receiver, retry).frames[-1] == b"hello"


def connected_sockets(address: str) -> list[socket.socket]:
    """Duplicates of this process's connections to and at an address."""
    _, port = split_address(address)
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            sock = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue  # no socket, or the listing's own descriptor
        with suppress(OSError, IndexError):  # not connected, or of another family
            if port in (sock.getpeername()[1], sock.getsockname()[1]):
                found.append(sock)
                continue
        sock.close()
    return found


def test_connection_on_which_nothing_is_acknowledged_is_given_up_in_time(opened: Callable[..., ZmqTransport]) -> None:
    sender, receiver = opened(failure_s=3.0), opened(failure_s=3.0)
    sender.send(receiver.address, b"hello")
    poll_until(receiver, lambda found: found.frames)
    sockets = connected_sockets(receiver.address)
    settings = {
        (
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        )
        for sock in sockets
    }
    for sock in sockets:
        sock.close()
    assert len(sockets) == 2
    assert settings == {(3000, 1)}


ONE_WAY = """
import sys, time
from rendezvous.config import Config
from rendezvous.zmq_transport import ZmqTransport
own, peer = sys.argv[1:]
transport = ZmqTransport(Config("run", "a", own, insecure=True, probe_interval_s=0.2, failure_s=1.0))
until_s = time.monotonic() + 60
while time.monotonic() < until_s:
    transport.send(peer, b"%.2f" % time.monotonic())
    found = transport.poll(0.1)
    lines = [f"heard {frame.decode()}" for frame in found.frames] + [f"lost {address}" for address in found.lost]
    print(*lines, sep="\\n", flush=True)
"""


@pytest.mark.slow
@pytest.mark.netns
def test_traffic_flows_again_at_once_when_a_path_heals_that_was_broken_for_long(tmp_path: Path) -> None:
    """The kernel alone tries a connection again after as long as it was broken already."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        network = Namespaces(2, tmp_path / "scratch")
        stack.callback(network.close)
        addresses = [f"{host}:7001" for host in network.addresses]
        logs = [tmp_path / f"{index}.log" for index in range(2)]
        for index, log in enumerate(logs):
            command = [sys.executable, "-c", ONE_WAY, addresses[index], addresses[1 - index]]
            process = subprocess.Popen([*network.prefix(index), *command], stdout=stack.enter_context(log.open("w")))
            stack.callback(process.wait, 10)
            stack.callback(process.kill)

        def wait_for(log: Path, text: str, beyond: int, timeout_s: float) -> float:
            began_s = time.monotonic()
            while text not in log.read_text()[beyond:]:
                assert time.monotonic() < began_s + timeout_s, log.read_text()[beyond:]
                time.sleep(0.02)
            return time.monotonic() - began_s

        for log in logs:
            wait_for(log, "heard", 0, 30.0)
        network.deafen(1, to=0)
        wait_for(logs[0], "lost", 0, 10.0)
        time.sleep(25.0)
        beyond = len(logs[1].read_text())
        network.undeafen(1, to=0)
        assert wait_for(logs[1], "heard", beyond, 30.0) < 5.0


def test_restarted_receiver_at_the_same_address_gets_what_is_sent_next(opened: Callable[..., ZmqTransport]) -> None:
    client, server = opened(), opened()
    client.send(server.address, b"one")
    poll_until(server, lambda found: found.frames)
    address = server.address
    server.close(0.0)
    poll_until(client, lambda found: found.lost)
    again = opened(address)
    client.send(address, b"two")
    assert poll_until(again, lambda found: found.frames).frames == [b"two"]


def test_forgotten_peer_leaves_nothing_behind(opened: Callable[..., ZmqTransport]) -> None:
    client, server = opened(), opened()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        client.send(server.address, b"x")
        client.forget(server.address)
        client.forget(server.address)
    until_s = time.monotonic() + 10.0
    while len(os.listdir("/proc/self/fd")) > before + 2:
        assert time.monotonic() < until_s, "descriptors of forgotten peers stay open"
        client.poll(0.01)
        server.poll(0.01)


def test_process_without_a_free_descriptor_loses_frames_and_goes_on(opened: Callable[..., ZmqTransport]) -> None:
    one, other, third = opened(key=KEY), opened(key=KEY), opened(key=KEY)
    one.send(other.address, b"connected")
    poll_until(other, lambda found: found.frames)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        assert not one.send(third.address, b"lost")
        one.dial(third.address, 1.0)
        assert poll_until(one, lambda found: found.dialed).dialed == [(third.address, False)]
        assert one.send(other.address, b"still")
        assert poll_until(other, lambda found: found.frames).frames == [b"still"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert one.counters.no_descriptor == 1
    assert one.send(third.address, b"again")
    assert poll_until(third, lambda found: found.frames).frames == [b"again"]


def test_watched_descriptor_is_reported_until_it_is_unwatched(opened: Callable[..., ZmqTransport]) -> None:
    transport = opened()
    read_end, write_end = os.pipe()
    try:
        transport.watch(read_end)
        assert transport.poll(0.0).readable == []
        os.write(write_end, b"x")
        assert transport.poll(5.0).readable == [read_end]
        transport.unwatch(read_end)
        assert transport.poll(0.05).readable == []
    finally:
        os.close(read_end)
        os.close(write_end)


def test_wake_ends_a_poll_and_leaves_no_echo(opened: Callable[..., ZmqTransport]) -> None:
    transport = opened()
    for _ in range(3):
        transport.wake()
    begun_s = time.monotonic()
    assert transport.poll(10.0) == Incoming()
    assert time.monotonic() - begun_s < 5.0
    begun_s = time.monotonic()
    transport.poll(0.2)
    assert time.monotonic() - begun_s >= 0.15


def test_closed_transport_frees_its_port_and_closes_twice(opened: Callable[..., ZmqTransport]) -> None:
    transport = opened()
    address = transport.address
    transport.close(0.1)
    transport.close(0.1)
    transport.wake()
    assert opened(address).address == address
