"""Functions run in processes of their own, forked from a server that has torch imported and has never used it.

In: a function of a test module and its arguments. Out: what it returned, or an AssertionError with its traceback. What
it installs, connects or breaks ends with its process; every wait here has a deadline.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, PrefixStore, Store

from p2pstate.groups.registry import Registry
from p2pstate.groups.status import Status

DEADLINE_S = 60.0  # only a hang takes this long

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.nn.parallel", "torch._dynamo", __name__])


class Child:
    """One process; :meth:`say` and :meth:`result` talk to it."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.line, theirs = _context.Pipe()
        self._process = _context.Process(target=_child, args=(theirs, function, args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def say(self, what: Any) -> None:
        self.line.send(what)

    def hear(self) -> Any:
        """The next thing that its function sent over ``line``; EOFError once it is dead."""
        assert self.line.poll(DEADLINE_S), "the child says nothing"
        return self.line.recv()

    def result(self) -> Any:
        kind, value = self.hear()
        self.end()
        assert kind == "returned", value
        return value

    def end(self) -> None:
        self._process.kill()
        self._process.join(DEADLINE_S)


def run_alone(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, elsewhere."""
    child = Child(_without_line, function, *args)
    try:
        return child.result()
    finally:
        child.end()


def start_ranks(function: Callable[..., Any], folder: Path, num_ranks: int, *args: Any) -> list[Child]:
    """``function(line, rank, num_ranks, folder, *args)`` in one process per rank."""
    return [Child(function, rank, num_ranks, str(folder), *args) for rank in range(num_ranks)]


def run_ranks(function: Callable[..., Any], folder: Path, num_ranks: int, *args: Any) -> list[Any]:
    """What each rank returned."""
    children = start_ranks(function, folder, num_ranks, *args)
    try:
        return [child.result() for child in children]
    finally:
        end_all(children)


def end_all(children: Sequence[Child]) -> None:
    for child in children:
        child.end()


def registry_of(rank: int, num_ranks: int, folder: str, status: Status) -> Registry:
    """As a worker has it, over a store in a file; round 1 is its first."""
    stores: list[Store] = []

    def make_store(epoch: int) -> Store:
        stores.append(PrefixStore(f"round {epoch}", FileStore(f"{folder}/store", num_ranks)))
        return stores[-1]

    registry = Registry(status)
    registry.make_store = make_store
    registry.host, registry.rank, registry.world_size = "127.0.0.1", rank, num_ranks
    status.loud = False  # as inside a training loop
    status.on_first_error = lambda error, epoch: registry.cut(epoch, replication=False)
    return registry


def _without_line(_line: Connection, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _child(line: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        outcome = ("returned", function(line, *args))
    except BaseException:
        outcome = ("raised", traceback.format_exc())
    line.send(outcome)
