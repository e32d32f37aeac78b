"""A worker process from its fork to its exit: wait for a rank, prepare torch, run the user's script.

In: the socket to the agent. Out: the exit code, and one last message that says how the script ended (``finished``, or
``failed`` with the traceback); a process that dies without it was killed.
"""

from __future__ import annotations

import atexit
import os
import runpy
import socket
import sys
import threading
import traceback
from types import TracebackType
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, Store

from p2pstate.errors import EXIT_CONFIG, ConfigError
from p2pstate.groups.install import install
from p2pstate.groups.registry import REGISTRY
from p2pstate.groups.status import STATUS
from p2pstate.types import RoundInfo
from p2pstate.worker.context import WorkerContext, enter
from p2pstate.worker.link import Link
from rendezvous.channel import Channel
from rendezvous.store import EpochStore, raise_or_return

__all__ = ["worker_main"]


class LinkStoreChannel:
    """rendezvous.store.StoreChannel over the line to the agent."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def request(self, epoch: int, op: str, args: list[Any], deadline_s: float) -> Any:
        reply = self._link.store_request(epoch, op, args, deadline_s)
        return raise_or_return(reply)


def worker_main(sock: socket.socket) -> int:
    """Returns the process's exit code."""
    link = Link(Channel(sock, blocking=True))
    link.send("ready", pid=os.getpid())
    assignment = link.wait_assignment()
    context = _prepare(link, assignment)
    code, text = _run_script(assignment["script"], assignment["args"], assignment["module"])
    if code == 0 and context.left_early:
        code = 1
        text = (
            f"the loop at {context.left_early} was left by break or return, and a fault came before all ranks had "
            "agreed that it ends: all workers start again"
        )
        print(f"p2pstate: {text}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    _run_exit_handlers()
    if code == 0:
        link.send("finished")
    else:
        # Alone, or after the loss of a peer, a script may fail although nothing is wrong with it.
        innocent = STATUS.solo or STATUS.error is not None or bool(context.left_early)
        link.send("failed", code=code, text=text, innocent=innocent)
    return code


def _from_script(tb: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that only start the script."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    inner = tb
    while inner is not None and inner.tb_frame.f_code.co_filename in own:
        inner = inner.tb_next
    return inner or tb


def _run_exit_handlers() -> None:
    """What the interpreter does at its end: this process ends in os._exit, being a fork of the template."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except Exception:
        traceback.print_exc()


def _prepare(link: Link, assignment: dict[str, Any]) -> WorkerContext:
    os.environ.update(assignment["environ"])
    rank, world_size = assignment["rank"], assignment["world_size"]
    epoch = assignment["epoch"]
    context = WorkerContext(
        link=link,
        rank=rank,
        local_rank=assignment["local_rank"],
        num_local=assignment["num_local"],
        world_size=world_size,
        fresh=assignment["fresh"],
        restore=assignment["restore"],
        info=RoundInfo.unpack(assignment["round"]) if assignment["fresh"] else None,
    )
    channel = LinkStoreChannel(link)

    def make_store(of_epoch: int) -> Store:
        store: Store = EpochStore(channel, of_epoch)
        return store

    def default_store() -> Store:
        if STATUS.solo:
            return HashStore()
        return make_store(STATUS.epoch)

    REGISTRY.make_store = make_store
    REGISTRY.rank, REGISTRY.world_size, REGISTRY.host = rank, world_size, assignment["host"]
    if context.fresh:
        STATUS.connect(epoch)
    else:
        STATUS.solo = True
    context.watch(REGISTRY, STATUS)
    install(REGISTRY, default_store)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    enter(context)
    return context


def _run_script(script: str, args: list[str], is_module: bool) -> tuple[int, str]:
    """Run it as ``__main__``. Returns (exit code, traceback or reason)."""
    sys.argv = [script, *args]
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return 0, ""
        if isinstance(error.code, int):
            return error.code, f"sys.exit({error.code})"
        print(error.code, file=sys.stderr)
        return 1, str(error.code)
    except BaseException as error:
        text = "".join(traceback.format_exception(type(error), error, _from_script(error.__traceback__)))
        print(text, file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1, text
    return 0, ""
