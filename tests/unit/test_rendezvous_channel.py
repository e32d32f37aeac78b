"""channel.py: frames and descriptors over a socket pair: order, limits, a peer that is slow, silent or gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from rendezvous import channel as channel_module
from rendezvous.channel import MAX_FRAME_BYTES, Channel, ChannelClosed

DEADLINE_S = 30.0  # only a hang takes this long


@contextlib.contextmanager
def connected(*, blocking: bool) -> Iterator[tuple[Channel, Channel]]:
    agent, theirs = Channel.pair()
    peer = Channel(theirs, blocking=blocking)
    with contextlib.closing(agent), contextlib.closing(peer):
        yield agent, peer


@pytest.fixture
def agent_and_worker() -> Iterator[tuple[Channel, Channel]]:
    """A non-blocking channel and a blocking one, connected."""
    with connected(blocking=True) as both:
        yield both


@pytest.fixture
def both_non_blocking() -> Iterator[tuple[Channel, Channel]]:
    with connected(blocking=False) as both:
        yield both


@pytest.fixture
def agent_and_socket() -> Iterator[tuple[Channel, socket.socket]]:
    agent, theirs = Channel.pair()
    theirs.settimeout(DEADLINE_S)
    yield agent, theirs
    agent.close()
    theirs.close()


def messages(channel: Channel) -> list[dict[str, Any]]:
    return [message for message, _ in channel.receive()]


def frame(body: bytes, num_fds: int = 0) -> bytes:
    return len(body).to_bytes(4, "little") + bytes([num_fds]) + body


MESSAGES: list[dict[str, Any]] = [
    {"t": "empty"},
    {"t": "numbers", "small": 1, "large": 1 << 60, "negative": -5, "real": 0.1, "none": None, "bool": True},
    {"t": "text", "text": "ünï", "bytes": bytes(range(256)), "list": [1, [2, "x"]], "dict": {3: {"y": b""}}},
    {"t": "large", "bytes": b"x" * 100_000},
]


def test_channel_messages_arrive_as_sent_and_in_order(agent_and_worker: tuple[Channel, Channel]) -> None:
    for sender, receiver in (agent_and_worker, agent_and_worker[::-1]):
        for message in MESSAGES:
            sender.send(message)
        received: list[dict[str, Any]] = []
        while len(received) < len(MESSAGES):
            received += messages(receiver)
        assert received == MESSAGES


def test_channel_non_blocking_without_messages_returns_nothing(agent_and_worker: tuple[Channel, Channel]) -> None:
    agent, _ = agent_and_worker
    assert agent.receive() == []


def test_channel_frame_that_arrives_in_pieces_is_one_message(agent_and_socket: tuple[Channel, socket.socket]) -> None:
    agent, peer = agent_and_socket
    data = frame(msgpack.packb({"t": "one"})) + frame(msgpack.packb({"t": "two"}))
    received: list[dict[str, Any]] = []
    for index in range(len(data)):
        peer.sendall(data[index : index + 1])
        received += messages(agent)
        assert len(received) == (index + 1 >= len(data)) + (index + 1 >= len(frame(msgpack.packb({"t": "one"}))))
    assert received == [{"t": "one"}, {"t": "two"}]


def test_channel_blocking_waits_for_a_whole_message(agent_and_worker: tuple[Channel, Channel]) -> None:
    agent, worker = agent_and_worker
    received: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: received.extend(messages(worker)))
    reader.start()
    agent.send({"t": "late"})
    reader.join(DEADLINE_S)
    assert received == [{"t": "late"}]


# -- descriptors


def same_file(fd: int, other: int) -> bool:
    left, right = os.fstat(fd), os.fstat(other)
    return (left.st_dev, left.st_ino) == (right.st_dev, right.st_ino)


@pytest.fixture
def files() -> Iterator[list[int]]:
    fds = [os.memfd_create(f"file {index}") for index in range(3)]
    yield fds
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("turn", [1, -1], ids=["non-blocking to blocking", "blocking to non-blocking"])
def test_channel_descriptors_arrive_with_their_message(
    agent_and_worker: tuple[Channel, Channel], files: list[int], turn: int
) -> None:
    sender, receiver = agent_and_worker[::turn]
    sender.send({"t": "none"})
    sender.send({"t": "two"}, (files[0], files[1]))
    sender.send({"t": "none again"})
    sender.send({"t": "one"}, (files[2],))
    received: list[tuple[dict[str, Any], list[int]]] = []
    while len(received) < 4:
        received += receiver.receive()
    assert [message["t"] for message, _ in received] == ["none", "two", "none again", "one"]
    fds = [fd for _, each in received for fd in each]
    assert [len(each) for _, each in received] == [0, 2, 0, 1]
    assert all(same_file(fd, file) and fd != file for fd, file in zip(fds, files, strict=True))
    for fd in fds:
        os.close(fd)


def test_channel_descriptors_that_were_received_are_closed_on_exec(
    agent_and_worker: tuple[Channel, Channel], files: list[int]
) -> None:
    agent, worker = agent_and_worker
    agent.send({"t": "slot"}, (files[0],))
    ((_, (fd,)),) = worker.receive()
    flags = fcntl.fcntl(fd, fcntl.F_GETFD)
    os.close(fd)
    assert flags & fcntl.FD_CLOEXEC, "every program that the worker starts would hold the vault's memory"


def test_channel_descriptors_of_a_message_that_waits_may_be_closed_by_the_sender(
    both_non_blocking: tuple[Channel, Channel], files: list[int]
) -> None:
    agent, peer = both_non_blocking
    fill(agent)
    copy = os.dup(files[1])
    agent.send({"t": "with a file"}, (copy,))
    os.close(copy)
    received = drain(agent, peer)
    ((fd,),) = [fds for message, fds in received if message["t"] == "with a file"]
    assert same_file(fd, files[1])
    os.close(fd)


def test_channel_descriptors_of_a_message_that_is_sent_in_pieces_arrive_once(
    both_non_blocking: tuple[Channel, Channel], files: list[int]
) -> None:
    agent, peer = both_non_blocking
    agent.send({"t": "large", "bytes": bytes(8 << 20)}, (files[0],))
    assert not agent.flush(), "it went out at once: nothing is tested"
    agent.send({"t": "next"}, (files[1],))
    received = drain(agent, peer)
    assert [message["t"] for message, _ in received] == ["large", "next"]
    assert [len(fds) for _, fds in received] == [1, 1]
    for (_, (fd,)), file in zip(received, files, strict=False):
        assert same_file(fd, file)
        os.close(fd)


def test_channel_closed_closes_the_descriptors_it_still_holds(files: list[int]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    agent, theirs = Channel.pair()
    worker = Channel(theirs, blocking=True)
    fill(agent)
    agent.send({"t": "waits"}, tuple(files))
    socket.send_fds(theirs, [b"\x05"], [files[0]])  # a frame that never becomes whole
    assert agent.receive() == []
    agent.close()
    agent.close()
    worker.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_channel_refuses_more_descriptors_than_a_frame_can_carry(
    agent_and_worker: tuple[Channel, Channel], files: list[int]
) -> None:
    agent, worker = agent_and_worker
    with pytest.raises(ValueError, match="17 descriptors"):
        agent.send({"t": "too many"}, (files[0],) * 17)
    agent.send({"t": "as many as may be"}, (files[0],) * 16)
    ((message, fds),) = worker.receive()
    assert message == {"t": "as many as may be"}
    assert len(fds) == 16
    for fd in fds:
        os.close(fd)


# -- a peer that does not read


def fill(channel: Channel) -> int:
    """Send until the socket takes no more and messages wait here; returns how many."""
    count = 0
    while channel.flush():
        channel.send({"t": "filler", "number": count, "bytes": bytes(1 << 16)})
        count += 1
    return count


def drain(sender: Channel, receiver: Channel) -> list[tuple[dict[str, Any], list[int]]]:
    received = []
    while not sender.flush():
        received += receiver.receive()
    return received + receiver.receive()


def test_channel_messages_that_wait_for_a_slow_peer_arrive_whole_and_in_order(
    both_non_blocking: tuple[Channel, Channel],
) -> None:
    agent, peer = both_non_blocking
    count = fill(agent)
    agent.send({"t": "filler", "number": count, "bytes": bytes(3 << 20)})
    received = [message for message, _ in drain(agent, peer)]
    assert [message["number"] for message in received] == list(range(count + 1))
    assert len(received[-1]["bytes"]) == 3 << 20


def test_channel_peer_that_reads_nothing_is_given_up_and_never_blocks_the_sender(
    agent_and_worker: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "MAX_QUEUED_BYTES", 1 << 20)
    agent, _ = agent_and_worker
    fill(agent)
    with pytest.raises(ChannelClosed, match="unread"):
        agent.send({"t": "filler", "bytes": bytes(1 << 20)})


# -- a peer that is gone, or none of ours


def test_channel_whose_peer_is_gone_gives_what_arrived_and_then_says_so(
    agent_and_worker: tuple[Channel, Channel],
) -> None:
    agent, worker = agent_and_worker
    worker.send({"t": "last words"})
    worker.close()
    assert messages(agent) == [{"t": "last words"}]
    with pytest.raises(ChannelClosed):
        agent.receive()
    with pytest.raises(ChannelClosed):
        agent.send({"t": "nobody hears this"})


def test_channel_blocking_whose_peer_is_gone_says_so(agent_and_worker: tuple[Channel, Channel]) -> None:
    agent, worker = agent_and_worker
    agent.close()
    with pytest.raises(ChannelClosed):
        worker.receive()
    with pytest.raises(ChannelClosed):
        worker.send({"t": "nobody hears this"})


def test_channel_that_was_closed_refuses_to_send(agent_and_worker: tuple[Channel, Channel]) -> None:
    agent, _ = agent_and_worker
    agent.close()
    with pytest.raises(ChannelClosed):
        agent.send({"t": "late"})
    assert agent.closed


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little") + b"\x00",
        frame(b"", num_fds=17),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["too long", "too many descriptors", "another protocol"],
)
def test_channel_peer_that_announces_an_impossible_frame_is_given_up(
    agent_and_socket: tuple[Channel, socket.socket], data: bytes
) -> None:
    agent, peer = agent_and_socket
    peer.sendall(data)
    with pytest.raises(ChannelClosed, match="not one of ours"):
        agent.receive()


@pytest.mark.parametrize(
    "data",
    [frame(b"\xc1"), frame(msgpack.packb([1, 2])), frame(msgpack.packb({"t": "fd"}), num_fds=1)],
    ids=["no MessagePack", "no dictionary", "a descriptor that did not come"],
)
def test_channel_peer_that_sends_a_frame_of_nonsense_is_given_up(
    agent_and_socket: tuple[Channel, socket.socket], data: bytes
) -> None:
    agent, peer = agent_and_socket
    peer.sendall(data)
    with pytest.raises(ChannelClosed, match="not one of ours"):
        agent.receive()


def test_channel_message_beyond_the_limit_is_refused_before_anything_is_sent(
    agent_and_worker: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 100)
    agent, worker = agent_and_worker
    with pytest.raises(ValueError, match=r"'big'.*limit is 100"):
        agent.send({"t": "big", "bytes": bytes(101)})
    agent.send({"t": "small"})
    assert messages(worker) == [{"t": "small"}]


# -- threads


def test_channel_sends_from_many_threads_are_never_mixed(agent_and_worker: tuple[Channel, Channel]) -> None:
    agent, worker = agent_and_worker
    num_threads, num_messages = 4, 50

    def send_all(sender: int) -> None:
        for number in range(num_messages):
            worker.send({"t": "m", "sender": sender, "number": number, "bytes": bytes([sender]) * (number * 300)})

    threads = [threading.Thread(target=send_all, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {index: [] for index in range(num_threads)}
    poll = select.poll()
    poll.register(agent.fileno())
    while sum(map(len, seen.values())) < num_threads * num_messages:
        assert poll.poll(DEADLINE_S * 1000)
        for message in messages(agent):
            assert set(message["bytes"]) <= {message["sender"]}
            seen[message["sender"]].append(message["number"])
    for thread in threads:
        thread.join(DEADLINE_S)
    assert all(numbers == list(range(num_messages)) for numbers in seen.values())
