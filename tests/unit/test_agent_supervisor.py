"""agent.supervisor.Supervisor asks for workers, as far as descriptors go."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable

import pytest

from p2pstate.agent.output import Writer
from p2pstate.agent.supervisor import RETRY_FORK_S, Supervisor
from p2pstate.worker.stand_in import socket_name
from rendezvous.channel import Channel


class ManualNode:
    """Keeps what a node is to call, for the test to call."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}
        self.later: list[tuple[float, Callable[[], None]]] = []

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        self.readers[fd] = callback

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.later.append((delay_s, callback))


class Complaints:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_fork_failed(self, reason: str) -> None:
        self.reasons.append(reason)


def test_fork_without_a_descriptor_left_keeps_none_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"@p2pstate-test-{secrets.token_hex(8)}"
    monkeypatch.setenv("P2PSTATE_FORKSERVER", address)
    node, complaints = ManualNode(), Complaints()
    supervisor = Supervisor(node, complaints, Writer(), name="n", log_dir=None, quiet=True)  # type: ignore[arg-type]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(socket_name(address))
        listener.listen()
        supervisor.start()
        template = Channel(listener.accept()[0], blocking=True)
    template.send({"t": "template_ready"})
    (read_template,) = node.readers.values()
    read_template()
    before = os.listdir("/proc/self/fd")

    pipe2, num_left = os.pipe2, [1]

    def scarce(flags: int) -> tuple[int, int]:
        if not num_left.pop():
            raise OSError(24, "Too many open files")
        num_left.append(0)
        return pipe2(flags)

    monkeypatch.setattr(os, "pipe2", scarce)
    supervisor.keep_spares(1)
    assert complaints.reasons == ["[Errno 24] Too many open files"]
    assert os.listdir("/proc/self/fd") == before
    ((delay_s, try_again),) = node.later
    assert delay_s == RETRY_FORK_S

    monkeypatch.setattr(os, "pipe2", pipe2)
    try_again()
    ((message, fds),) = template.receive()
    assert (message["t"], message["entry"], len(fds)) == ("spawn", "worker", 3)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 3 + len(fds)  # a line and two outputs are kept here
    for fd in fds:
        os.close(fd)
    template.close()
