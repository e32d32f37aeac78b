"""The process that a node's workers are forked from: torch imported once, a worker in milliseconds.

In: ``spawn`` messages (``entry``: worker, writer, or script, which is what python runs with ``args``) with the
process's channel (a script's standard input) and output descriptors. Out: ``spawned`` (pid) and ``exited`` (pid, wait
status) messages. The template never starts a thread and never touches a device, so forking it is safe; workers and the
agent's other children are never its business.

Fate: the template ends when its agent does (parent-death signal, and end of file on its channel), and its workers end
with the template (parent-death signal). Each worker leads a session of its own, which is killed as a whole when it
dies: forked loader children would otherwise keep its sockets open.

Run as ``python -m p2pstate.agent.template FD`` by an agent, or with ``--listen PATH`` as a server that forks one
template for every process of this user that connects: agents (set ``P2PSTATE_FORKSERVER=PATH``; it keeps many short
runs on one machine cheap), and what stands in for a python (worker/stand_in.py).
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from p2pstate.worker.stand_in import socket_name
from rendezvous.channel import Channel, ChannelClosed, is_of_this_user
from rendezvous.processes import die_with_parent

__all__ = ["kill_session", "main", "preload"]


def kill_session(leader_pid: int) -> None:
    """SIGKILL every process of the session that ``leader_pid`` led, also those that are forked while we look.

    Left alone is ``multiprocessing``'s resource tracker: it ends once the others have, and removes the semaphores and
    shared memory that they leave behind.
    """
    killed: set[int] = set()
    while found := {pid for pid in _session_members(leader_pid) if pid not in killed and not _is_tracker(pid)}:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found


def _session_members(leader_pid: int) -> Iterator[int]:
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(ProcessLookupError):  # it ended while we looked
            if os.getsid(pid) == leader_pid:
                yield pid


def _is_tracker(pid: int) -> bool:
    try:
        arguments = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(argument.startswith(b"from multiprocessing.resource_tracker import main") for argument in arguments)


def preload() -> None:
    """Import what training scripts need, so that a forked worker has it at once."""
    # Asking the driver how many cards there are, as imports do, would take them from every fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import numpy  # noqa: F401
    import torch
    import torch._dynamo  # optimizers import it at their first step
    import torch.distributed
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.nn.parallel
    import torch.utils.data  # noqa: F401

    import p2pstate.durable.writer
    import p2pstate.replicator
    import p2pstate.worker.main  # noqa: F401


def _settle() -> None:
    """Have the collector leave what there is alone: looking through it would copy its memory in every fork."""
    gc.collect()
    gc.freeze()


class Template:
    """The loop of one node's template process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._children: set[int] = set()

    def run(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM):  # sent to all of a node's processes: the agent handles them
            signal.signal(number, signal.SIG_IGN)
        _settle()
        self._channel.send({"t": "template_ready", "pid": os.getpid()})
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        poller.register(wake_read, select.POLLIN)
        try:
            while True:
                poller.poll(1000)
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 512)
                self._reap()
                for message, fds in self._channel.receive():
                    self._handle(message, fds, [wake_read, wake_write])
        except ChannelClosed:
            for pid in self._children:
                kill_session(pid)

    def _handle(self, message: dict[str, Any], fds: list[int], own_fds: list[int]) -> None:
        if message["t"] == "spawn":
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._become_worker(parent, message, fds, own_fds)
            for fd in fds:
                os.close(fd)
            self._children.add(pid)
            self._channel.send({"t": "spawned", "id": message["id"], "pid": pid})
        elif message["t"] == "kill" and message["pid"] in self._children:
            kill_session(message["pid"])
        elif message["t"] == "signal" and message["pid"] in self._children:
            os.kill(message["pid"], message["number"])  # its child until it is reaped, which happens in this loop

    def _become_worker(self, parent: int, message: dict[str, Any], fds: list[int], own_fds: list[int]) -> None:
        code = 1
        try:
            die_with_parent(parent)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            is_script = message["entry"] == "script"
            signal.signal(signal.SIGINT, signal.default_int_handler if is_script else signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sock_fd, out_fd, err_fd = fds
            os.dup2(out_fd, 1)
            os.dup2(err_fd, 2)
            for fd in (out_fd, err_fd, self._channel.fileno(), *own_fds):
                os.close(fd)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("500")  # the agent, which holds the copies, must outlive its workers
            os.environ.clear()
            os.environ.update(message["environ"])
            os.chdir(message["cwd"])
            if is_script:
                from p2pstate.worker.script import python_main

                os.dup2(sock_fd, 0)
                os.close(sock_fd)
                code = python_main(message["args"])
            elif message["entry"] == "writer":
                from p2pstate.durable.writer import writer_main

                code = writer_main(socket.socket(fileno=sock_fd))
            else:
                from p2pstate.worker.main import worker_main

                code = worker_main(socket.socket(fileno=sock_fd))
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                self._children.discard(pid)
                kill_session(pid)
                with contextlib.suppress(ChannelClosed):
                    self._channel.send({"t": "exited", "pid": pid, "status": status})


def _serve(sock: socket.socket) -> None:
    channel = Channel(sock, blocking=False)
    Template(channel).run()


def _listen(path: str, ready: Callable[[], None] = lambda: None) -> None:
    """Fork one template per connection until standard input closes."""
    preload()
    _settle()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_name(path))
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(1, b"ready\n")  # at once: whoever has read of it closes the pipe
    ready()
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable and not sys.stdin.read(1):
            return
        if listener in readable:
            sock, _ = listener.accept()
            if not is_of_this_user(sock):
                sock.close()
                continue
            parent = os.getpid()
            if os.fork() == 0:
                die_with_parent(parent)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                _serve(sock)
                os._exit(0)
            sock.close()


def main(argv: list[str]) -> None:
    if argv[0] == "--listen":
        _listen(argv[1])
        return
    fd, parent = int(argv[0]), int(argv[1])
    die_with_parent(parent)
    preload()
    _serve(socket.socket(fileno=fd))


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # taking torch apart takes seconds on a busy machine, and its agent waits for this end
