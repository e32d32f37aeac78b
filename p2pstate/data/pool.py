"""The trainer's side of loader workers: tasks are handed out, results come back, and a lost worker is replaced.

In: tasks for numbered workers. Out: results by serial number, in whatever order they are asked for; or exceptions:
what a data set raised, or LoaderError.

Invariants: tasks of one worker are done in the order they were given; a worker that dies, is killed or is stopped is
replaced, and the tasks it had not answered are given to its successor; no wait lasts longer than ``timeout_s``; workers
end with this process, and are killed when the pool is closed or forgotten.
Known limit: a worker is forked by the thread that asks for a batch, ends when that thread does, and is then replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import select
import signal
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from typing import Any

from p2pstate.data import memfd
from p2pstate.data.counters import COUNTERS
from p2pstate.data.fetching import SampleError, Spec, make_fetcher
from p2pstate.data.streams import kept
from p2pstate.data.worker import CANCEL, TASK, Done, Failed, receive, send, worker_main, wrap

__all__ = ["InProcess", "LoaderError", "Packed", "Pool"]

logger = logging.getLogger("p2pstate.data")

MAX_LOSSES = 3  # of workers in a row, without a result between them
LOOK_EVERY_S = 1.0  # at a worker that lets one wait
STOPPED_FOR_S = 5.0  # until a worker that somebody stopped is replaced
SEND_WITHIN_S = 10.0
CLOSE_WITHIN_S = 0.5  # how long workers may finish what they are at when the loader is closed
REAP_WITHIN_S = 5.0


class LoaderError(RuntimeError):
    """Loader workers cannot go on; the message says which, why, and what they were reading."""


@dataclass(slots=True)
class Packed:
    """A result that lies in shared memory; ``descriptor`` belongs to whoever holds this."""

    descriptor: int
    num_bytes: int

    def unpack(self) -> Any:
        return memfd.unpack(self.descriptor)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()


class InProcess:
    """What a pool is, without processes: a task is done when its result is asked for. The random streams stay, and are
    not looked at for a data set that draws nothing."""

    num_workers = 1

    def __init__(self, spec: Spec) -> None:
        self._fetcher = make_fetcher(spec)
        self._keeps_streams = getattr(spec.dataset, "draws_random", True)
        self._before = dict(COUNTERS)  # what others in this process have counted
        self._serial = 0
        self._tasks: dict[int, Any] = {}

    @property
    def pids(self) -> list[int]:
        return []

    def submit(self, worker: int, task: Any) -> int:
        self._serial += 1
        self._tasks[self._serial] = task
        return self._serial

    def num_arrived(self, serials: Iterable[int]) -> int:
        """Nothing is there before it is asked for."""
        return 0

    def peek(self, serial: int) -> None:
        """As num_arrived."""

    def result(self, serial: int) -> tuple[Done, None]:
        try:
            with kept() if self._keeps_streams else contextlib.nullcontext():
                value, state = self._fetcher.fetch(self._tasks.pop(serial))
        except SampleError as error:
            wrap(error, "in the trainer's process").reraise()
            raise AssertionError("not reached") from error
        counters = {name: amount - self._before.get(name, 0.0) for name, amount in COUNTERS.items()}
        return Done(value, state, counters), None

    def cancel(self) -> None:
        self._tasks.clear()

    def close(self) -> None:
        self.cancel()


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    sock: socket.socket
    tasks: dict[int, Any]  # by serial, in order, not answered yet
    num_losses: int = 0  # of processes in this place since its last result
    stopped_since: float | None = None


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@dataclass(eq=False)
class Pool:
    """Processes for one loader.

    Args:
        spec: as worker 0 of one has it.
        resume: what a replacement of worker n has to do first, so that it is where the lost one was.
        timeout_s: how long a result may take.
    """

    spec: Spec
    num_workers: int
    timeout_s: float
    context: Any = None
    init_fn: Callable[[int], None] | None = None
    resume: Callable[[int], Sequence[Any]] = lambda _: ()
    _owner_pid: int = field(default_factory=os.getpid)
    _workers: list[_Worker] = field(default_factory=list)
    _serial: int = 0
    _results: dict[int, Packed] = field(default_factory=dict)
    _wanted: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.context is None:
            self.context = multiprocessing.get_context("fork")
        _pools.add(self)
        self._workers = [self._start(number, {}) for number in range(self.num_workers)]

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid or 0 for worker in self._workers]

    def submit(self, worker: int, task: Any) -> int:
        """Hand a task out; returns its serial number."""
        self._serial += 1
        serial = self._serial
        self._wanted.add(serial)
        self._workers[worker].tasks[serial] = task
        with self._forgetting(serial):
            self._send(worker, serial, TASK, task)
        return serial

    def num_arrived(self, serials: Iterable[int]) -> int:
        """How many of these results are here. Takes in whatever has come, and replaces workers that died."""
        self._look(0)
        return sum(serial in self._results for serial in serials)

    def peek(self, serial: int) -> Any:
        """The reply, if it is here, which stays to be asked for."""
        packed = self._results.get(serial)
        return packed.unpack() if packed is not None else None

    def result(self, serial: int) -> tuple[Done, Packed]:
        """Waits for it. Raises what the data set raised, or LoaderError."""
        left_s = self.timeout_s
        with self._forgetting(serial):
            while serial not in self._results:
                if left_s <= 0:
                    self._too_late(serial)
                wait_s, began = min(LOOK_EVERY_S, left_s, self.timeout_s / 4), time.monotonic()
                self._look(wait_s)
                # a suspended job or machine is no fault of the workers': what goes beyond the wait does not count
                left_s -= min(wait_s, time.monotonic() - began)
                self._replace_stopped()
        packed = self._results.pop(serial)
        self._wanted.discard(serial)
        reply = packed.unpack()
        if isinstance(reply, Failed):
            reply.wrapper.reraise()
        return reply, packed

    def cancel(self) -> None:
        """Forget everything that was asked for."""
        self._wanted.clear()
        self._results.clear()
        for number, worker in enumerate(self._workers):
            worker.tasks.clear()
            self._send(number, 0, CANCEL)

    def close(self) -> None:
        workers, self._workers = self._workers, []
        if self._owner_pid != os.getpid():
            return  # a forked process has copies of these objects
        for worker in workers:
            with contextlib.suppress(OSError):  # it is gone already
                worker.sock.shutdown(
                    socket.SHUT_RDWR
                )  # closing is not the end where forked processes have it open, too
            worker.sock.close()
        deadline = time.monotonic() + CLOSE_WITHIN_S
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.join(REAP_WITHIN_S)
        self._results.clear()

    def __del__(self) -> None:
        self.close()

    # -- inside

    @contextlib.contextmanager
    def _forgetting(self, serial: int) -> Iterator[None]:
        """If the block fails, nobody waits for this result any more."""
        try:
            yield
        except BaseException:
            self._wanted.discard(serial)
            for worker in self._workers:
                worker.tasks.pop(serial, None)
            raise

    def _start(self, number: int, tasks: dict[int, Any]) -> _Worker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forked = self.context.get_start_method() == "fork"
        to_close = [ours, *(other.sock for other in self._workers), *self._results.values()] if forked else []
        parent = None if self.context.get_start_method() == "forkserver" else os.getpid()
        spec = replace(self.spec, worker=number, num_workers=self.num_workers)
        process = self.context.Process(
            target=worker_main, args=(theirs, spec, self.init_fn, parent, to_close), daemon=True
        )
        process.name = f"loader worker {number}"
        process.start()
        theirs.close()
        ours.settimeout(SEND_WITHIN_S)
        return _Worker(process, ours, tasks)

    def _send(self, number: int, serial: int, kind: int, task: Any = None) -> bool:
        """False: the worker was replaced, and its successor has all of its tasks."""
        try:
            send(self._workers[number].sock, serial, kind, task)
        except OSError as error:
            self._replace(number, f"cannot be sent a task ({error})")
            return False
        return True

    def _look(self, wait_s: float) -> None:
        """Take in results for at most ``wait_s`` until one comes."""
        poll = select.poll()
        numbers = {worker.sock.fileno(): number for number, worker in enumerate(self._workers)}
        for descriptor in numbers:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(wait_s * 1000):
            self._take(numbers[descriptor])

    def _take(self, number: int) -> None:
        worker = self._workers[number]
        while True:
            worker.sock.setblocking(False)
            try:
                message = receive(worker.sock)
            except BlockingIOError:
                worker.sock.settimeout(SEND_WITHIN_S)
                return
            except ConnectionResetError:
                message = None
            if message is None:
                worker.process.join(LOOK_EVERY_S)
                self._replace(number, _how_it_ended(worker.process))
                return
            serial, _, descriptor = message
            assert isinstance(descriptor, int), "results always come in memory of their own"
            packed = Packed(descriptor, memfd.size_of(descriptor))
            worker.num_losses, worker.stopped_since = 0, None
            worker.tasks.pop(serial, None)
            if serial in self._wanted:
                self._results[serial] = packed

    def _replace_stopped(self) -> None:
        """A worker that somebody stopped, and that has something to do, is not waited for any longer."""
        now, patience_s = time.monotonic(), min(STOPPED_FOR_S, self.timeout_s / 2)
        for number, worker in enumerate(self._workers):
            if not worker.tasks or _state_of(worker.process.pid) != "T":
                worker.stopped_since = None
            elif worker.stopped_since is None:
                worker.stopped_since = now
            elif now - worker.stopped_since >= patience_s:
                self._replace(number, "was stopped by a signal and did not go on")

    def _replace(self, number: int, why: str) -> None:
        lost = self._workers[number]
        pid = lost.process.pid
        lost.sock.close()
        lost.process.kill()
        lost.process.join(REAP_WITHIN_S)
        num_losses = lost.num_losses + 1
        reading = next(iter(lost.tasks.values()), "nothing")
        sentence = f"loader worker {number} (pid {pid}) {why}; it was reading {reading}"
        fresh = self._workers[number] = self._start(number, lost.tasks)
        fresh.num_losses = num_losses % MAX_LOSSES
        for serial, task in [*((0, task) for task in self.resume(number)), *lost.tasks.items()]:
            if not self._send(number, serial, TASK, task):
                break
        if num_losses == MAX_LOSSES:
            raise LoaderError(
                f"{sentence}. {num_losses} processes in a row were lost there without one result: look for memory that "
                "ran out (the kernel's log), or for a crash in a library that reads these samples"
            )
        logger.warning("%s. Another process takes its place", sentence)

    def _too_late(self, serial: int) -> None:
        for number, worker in enumerate(self._workers):
            if serial in worker.tasks:
                pid, state = worker.process.pid, _state_of(worker.process.pid)
                reading = worker.tasks[serial]
                worker.process.kill()  # a process that hangs is no use to the next attempt
                raise LoaderError(
                    f"loader worker {number} (pid {pid}, state {state}) gave no batch for {self.timeout_s:.3g} s; it "
                    f"is at {reading}. If reading takes that long, give the loader a larger timeout=; else the data "
                    "set or its storage hangs"
                )
        raise LoaderError(f"a batch was not given to any loader worker within {self.timeout_s:.3g} s")


def _how_it_ended(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None:
        return "closed its line"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _state_of(pid: int | None) -> str:
    """The letter of a process's state, as in ps."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


@atexit.register
def _close_all() -> None:
    """Before multiprocessing's own exit handler, which waits for children without end, stopped ones included."""
    for pool in list(_pools):
        with contextlib.suppress(OSError):
            pool.close()
