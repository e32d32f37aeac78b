"""In-process restart alone: a function is run again after a fault, in every process that is still there.

In: a function that makes its process groups, loads what it has saved and trains. Out: its result, once it has come to
its end on every rank. Processes that died are replaced and call it as well; nobody's state is replicated.

Invariants: an attempt ends on all ranks before the next begins on any; between two attempts every process group is
gone, and so is what the failed attempt's frames held; an optimizer never steps on gradients of a collective that
failed.
Limits: one such function per script, and no :class:`Replicator` inside, which goes on in place by itself. Code that is
stuck outside of Python and of collectives is not interrupted.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError
from torch.optim.optimizer import register_optimizer_step_pre_hook

from p2pstate.errors import ConfigError, P2PStateError
from p2pstate.groups.registry import REGISTRY
from p2pstate.groups.status import STATUS
from p2pstate.groups.uncompiled import uncompiled
from p2pstate.types import Start
from p2pstate.user_errors import describe
from p2pstate.worker.context import WorkerContext, current, is_entered
from p2pstate.worker.link import RoundAborted

__all__ = ["restartable"]

P = ParamSpec("P")
T = TypeVar("T")

INTERRUPT_AFTER_S = 5.0  # an attempt that is over everywhere else, and goes on here without any collective
INTERRUPT_AGAIN_S = 1.0
END_POLL_S = 60.0

_used = False


class AttemptOver(BaseException):
    """Raised in code that would go on although its attempt is over; ``except Exception`` lets it pass."""


@overload
def restartable(function: Callable[P, T], /) -> Callable[P, T]: ...


@overload
def restartable(*, max_failures: int = ...) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


def restartable(function: Callable[..., Any] | None = None, /, *, max_failures: int = 3) -> Any:
    """Run ``function`` again after a fault, on all ranks, without starting the processes that survived anew.

    Under ``p2prun`` a death, a lost connection or an exception on any rank ends the attempt everywhere; then every rank
    calls ``function`` again, with the same arguments, from its beginning. It should make its process groups
    (``init_process_group``), load its own checkpoint, and go on. Started by anything else, it is called once, as it is.

    ``max_failures``: so often may it raise an exception of its own in this process; the next one is raised to the
    caller and ends the run. ``KeyboardInterrupt`` always is, and ``SystemExit``, unless the attempt is over anyway: a
    handler of the lost connection has exited. Raises ConfigError for a second function in one script.
    """
    if function is None:
        return functools.partial(_wrap, max_failures=max_failures)
    return _wrap(function, max_failures=max_failures)


def _wrap(function: Callable[P, T], *, max_failures: int) -> Callable[P, T]:
    if max_failures < 0:
        raise ValueError(f"max_failures={max_failures}: how often the function may fail, 0 or more")

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not is_entered():
            return function(*args, **kwargs)
        global _used
        if _used:
            raise ConfigError(
                "a second restartable function in one script: a process that replaces a dead one begins with the first "
                "and cannot meet the others; make one function of them"
            )
        _used = True
        return _Attempts(current(), functools.partial(function, *args, **kwargs), max_failures).run()

    return run


class _Attempts(Generic[T]):
    def __init__(self, context: WorkerContext, function: Callable[[], T], max_failures: int) -> None:
        self._context = context
        self._link = context.link
        self._function = function
        self._failures_left = max_failures

    def run(self) -> T:
        self._context.rerunning = True
        self._link.send("rerunnable")
        hook = register_optimizer_step_pre_hook(_refuse_garbage)
        try:
            while True:
                ended, value = self._attempt()
                if ended:
                    self._link.send("rerun_done")
                    return value  # type: ignore[return-value]
                self._next_round()
        finally:
            self._context.rerunning = False
            hook.remove()

    def _attempt(self) -> tuple[bool, T | None]:
        """(whether it came to its end on every rank, its value)."""
        try:
            with _interrupted_when_over():
                value = self._function()
            self._wait_for_all()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and STATUS.error is None):
                raise
            if STATUS.error is None:
                self._failed(error)
            _forget_frames(error)
            return False, None
        return True, value

    def _failed(self, error: BaseException) -> None:
        """The function's own exception: all ranks begin again, unless there were too many."""
        if self._failures_left <= 0:
            raise error
        self._failures_left -= 1
        print("p2pstate: the function failed and is run again on all ranks:", file=sys.stderr)
        traceback.print_exception(error)
        STATUS.fail(P2PStateError(describe(error)))

    def _wait_for_all(self) -> None:
        """Until every rank has come to the end. Raises what the store raises once the round is over."""
        assert REGISTRY.make_store is not None
        store = REGISTRY.make_store(STATUS.epoch)
        store.set(f"restartable/{self._context.rank}", "")
        keys = [f"restartable/{rank}" for rank in range(self._context.world_size)]
        while True:
            try:
                store.wait(keys, timedelta(seconds=END_POLL_S))
                return
            except DistStoreError:
                if STATUS.error is not None:
                    raise

    def _next_round(self) -> None:
        """Leave nothing of the attempt behind, and enter the next round with everybody."""
        epoch = STATUS.epoch
        REGISTRY.cut(epoch)
        REGISTRY.clear()
        if dist.is_initialized():
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        info = self._link.wait_round(epoch)
        while info.start != Start.RERUN:  # all workers are being replaced, this one as well
            info = self._link.wait_round(info.epoch)
        self._context.info = info
        STATUS.connect(info.epoch)
        if self._link.is_aborted(info.epoch):
            STATUS.fail(RoundAborted(self._link.abort_reason), info.epoch)


@uncompiled
def _refuse_garbage(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Collectives that DDP waits for in C++ cannot raise when they fail: their results must not be used."""
    if STATUS.error is not None:
        raise AttemptOver(f"this attempt is over: {STATUS.error}")


@contextmanager
def _interrupted_when_over() -> Iterator[None]:
    """Code that uses no collective does not see that the attempt is over: raise it there, after a while."""
    thread_id = threading.get_ident()
    left = threading.Event()

    def watch() -> None:
        while not left.wait(INTERRUPT_AGAIN_S):
            if STATUS.error is None or left.wait(INTERRUPT_AFTER_S):
                continue
            with lock:
                if not left.is_set():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(AttemptOver))

    lock = threading.Lock()
    watcher = threading.Thread(target=watch, name="p2pstate-interrupter", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        with lock:
            left.set()


def _forget_frames(error: BaseException) -> None:
    """What the frames of a failed attempt hold (models, batches) must be gone before the next one begins."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        pending += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]  # of a group
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = each.__cause__ = each.__context__ = None
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        if hasattr(sys, name):
            delattr(sys, name)
