"""``p2pstate-python``: stands in for a python that torchrun starts, while a process that has torch imported runs the
script.

In: python's arguments as torchrun gives them (``PYTHON_EXEC=p2pstate-python torchrun --rdzv-backend=p2p ...``), this
process's environment, output and signals. Out: a fork of the process that the node's agent keeps for this (template.py)
does what python would, and this process ends as it did.

Invariants: where there is nothing to be forked from, at the first start above all, it becomes python itself; when this
process ends, so does what stands behind it.
Known limit: the script's process is no child of torchrun, so SIGSTOP to the one does not stop the other.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from typing import NoReturn

from rendezvous.autoload import ENV_AGENT, ENV_LAUNCHER
from rendezvous.channel import Channel, ChannelClosed, Message
from rendezvous.processes import die_with_parent

__all__ = ["NAME", "address", "main", "socket_name"]

NAME = "p2pstate-python"
READY_WITHIN_S = 10.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def address(agent: str) -> str:
    """Where the process to fork from listens (an abstract name), beside the agent that listens at ``agent``."""
    return f"@{agent}-python"


def socket_name(address: str) -> str:
    """For connect and bind: ``@`` begins an abstract name, as in ss and systemd."""
    return "\0" + address[1:] if address.startswith("@") else address


def main() -> NoReturn:
    arguments = sys.argv[1:]
    try:
        channel, spawn = _connect(arguments)
    except (OSError, ValueError, ChannelClosed):
        os.execv(sys.executable, [sys.executable, *arguments])
    if os.environ.get(ENV_LAUNCHER) == str(os.getppid()):
        die_with_parent(os.getppid())
    channel.send(spawn, (0, 1, 2))
    try:
        status = _follow(channel)
    except ChannelClosed:
        print(f"p2pstate: the process that {arguments} was forked from has ended", file=sys.stderr)
        sys.exit(1)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.WEXITSTATUS(status))


def _connect(arguments: list[str]) -> tuple[Channel, Message]:
    """A template of its own, and what it is told. OSError, ChannelClosed or ValueError: python has to do it."""
    words = [word for word in arguments[:2] if word not in ("-u", "-m")]
    if ENV_AGENT not in os.environ or not arguments or any(word.startswith("-") for word in words):
        raise ValueError("no worker of torchrun's, or options that only an interpreter understands")
    spawn = {"t": "spawn", "id": 0, "entry": "script", "environ": dict(os.environ), "cwd": os.getcwd()}
    spawn["args"] = arguments
    for text in (*os.environ, *os.environ.values(), *arguments):
        text.encode()  # UnicodeEncodeError, a ValueError, for what no message can carry
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(socket_name(address(os.environ[ENV_AGENT])))
    channel = Channel(sock, blocking=True)
    sock.settimeout(READY_WITHIN_S)
    channel.receive()  # that it is ready
    channel.set_blocking()
    return channel, spawn


def _follow(channel: Channel) -> int:
    """Until the script's process has ended; returns its status, as waitpid does."""
    early: list[int] = []
    pid = 0

    def forward(number: int, _frame: object) -> None:
        if pid:
            channel.send({"t": "signal", "pid": pid, "number": number})
        else:
            early.append(number)

    for sign in _FORWARDED:
        signal.signal(sign, forward)
    while True:
        for message, _ in channel.receive():
            if message["t"] == "spawned":
                pid = message["pid"]
                for number in early:
                    forward(number, None)
            elif message["t"] == "exited":
                return int(message["status"])
