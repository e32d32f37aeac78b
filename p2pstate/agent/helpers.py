"""Processes of a node that never have a rank: their lines, and the word when one has ended.

In: what starts and kills a process (the template of a p2prun node; on a torchrun node a new interpreter). Out: messages
of each process, and how it ended. All callbacks come from the node's thread.

Invariants: a process is killed by whoever can be sure that its id is still its own; one that was killed here is not
heard of any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rendezvous.channel import Channel, ChannelClosed, Message
from rendezvous.node import Node
from rendezvous.processes import open_pidfd

__all__ = ["Helper", "Helpers", "Interpreters", "Launcher", "describe_status", "send"]

FLUSH_INTERVAL_S = 0.02
ENTRIES = {"writer": "p2pstate.durable.writer"}  # what a new interpreter runs, as a module


class Launcher(Protocol):
    """``launch`` returns the number by which `Helpers.launched` and `Helpers.ended` name the process; None: not now."""

    def launch(self, entry: str, fd: int) -> int | None: ...

    def end(self, pid: int) -> None:
        """SIGKILL."""


@dataclass(slots=True, eq=False)
class Helper:
    channel: Channel
    on_message: Callable[[Message], None]
    on_end: Callable[[str], None]
    pid: int | None = None


class Helpers:
    def __init__(self, node: Node, launcher: Launcher) -> None:
        self._node, self._launcher = node, launcher
        self._helpers: dict[int, Helper] = {}

    def start(self, entry: str, on_message: Callable[[Message], None], on_end: Callable[[str], None]) -> Helper | None:
        """None: none can be started at the moment. ``on_end`` is called once."""
        try:
            ours, theirs = Channel.pair()
        except OSError:  # out of descriptors
            return None
        number = self._launcher.launch(entry, theirs.fileno())
        theirs.close()
        if number is None:
            ours.close()
            return None
        helper = self._helpers[number] = Helper(ours, on_message, on_end)
        self._node.add_reader(ours.fileno(), lambda: self._read(helper))
        return helper

    def tell(self, helper: Helper, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send; one that does not take its messages any more is killed."""
        if not send(self._node, helper.channel, message, fds):
            self.kill(helper)

    def kill(self, helper: Helper) -> None:
        """SIGKILL. Its ``on_end`` is not called any more, whenever it ends."""
        number = next((number for number, each in self._helpers.items() if each is helper), None)
        if number is not None:
            self._forget(number)
        if helper.pid is not None:
            self._launcher.end(helper.pid)

    def launched(self, number: int, pid: int) -> None:
        """The launcher has started what it was asked for; what is not wanted any more is killed."""
        if number in self._helpers:
            self._helpers[number].pid = pid
        else:
            self._launcher.end(pid)

    def ended(self, pid: int, status: int) -> None:
        """The launcher has reaped a process, which may be a helper."""
        for number, helper in list(self._helpers.items()):
            if helper.pid == pid:
                self._forget(number)
                helper.on_end(describe_status(status))

    def close(self) -> None:
        for helper in list(self._helpers.values()):
            self.kill(helper)

    def _read(self, helper: Helper) -> None:
        try:
            messages = helper.channel.receive()
            helper.channel.flush()
        except ChannelClosed:
            self._node.remove_reader(helper.channel.fileno())
            helper.channel.close()
            return
        for message, _ in messages:
            helper.on_message(message)

    def _forget(self, number: int) -> None:
        helper = self._helpers.pop(number)
        if not helper.channel.closed:
            self._node.remove_reader(helper.channel.fileno())
            helper.channel.close()


class Interpreters:
    """Starts each process as a new interpreter, which takes seconds. Its children; it reaps them itself."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._children: dict[int, tuple[subprocess.Popen[bytes], int]] = {}  # by id; with a descriptor of it
        self.helpers = Helpers(node, self)

    def launch(self, entry: str, fd: int) -> int | None:
        command = [sys.executable, "-m", ENTRIES[entry], str(fd), str(os.getpid())]
        environ = {name: value for name, value in os.environ.items() if name != "P2PSTATE_KEY"}
        try:
            child = subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, env=environ)
        except OSError:
            return None
        pidfd = open_pidfd(child.pid)
        assert pidfd is not None, "it is not reaped before it was waited for"
        self._children[child.pid] = child, pidfd
        self._node.add_reader(pidfd, lambda: self._reap(child.pid))
        self._node.call_later(0.0, lambda: self.helpers.launched(child.pid, child.pid))
        return child.pid

    def end(self, pid: int) -> None:
        if pid in self._children:
            self._children[pid][0].kill()

    def _reap(self, pid: int) -> None:
        child, pidfd = self._children.pop(pid)
        self._node.remove_reader(pidfd)
        os.close(pidfd)
        code = child.wait()
        self.helpers.launched(pid, pid)  # if it ended at once
        self.helpers.ended(pid, -code if code < 0 else code << 8)

    def close(self) -> None:
        """Bounded: SIGKILL."""
        self.helpers.close()
        for child, pidfd in self._children.values():
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(2.0)
            os.close(pidfd)
        self._children.clear()


def send(node: Node, channel: Channel, message: Message, fds: tuple[int, ...] = ()) -> bool:
    """Send now, and later what a full socket holds back. False: nobody takes messages at the other end any more."""
    try:
        channel.send(message, fds)
    except ChannelClosed:
        return False
    _flush_later(node, channel)
    return True


def _flush_later(node: Node, channel: Channel) -> None:
    try:
        if channel.closed or channel.flush():
            return
    except ChannelClosed:
        return  # its reader notices
    node.call_later(FLUSH_INTERVAL_S, lambda: _flush_later(node, channel))


def describe_status(status: int) -> str:
    """A wait status in words: ``signal 9 (SIGKILL)`` or ``exit 1``."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"signal {number} ({signal.Signals(number).name})"
    return f"exit {os.waitstatus_to_exitcode(status)}"
