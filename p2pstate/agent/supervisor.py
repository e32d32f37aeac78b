"""The worker processes of one node: forked from the template, given ranks, watched, replaced.

In: requests (keep so many ready, give this rank to one, kill these) and what the template and the workers say. Out:
calls to a listener.

Invariants: a rank is given to a new process only after the old one was reaped; a worker that ends is always reported,
exactly once, after everything it said.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Protocol

from p2pstate.agent.held import Phase, RankProcess
from p2pstate.agent.helpers import Helpers, send
from p2pstate.agent.output import Writer
from p2pstate.agent.worker_output import WorkerOutput
from p2pstate.trace import map_page, new_page
from p2pstate.worker.stand_in import socket_name
from rendezvous.channel import Channel, ChannelClosed, Message
from rendezvous.node import Node

__all__ = ["Failure", "Listener", "Supervisor", "WorkerProcess"]

EXIT_GRACE_S = 10.0
RETRY_FORK_S = 1.0


@dataclass(frozen=True, slots=True)
class Failure:
    """How a worker's script failed. ``innocent``: alone or after the loss of a peer, which says nothing about it."""

    code: int
    sentence: str
    innocent: bool


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerProcess(RankProcess):
    output: WorkerOutput
    local_rank: int | None = None
    rehearses: int | None = None  # the rank it can take at once
    killed: bool = False  # from here
    failure: Failure | None = None


class Listener(Protocol):
    def on_worker_ready(self, worker: WorkerProcess) -> None: ...

    def on_worker_message(self, worker: WorkerProcess, message: Message) -> None: ...

    def on_worker_ended(self, worker: WorkerProcess, status: int) -> None: ...

    def on_template_ended(self, reason: str) -> None: ...

    def on_fork_failed(self, reason: str) -> None: ...


