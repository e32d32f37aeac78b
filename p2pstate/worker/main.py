"""A worker process from its fork to its exit: wait for a rank, prepare torch, run the user's script.

In: the socket to the agent. Out: the exit code, and one last message that says how the script ended (``finished``, or
``failed`` with the traceback); a process that dies without it was killed.
"""

from __future__ import annotations

import os
import socket
import sys

from p2pstate.errors import EXIT_CONFIG, ConfigError
from p2pstate.groups.status import STATUS
from p2pstate.observe.meter import METER
from p2pstate.worker.context import WorkerContext
from p2pstate.worker.entering import prepare
from p2pstate.worker.link import Link
from p2pstate.worker.script import describe_exception, run_as_main, run_exit_handlers, use_threads
from rendezvous.channel import Channel

__all__ = ["worker_main"]


def worker_main(sock: socket.socket) -> int:
    """Returns the process's exit code."""
    link = Link(Channel(sock, blocking=True))
    link.send("ready", pid=os.getpid())
    assignment = link.wait_assignment()
    assert assignment is not None
    context = prepare(link, assignment)
    use_threads()
    code, text = _run_script(assignment["script"], assignment["args"], assignment["module"], context)
    if context.is_forked:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code == 0 and context.unfinished is not None:
        context.unfinished()
    if code == 0 and context.left_early:
        code, text = 1, f"{context.why_left}: all workers start again"
        print(f"p2pstate: {text}", file=sys.stderr)
    if code == 0 and context.failing:
        code, text = 1, "the script ended in the middle of a step, with exit code 0"
    if context.loop and context.passes_by:
        print(f"p2pstate: {context.why_ended_early}", file=sys.stderr)
        code, text = (code, text) if code else (1, context.why_ended_early)
    sys.stdout.flush()
    sys.stderr.flush()
    run_exit_handlers()
    link.send("event", kind="clock", clock=METER.report(all_of_it=True))
    if code == 0:
        link.send("finished")
    else:
        # Alone, or after the loss of a peer, a script may fail although nothing is wrong with it.
        innocent = STATUS.solo or STATUS.error is not None or bool(context.left_early)
        link.send("failed", code=code, text=text, innocent=innocent)
    return code


def _run_script(script: str, args: list[str], is_module: bool, context: WorkerContext) -> tuple[int, str]:
    """Run it as ``__main__``. Returns (exit code, traceback or reason)."""
    try:
        run_as_main(script, args, is_module)
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
        text = describe_exception(error)
        print(text, file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1, text
    return 0, ""
