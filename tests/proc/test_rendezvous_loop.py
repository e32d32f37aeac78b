"""The loop around the core, over a transport in memory: callbacks, timers, descriptors, and what bad input does."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from rendezvous.config import Config
from rendezvous.messages import AppMessage, Join
from rendezvous.node import Node
from rendezvous.transport import Incoming
from rendezvous.types import Member, MemberChange, MemberKey, RendezvousError, StoreReply, Verdict, View
from rendezvous.wire import Envelope, decode, encode
from rendezvous.zmq_transport import ZmqTransport


class Memory:
    """A transport without a network: what is sent lands in `sent`, what is to come is put into `coming`."""

    def __init__(self) -> None:
        self.address = "127.0.0.1:7001"
        self.sent: list[tuple[str, bytes]] = []
        self.coming: deque[Incoming] = deque()
        self.woken = threading.Event()
        self.watched: set[int] = set()
        self.closed = 0

    def send(self, address: str, frame: bytes) -> bool:
        self.sent.append((address, frame))
        return not address.endswith(":9")

    def dial(self, address: str, timeout_s: float) -> None:
        del address, timeout_s

    def forget(self, address: str) -> None:
        del address

    def watch(self, fd: int) -> None:
        self.watched.add(fd)

    def unwatch(self, fd: int) -> None:
        self.watched.remove(fd)

    def wake(self) -> None:
        self.woken.set()

    def poll(self, timeout_s: float) -> Incoming:
        if self.coming:
            return self.coming.popleft()
        self.woken.wait(timeout_s)
        self.woken.clear()
        return Incoming(readable=sorted(self.watched))

    def close(self, linger_s: float) -> None:
        assert linger_s <= 1.0
        self.closed += 1


class Recorder:
    """An application that writes down what it is told and may react."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.react: Callable[[str, Any], None] = lambda kind, value: None

    def note(self, kind: str, value: Any) -> None:
        self.events.append((kind, value))
        self.react(kind, value)

    def ballot(self) -> dict[str, Any]:
        return {}

    def decide(
        self, previous: View | None, places: Sequence[Member], ballots: Mapping[MemberKey, dict[str, Any]]
    ) -> tuple[bool, dict[str, Any]]:
        del previous, places
        return False, {"ballots": len(ballots)}

    def on_view(self, view: View) -> None:
        self.note("view", view.epoch)
        self.note("view done", view.epoch)

    def on_waiting(self, reason: str) -> None:
        self.note("waiting", reason)

    def on_member(self, change: MemberChange) -> None:
        self.note("member", (change.kind.value, change.member.name))

    def on_message(self, sender: MemberKey, kind: str, body: Any) -> None:
        self.note("message", (sender.name, kind, body))

    def on_verdict(self, verdict: Verdict) -> None:
        self.note("verdict", verdict.code)

    def on_evicted(self, reason: str) -> None:
        self.note("evicted", reason)


@pytest.fixture
def made() -> Iterator[Callable[..., tuple[Node, Recorder, Memory]]]:
    with ExitStack() as stack:

        def make(**more: Any) -> tuple[Node, Recorder, Memory]:
            recorder, memory = Recorder(), Memory()
            node = Node(Config("run", "a", "127.0.0.1:7001", **more), recorder, transport=memory)
            stack.callback(node.close)
            return node, recorder, memory

        yield make