class Supervisor:
    """All callbacks come from the node's thread."""

    def __init__(
        self, node: Node, listener: Listener, writer: Writer, *, name: str, log_dir: str | None, quiet: bool
    ) -> None:
        self._writer = writer
        self._node = node
        self._listener = listener
        self._quiet = quiet
        self._log_dir = os.path.join(log_dir, name) if log_dir else None
        self._template: Channel | None = None
        self._template_process: subprocess.Popen[bytes] | None = None
        self._template_ready = False
        self._waiting: dict[int, tuple[Channel, tuple[int, int]]] = {}  # forks under way, with what they write to
        self._next_id = 1
        self._wanted = 0
        self.workers: dict[int, WorkerProcess] = {}
        self.helpers = Helpers(node, self)

    # -- what the agent asks for

    def start(self) -> None:
        """Start the template. Raises OSError when no process can be made."""
        server = os.environ.get("P2PSTATE_FORKSERVER")
        if server:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(socket_name(server))
            self._template = Channel(sock, blocking=False)
        else:
            self._template, theirs = Channel.pair()
            command = [sys.executable, "-m", "p2pstate.agent.template", str(theirs.fileno()), str(os.getpid())]
            self._template_process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()
        self._node.add_reader(self._template.fileno(), self._read_template)

    def keep_spares(self, wanted: int) -> None:
        """Have this many workers without a rank, now and from now on."""
        self._wanted = wanted
        self._fork_missing()

    def spare(self) -> WorkerProcess | None:
        """A worker that is ready and has no rank."""
        return next((w for w in self.workers.values() if w.phase is Phase.SPARE and not w.ended), None)

    def of_rank(self, rank: int) -> WorkerProcess | None:
        """The process that has this rank and was not reaped yet."""
        return next((w for w in self.workers.values() if w.rank == rank), None)

    def assigned(self) -> list[WorkerProcess]:
        return [w for w in self.workers.values() if w.rank is not None]

    def tell(self, worker: WorkerProcess, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send; a worker that does not take its messages any more is killed."""
        if not worker.ended and not send(self._node, worker.channel, message, fds):
            self.kill(worker)

    def tell_ranks(self, message: Message) -> None:
        for worker in self.assigned():
            self.tell(worker, message)

    def assign(self, worker: WorkerProcess, message: Message, rank: int, local_rank: int, phase: Phase) -> None:
        worker.rank, worker.local_rank, worker.phase = rank, local_rank, phase
        worker.output.label = str(rank)
        self._hand_over(worker, message, rank)

    def rehearse(self, worker: WorkerProcess, message: Message, rank: int) -> None:
        """Let it run the script alone; it counts as a process without a rank until :meth:`adopt`."""
        worker.rehearses, worker.phase = rank, Phase.REHEARSING
        self._hand_over(worker, message, rank)

    def adopt(self, worker: WorkerProcess, local_rank: int) -> None:
        """Give a rehearsing process the rank that it has rehearsed."""
        worker.rank, worker.local_rank, worker.phase, worker.rehearses = worker.rehearses, local_rank, Phase.ALONE, None
        worker.output.label = str(worker.rank)
        self._fork_missing()

    def _hand_over(self, worker: WorkerProcess, message: Message, rank: int) -> None:
        if self._log_dir is not None:
            path = os.path.join(self._log_dir, f"{rank}.{worker.pid}")
            message["environ"]["TORCHELASTIC_ERROR_FILE"] = f"{path}.error.json"  # of torch's own @record
            try:
                worker.output.open_log(f"{path}.log")
            except OSError as error:  # the disk is full, or gone: that costs the log
                worker.output.note(f"rank {rank} has no log: {error}\n")
        try:
            page = new_page()
        except OSError:  # out of descriptors: nobody will notice if this one hangs
            self.tell(worker, message)
        else:
            worker.page = map_page(page)
            self.tell(worker, message, (page,))
            os.close(page)
        self._fork_missing()

    def note(self, worker: WorkerProcess, text: str) -> None:
        worker.output.note(text)

    def kill(self, worker: WorkerProcess) -> None:
        """SIGKILL; the template reaps it and ends the rest of its session."""
        worker.killed = True
        self.end(worker.pid)

    def signal(self, worker: WorkerProcess, number: int) -> None:
        """Send a signal to the worker alone."""
        self._tell_template({"t": "signal", "pid": worker.pid, "number": number})

    def _tell_template(self, message: Message) -> None:
        """About one of its children. It reaps them itself, so the pid cannot have been given to another process."""
        if self._template is not None:
            send(self._node, self._template, message)  # its reader notices when it has ended

    # -- helpers.Launcher

    def launch(self, entry: str, fd: int) -> int | None:
        number, self._next_id = self._next_id, self._next_id + 1
        return number if self._template_ready and self._spawn(number, entry, (fd, 2, 2)) else None

    def end(self, pid: int) -> None:
        self._tell_template({"t": "kill", "pid": pid})

    def close(self) -> None:
        """End every process of this node. Bounded: SIGKILL, then the template's end."""
        self._wanted = 0
        for worker in list(self.workers.values()):
            self.kill(worker)
        self.helpers.close()
        if self._template is not None:
            self._node.remove_reader(self._template.fileno())
            self._template.close()
            self._template = None
        if self._template_process is not None:
            try:
                self._template_process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._template_process.kill()
                self._template_process.wait(EXIT_GRACE_S)  # on a crowded machine even that takes a while
        for worker in list(self.workers.values()):
            self._forget(worker)

    # -- the template

    def _fork_missing(self) -> None:
        if not self._template_ready or self._template is None:
            return
        unassigned = sum(1 for w in self.workers.values() if w.rank is None and not w.ended)
        for _ in range(self._wanted - unassigned - len(self._waiting)):
            try:
                forked = self._fork()
            except OSError as error:  # out of descriptors: the workers there are go on meanwhile
                self._listener.on_fork_failed(str(error))
                self._node.call_later(RETRY_FORK_S, self._fork_missing)
                return
            if not forked:
                return

    def _fork(self) -> bool:
        """Ask for one worker. False: the template has ended. Raises OSError when there is no descriptor left."""
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as handed_over:
            ours, theirs = Channel.pair()
            kept.callback(ours.close)
            handed_over.callback(theirs.close)
            out_read, out_write = _pipe(kept, handed_over)
            err_read, err_write = _pipe(kept, handed_over)
            number, self._next_id = self._next_id, self._next_id + 1
            forked = self._spawn(number, "worker", (theirs.fileno(), out_write, err_write))
            if forked:
                self._waiting[number] = (ours, (out_read, err_read))
                kept.pop_all()
            return forked

    def _spawn(self, number: int, entry: str, fds: tuple[int, int, int]) -> bool:
        assert self._template is not None
        environ = {name: value for name, value in os.environ.items() if name != "P2PSTATE_KEY"}
        message = {"t": "spawn", "id": number, "entry": entry, "environ": environ, "cwd": os.getcwd()}
        return send(self._node, self._template, message, fds)  # its reader notices when it has ended

    def _read_template(self) -> None:
        assert self._template is not None
        try:
            for message, _ in self._template.receive():
                self._handle_template(message)
            self._template.flush()
        except ChannelClosed:
            self._node.remove_reader(self._template.fileno())
            self._template.close()
            self._template, self._template_ready = None, False
            self._listener.on_template_ended("the process that workers are forked from has ended")

    def _handle_template(self, message: Message) -> None:
        if message["t"] == "template_ready":
            self._template_ready = True
            self._fork_missing()
        elif message["t"] == "spawned" and message["id"] not in self._waiting:
            self.helpers.launched(message["id"], message["pid"])
        elif message["t"] == "spawned":
            channel, outputs = self._waiting.pop(message["id"])
            output = WorkerOutput(self._node, self._writer, outputs, quiet=self._quiet)
            worker = WorkerProcess(message["pid"], channel, output=output)
            self.workers[worker.pid] = worker
            self._node.add_reader(channel.fileno(), lambda: self._read_worker(worker))
        elif message["t"] == "exited":
            ended = self.workers.get(message["pid"])
            if ended is not None:
                self._ended(ended, message["status"])
            self.helpers.ended(message["pid"], message["status"])

    # -- the workers

    def _read_worker(self, worker: WorkerProcess) -> None:
        try:
            messages = worker.channel.receive()
            worker.channel.flush()
        except ChannelClosed:
            self._node.remove_reader(worker.channel.fileno())
            worker.channel.close()
            worker.ended = True
            # A closed line means that the process is exiting; one that lives on regardless is of no use to anybody.
            self._node.call_later(EXIT_GRACE_S, lambda: self._kill_if_alive(worker))
            return
        for message, _ in messages:
            if message["t"] == "ready":
                worker.phase = Phase.SPARE
                self._listener.on_worker_ready(worker)
            else:
                self._listener.on_worker_message(worker, message)

    def _kill_if_alive(self, worker: WorkerProcess) -> None:
        if worker.pid in self.workers:
            self.kill(worker)

    def _ended(self, worker: WorkerProcess, status: int) -> None:
        if not worker.ended:
            self._read_worker(worker)  # what it said before it ended
        worker.output.read_rest()
        self._forget(worker)
        self._listener.on_worker_ended(worker, status)
        self._fork_missing()

    def _forget(self, worker: WorkerProcess) -> None:
        self.workers.pop(worker.pid, None)
        if not worker.channel.closed:
            self._node.remove_reader(worker.channel.fileno())
            worker.channel.close()
        worker.ended = True
        worker.output.close()


def _pipe(readers: contextlib.ExitStack, writers: contextlib.ExitStack) -> tuple[int, int]:
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    readers.callback(os.close, read_end)
    writers.callback(os.close, write_end)
    return read_end, write_end
