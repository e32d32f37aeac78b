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

import torch

from p2pstate.errors import EXIT_CONFIG, ConfigError
from p2pstate.groups.status import STATUS
from p2pstate.observe.meter import METER
from p2pstate.worker.context import WorkerContext
from p2pstate.worker.entering import prepare
from p2pstate.worker.link import Link
from rendezvous.channel import Channel

__all__ = ["worker_main"]


def worker_main(sock: socket.socket) -> int:
    """Returns the process's exit code."""
    link = Link(Channel(sock, blocking=True))
    link.send("ready", pid=os.getpid())
    assignment = link.wait_assignment()
    assert assignment is not None
    context = prepare(link, assignment)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    code, text = _run_script(assignment["script"], assignment["args"], assignment["module"], context)
    if code == 0 and context.unfinished is not None:
        context.unfinished()
    if code == 0 and context.left_early:
        code = 1
        text = (
            f"the loop at {context.left_early} was left by break or return, and a fault came before all ranks had "
            "agreed that it ends: all workers start again"
        )
        print(f"p2pstate: {text}", file=sys.stderr)
    if code == 0 and context.failing:
        code, text = 1, "the script ended in the middle of a step, with exit code 0"
    sys.stdout.flush()
    sys.stderr.flush()
    _run_exit_handlers()
    link.send("event", kind="clock", clock=METER.report(all_of_it=True))
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


def _run_script(script: str, args: list[str], is_module: bool, context: WorkerContext) -> tuple[int, str]:
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
        context.failing = True
        if isinstance(error.code, int):
            return error.code, f"sys.exit({error.code})"
        print(error.code, file=sys.stderr)
        return 1, str(error.code)
    except BaseException as error:
        context.failing = True
        text = "".join(traceback.format_exception(type(error), error, _from_script(error.__traceback__)))
        print(text, file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1, text
    return 0, ""
