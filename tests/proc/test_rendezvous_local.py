"""The line between an agent and other processes of its node, over a real node; and ending processes by their mark."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from rendezvous import autoload
from rendezvous.agent import claim_name
from rendezvous.autoload import ENV_AGENT, ENV_ROUND
from rendezvous.channel import Channel, Message
from rendezvous.config import Config
from rendezvous.local import LocalClient, LocalServer
from rendezvous.node import Node
from rendezvous.processes import kill_marked
from rendezvous.store_line import StoreLine, StoreLines, store_reply_message
from rendezvous.types import PassiveApplication, StoreReply, Verdict


class Alone(PassiveApplication):
    """An application that starts a run of one node and serves its store over a local line."""

    def __init__(self) -> None:
        self.node = Node(Config("local", "a", "127.0.0.1:0", first_view_last_call_s=0.0), self)
        self.server = LocalServer(self.node, self.on_local, lambda channel: None)

    def on_local(self, channel: Channel, message: Message, fds: list[int]) -> None:
        if message["op"] == "silence":
            return

        def reply(answer: StoreReply) -> None:
            self.server.tell(channel, store_reply_message(message["id"], answer))

        self.node.store_request(message["epoch"], message["op"], message["args"], message["deadline_s"], reply)


@pytest.fixture
def served() -> Iterator[Alone]:
    alone = Alone()
    thread = threading.Thread(target=alone.node.run)
    thread.start()
    yield alone
    alone.node.call_soon_threadsafe(alone.server.close)
    alone.node.call_soon_threadsafe(alone.node.stop)
    thread.join(10.0)
    assert not thread.is_alive()
    alone.node.close()


def connect(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect("\0" + address)
    return sock


def test_threads_share_the_store_and_a_blocked_get_is_answered_by_the_others_set(served: Alone) -> None:
    lines = StoreLines(served.server.address)
    answers: list[StoreReply] = []
    blocked = threading.Thread(target=lambda: answers.append(lines.request(1, "get", ["key"], 20.0)))
    blocked.start()
    assert lines.request(1, "set", ["key", b"value"], 20.0).ok
    blocked.join(20.0)
    assert [answer.value for answer in answers] == [b"value"]
    assert lines.request(1, "get", ["never"], 0.05).timed_out
    assert lines.request(1, "get", ["key"], 20.0).value == b"value"


def test_reply_that_comes_after_its_deadline_answers_no_other_request(served: Alone) -> None:
    lines = StoreLines(served.server.address)
    assert lines.request(1, "silence", [], -0.5).timed_out
    assert lines.request(1, "set", ["key", b"value"], 20.0).value is None
    assert lines.request(1, "get", ["key"], 20.0).value == b"value"


def test_processes_that_workers_start_meet_apart_from_them_at_the_address_they_are_told(
    served: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DCP's processes for asynchronous saves do, which have their workers' ranks and environment."""
    values = {ENV_AGENT: served.server.address, ENV_ROUND: "1", "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    seen = []
    for port in ("4711", "4712"):
        monkeypatch.setenv("MASTER_PORT", port)
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setattr(autoload, "_num_inits", 0)  # each is a process of its own
            ((store, own_rank, world_size),) = autoload._env_handler("env://", timedelta(seconds=20.0))
            assert (own_rank, world_size) == (int(rank), 2)
            seen.append(store.add("processes", 1))
    assert seen == [1, 2, 1, 2]


def test_forked_child_has_a_line_of_its_own(served: Alone) -> None:
    lines = StoreLines(served.server.address)
    child = os.fork()
    if child == 0:
        os._exit(not all(lines.request(1, "add", ["count", 1], 20.0).ok for _ in range(200)))
    for _ in range(200):
        assert lines.request(1, "add", ["count", 1], 20.0).ok
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lines.request(1, "get", ["count"], 20.0).value == b"400"


def test_failing_verdict_frees_whoever_waits_in_the_store(served: Alone) -> None:
    lines = StoreLines(served.server.address)
    assert lines.request(1, "set", ["key", b""], 20.0).ok
    answers: list[StoreReply] = []
    blocked = threading.Thread(target=lambda: answers.append(lines.request(1, "get", ["never"], 60.0)))
    blocked.start()
    served.node.call_soon_threadsafe(lambda: served.node.declare(Verdict(1, "over", served.node.key)))
    blocked.join(20.0)
    assert [answer.ended for answer in answers] == [True]


def test_whoever_waits_for_an_agent_that_ends_is_freed_and_told(served: Alone) -> None:
    ended = threading.Event()
    client = LocalClient(Channel(connect(served.server.address), blocking=True), lambda message: None, ended.set)
    lines = StoreLines(served.server.address)
    answers: list[StoreReply] = []
    waiting = threading.Thread(target=lambda: answers.append(lines.request(1, "silence", [], 60.0)))
    waiting.start()
    served.node.call_soon_threadsafe(served.server.close)
    waiting.join(20.0)
    assert [answer.ended for answer in answers] == [True]
    assert ended.wait(20.0)
    assert client.closed
    client.close()
    assert lines.request(1, "num_keys", [], 20.0).ended
    with pytest.raises(OSError, match="refused"):
        StoreLine(served.server.address)


def test_client_that_sends_nonsense_is_dropped_and_the_others_are_served(served: Alone) -> None:
    ended = threading.Event()
    bad = LocalClient(Channel(connect(served.server.address), blocking=True), lambda message: None, ended.set)
    bad.send("store")
    assert ended.wait(20.0)
    bad.close()
    assert StoreLines(served.server.address).request(1, "num_keys", [], 20.0).value == 0


def test_processes_are_ended_by_their_mark_and_others_are_left() -> None:
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    started = [
        subprocess.Popen(command, env={"MARK": mark}, stdout=subprocess.PIPE) for mark in ("mine", "mine", "other")
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
        assert kill_marked("MARK", "mine") == 2
        assert [process.wait(10) for process in started[:2]] == [-9, -9]
        assert started[2].poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.parametrize("run_id", ["run-of-names", "r" * 200, "ü" * 100])
def test_name_on_a_host_is_unique_while_held_and_the_same_after_a_restart(run_id: str) -> None:
    (first, one), (second, two) = claim_name(run_id, "host"), claim_name(run_id, "host")
    assert (first, second) == ("host", "host.1")
    one.close()
    again, three = claim_name(run_id, "host")
    assert again == "host"
    two.close()
    three.close()
