"""A loader worker process: tasks in, batches out, over one socket pair that only it and its trainer hold.

In: messages (serial number, kind) with a task, or with a descriptor of a packed object. Out: such messages for each
task, in order: a batch with the state behind it and the counters of this process, or what a data set raised.

Invariants: the process ends with its trainer, whatever it is doing (parent-death signal, and the end of the socket); a
task that was cancelled before it began is not done; of tasks that wait, the data set is told before they begin; what
was the trainer's garbage when it forked is not collected here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import signal
import socket
import struct
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data
from torch._utils import ExceptionWrapper

from p2pstate.data import memfd
from p2pstate.data.counters import COUNTERS
from p2pstate.data.fetching import SampleError, Spec, make_fetcher
from p2pstate.data.permutation import hash_words
from p2pstate.data.streams import seed_streams

__all__ = ["Done", "Failed", "receive", "send", "worker_main", "wrap"]

TASK, CANCEL, RESULT = 1, 2, 3
_MESSAGE = struct.Struct("<QB")  # serial number, kind
_MAX_INLINE_BYTES = 16 << 10  # of a task within its message
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Done:
    """A finished task."""

    value: Any
    state: Any  # of an iterable data set, behind this batch
    counters: dict[str, float]  # of the worker process, since it began


@dataclass(frozen=True, slots=True)
class Failed:
    """What a data set raised. ``wrapper.reraise()`` raises it again, with its traceback in the text."""

    wrapper: Any


def send(sock: socket.socket, serial: int, kind: int, value: Any = None) -> None:
    """One message. Raises OSError when the other side is gone or, with a timeout on the socket, does not read."""
    head = _MESSAGE.pack(serial, kind)
    if kind != RESULT:
        data = memfd.to_bytes(value)
        if len(data) <= _MAX_INLINE_BYTES:
            sock.send(head + data)
            return
    descriptor = memfd.pack(value)
    try:
        socket.send_fds(sock, [head], [descriptor])
    finally:
        os.close(descriptor)


def receive(sock: socket.socket) -> tuple[int, int, bytes | int] | None:
    """(serial, kind, bytes or descriptor of what was sent) of the next message; None when the other side is gone."""
    data, descriptors, _, _ = socket.recv_fds(sock, _MESSAGE.size + _MAX_INLINE_BYTES, 1)
    if not data:
        return None
    serial, kind = _MESSAGE.unpack_from(data)
    if descriptors:
        return serial, kind, descriptors[0]
    if len(data) == _MESSAGE.size:
        raise OSError(errno.EMFILE, "a batch could not be received: too many open files (ulimit -n)")
    return serial, kind, data[_MESSAGE.size :]


def wrap(error: SampleError, where: str) -> Any:
    """The data set's exception in a form that can be raised elsewhere, as the type it was where that is possible."""
    cause = error.__cause__ or error
    text = f"{where} ({error.where})"
    if not isinstance(cause, Exception) or isinstance(cause, StopIteration | StopAsyncIteration):
        # raised as what it is, it would end the trainer or look like the end of the data
        substitute = RuntimeError(f"{type(cause).__name__}: {cause}").with_traceback(cause.__traceback__)
        return ExceptionWrapper((RuntimeError, substitute, cause.__traceback__), text)
    wrapper = ExceptionWrapper((type(cause), cause, cause.__traceback__), text)
    if getattr(
        type(cause), "message", None
    ):  # then reraise() says message=, which not every type takes (groups do not)
        try:
            type(cause)(message="")  # type: ignore[call-arg]
        except Exception:
            wrapper.exc_type = RuntimeError  # its text says what it was
    return wrapper


def worker_main(
    sock: socket.socket,
    spec: Spec,
    init_fn: Callable[[int], None] | None,
    parent_pid: int | None,
    to_close: Sequence[Any],
) -> None:
    """Runs until the trainer closes its side. ``parent_pid``: of a process that forks or spawns workers itself.
    ``to_close``: the trainer's own, which a forked process must not keep open."""
    gc.freeze()  # what a forked process inherits is the trainer's to end: some objects crash without their threads
    _end_with_parent(parent_pid)
    for thing in to_close:
        thing.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides what an interrupt means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    seed = hash_words("worker", spec.seed, spec.worker)[0]
    seed_streams("worker", spec.seed, spec.worker)
    info = torch.utils.data._utils.worker.WorkerInfo(
        id=spec.worker, num_workers=spec.num_workers, seed=seed, dataset=spec.dataset
    )
    torch.utils.data._utils.worker._worker_info = info
    # torch's default_collate puts batches into named shared memory, for its own loader. Ours leave through memfd.py,
    # and a worker that is killed must not leave a name behind.
    torch.UntypedStorage._new_shared = classmethod(_new_storage)  # type: ignore[assignment]
    where = f"in loader worker {spec.worker} (pid {os.getpid()})"
    broken: Any = None
    if init_fn is not None:
        try:
            init_fn(spec.worker)
        except Exception as error:
            broken = ExceptionWrapper((type(error), error, error.__traceback__), f"{where} (in worker_init_fn)")
    COUNTERS.clear()
    code = 0
    try:
        _serve(sock, spec, where, broken)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the trainer is gone, or wants nothing any more
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # exit handlers belong to the trainer


def _new_storage(cls: type[torch.UntypedStorage], size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
    return cls(size, device=device)


def _serve(sock: socket.socket, spec: Spec, where: str, broken: Any) -> None:
    fetcher = make_fetcher(spec)
    waiting: deque[tuple[int, Any]] = deque()
    while _take(sock, waiting, fetcher):
        if not waiting:
            continue
        serial, task = waiting.popleft()
        if broken is not None:
            send(sock, serial, RESULT, Failed(broken))
            continue
        try:
            value, state = fetcher.fetch(task)
            reply: Done | Failed = Done(value, state, dict(COUNTERS))
        except SampleError as error:
            reply = Failed(wrap(error, where))
        try:
            send(sock, serial, RESULT, reply)
        except OSError as error:
            if isinstance(error, BrokenPipeError | ConnectionResetError):
                raise
            send(sock, serial, RESULT, Failed(ExceptionWrapper((type(error), error, error.__traceback__), where)))
        except Exception as error:
            if isinstance(reply, Failed):  # an exception whose type no other process knows; its text says what it is
                reply.wrapper.exc_type = RuntimeError
            else:
                text = f"{where} (this batch cannot be sent to the trainer: {task})"
                reply = Failed(ExceptionWrapper((type(error), error, error.__traceback__), text))
            send(sock, serial, RESULT, reply)


def _take(sock: socket.socket, waiting: deque[tuple[int, Any]], fetcher: Any) -> bool:
    """Take what has been sent; wait for something if nothing is to be done. False: the trainer closed its side."""
    while True:
        sock.setblocking(not waiting)
        try:
            message = receive(sock)
        except BlockingIOError:
            sock.setblocking(True)
            return True
        if message is None:
            return False
        serial, kind, packed = message
        if kind == CANCEL:
            waiting.clear()
            continue
        if isinstance(packed, bytes):
            task = memfd.from_bytes(packed)
        else:
            task = memfd.unpack(packed)
            os.close(packed)
        waiting.append((serial, task))
        fetcher.announce(task)


def _end_with_parent(parent_pid: int | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)  # the trainer ended before the signal was set