def run(node: Node, until: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Serve until the condition holds; fails rather than waits for ever."""
    until_s = time.monotonic() + timeout_s

    def look() -> None:
        if until() or time.monotonic() > until_s:
            node.stop()
        else:
            node.call_later(0.001, look)

    node.call_later(0.0, look)
    node.run()
    assert until()


Made = Callable[..., tuple[Node, Recorder, Memory]]


def test_single_node_decides_its_view_and_callbacks_do_not_nest(made: Made) -> None:
    node, recorder, _ = made()

    def react(kind: str, value: Any) -> None:
        if kind == "view" and value < 3:
            node.propose("again")

    recorder.react = react
    run(node, lambda: node.view is not None and node.view.epoch == 3)
    assert [event for event in recorder.events if event[0].startswith("view")] == [
        (kind, epoch) for epoch in (1, 2, 3) for kind in ("view", "view done")
    ]
    assert node.quorate


def test_timers_run_in_order_of_their_time_and_cancelled_ones_never(made: Made) -> None:
    node, _, _ = made()
    calls: list[int] = []
    node.call_later(0.02, lambda: calls.append(2))
    node.call_later(0.01, lambda: calls.append(1))
    cancelled = node.call_later(0.005, lambda: calls.append(0))
    cancelled.cancel()
    cancelled.cancel()
    run(node, lambda: len(calls) == 2)
    assert calls == [1, 2]


def test_call_from_another_thread_runs_on_the_nodes_thread_at_once(made: Made) -> None:
    node, _, _ = made(probe_interval_s=100.0, failure_s=1000.0)
    threads: list[threading.Thread] = []

    def call() -> None:
        threads.append(threading.current_thread())
        node.stop()

    other = threading.Timer(0.05, lambda: node.call_soon_threadsafe(call))
    other.start()
    begun_s = time.monotonic()
    node.run()
    other.join(10)
    assert threads == [threading.current_thread()]
    assert time.monotonic() - begun_s < 5.0


def test_readable_descriptor_calls_its_reader_until_it_is_removed(made: Made) -> None:
    node, _, memory = made()
    read_end, write_end = os.pipe()
    os.write(write_end, b"xyz")
    read: list[bytes] = []

    def reader() -> None:
        read.append(os.read(read_end, 1))
        if len(read) == 2:
            node.remove_reader(read_end)
            node.remove_reader(read_end)

    try:
        node.add_reader(read_end, reader)
        run(node, lambda: len(read) == 2)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert memory.watched == set()


@pytest.mark.parametrize("where", ["timer", "callback", "reader"])
def test_exception_of_a_callback_leaves_run(made: Made, where: str) -> None:
    node, recorder, memory = made()

    def fail(*_: Any) -> None:
        raise KeyError("mine")

    if where == "timer":
        node.call_later(0.0, fail)
    elif where == "callback":
        recorder.react = fail
    else:
        node.add_reader(0, fail)
    with pytest.raises(KeyError, match="mine"):
        node.run()
    node.close()
    assert memory.closed == 1


def frame_from(name: str, message: Any, run_id: str = "run") -> bytes:
    member = Member(name, 1, "127.0.0.1:7002")
    return encode(Envelope(run_id, "", member.key, member.address, None, message))


def test_bytes_that_are_no_message_are_counted_and_change_nothing(made: Made) -> None:
    node, recorder, memory = made(num_nodes_min=2, num_nodes_max=2)
    memory.coming.append(Incoming(frames=[b"", b"\xff" * 50, frame_from("b", Join(Member("b", 1, "127.0.0.1:7002")))]))
    run(node, lambda: ("member", ("joined", "b")) in recorder.events)
    assert node.counters.malformed == 2


def test_messages_go_to_members_only_and_bad_ones_are_the_callers_mistake(made: Made) -> None:
    node, recorder, memory = made(num_nodes_min=3, num_nodes_max=3)
    b = Member("b", 1, "127.0.0.1:7002")
    memory.coming.append(Incoming(frames=[frame_from("b", Join(b)), frame_from("b", AppMessage("hi", {1: b"x"}))]))
    run(node, lambda: ("message", ("b", "hi", {1: b"x"})) in recorder.events)
    memory.sent.clear()
    node.send(b.key, "k", [1])
    node.broadcast("k", [2])
    node.send(MemberKey("nobody", 1), "k", [3])
    bodies = [decode(frame).message for _, frame in memory.sent]
    assert bodies == [AppMessage("k", [1]), AppMessage("k", [2])]
    assert node.counters.dropped == 1
    with pytest.raises(ValueError, match="the body of a 'k' message must consist of plain"):
        node.send(b.key, "k", object())
    with pytest.raises(ValueError, match="bytes; at most"):
        node.broadcast("k", bytes(9 * 2**20))
    with pytest.raises(ValueError, match="does not send messages to itself"):
        node.send(node.key, "k", 1)


def test_frames_that_the_transport_drops_are_counted(made: Made) -> None:
    node, recorder, memory = made(num_nodes_min=2, num_nodes_max=2)
    far = Member("b", 1, "127.0.0.1:9")
    frame = encode(Envelope("run", "", far.key, far.address, None, Join(far)))
    memory.coming.append(Incoming(frames=[frame]))
    run(node, lambda: ("member", ("joined", "b")) in recorder.events)
    assert node.counters.dropped > 0


def test_verdict_is_told_once_and_kept(made: Made) -> None:
    node, recorder, _ = made()
    node.declare(Verdict(3, "over", node.key))
    node.declare(Verdict(4, "again", node.key))
    assert [event for event in recorder.events if event[0] == "verdict"] == [("verdict", 3)]
    assert node.verdict is not None
    assert node.verdict.code == 3


def test_store_request_waits_for_the_view_and_is_answered_on_the_loop(made: Made) -> None:
    node, _, _ = made()
    replies: list[StoreReply] = []
    node.store_request(1, "set", ["k", b"v"], 5.0, replies.append)
    node.store_request(1, "get", ["k"], 5.0, replies.append)
    node.store_request(1, "get", ["absent"], 0.05, replies.append)
    run(node, lambda: len(replies) == 3)
    assert replies[:2] == [StoreReply(True), StoreReply(True, b"v")]
    assert replies[2].timed_out


class Talkative(Recorder):
    def ballot(self) -> dict[str, Any]:
        return {"much": bytes(70000)}


def test_too_long_ballot_ends_the_run_with_a_clear_error() -> None:
    node = Node(Config("run", "a", "127.0.0.1:7001"), Talkative(), transport=Memory())
    with pytest.raises(ValueError, match=r"Application\.ballot\(\) returned has \d+ bytes"):
        node.run()


def test_node_on_a_taken_port_is_refused_and_leaves_nothing_open() -> None:
    first = Node(Config("run", "a", "127.0.0.1:0"), Recorder())
    try:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(RendezvousError, match="is taken by another process"):
            Node(Config("run", "b", first.member.address), Recorder())
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        first.close()
        first.close()


def test_closing_is_quick_even_with_frames_for_nobody() -> None:
    config = Config("run", "a", "127.0.0.1:0", contacts=("127.0.0.1:1",), num_nodes_min=2, num_nodes_max=2)
    node = Node(config, Recorder(), transport=ZmqTransport(config))
    run(node, lambda: True)
    begun_s = time.monotonic()
    node.close()
    assert time.monotonic() - begun_s < 5.0  # and not until somebody reads them


@pytest.mark.parametrize(
    ("more", "owned"),
    [
        ({}, True),
        ({"advertise": "127.0.0.1:1"}, True),
        ({"advertise": "10.0.0.1:1"}, False),
        ({"advertise": "10.0.0.1:1", "host_owned": True}, True),
        ({"host_owned": False}, False),
    ],
)
def test_address_counts_as_the_hosts_own_unless_another_one_is_advertised(
    made: Made, more: dict[str, Any], owned: bool
) -> None:
    node, _, _ = made(**more)
    assert node.member.host_owned is owned
