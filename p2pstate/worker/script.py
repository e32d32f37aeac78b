"""A user's script as ``__main__`` of a process that was forked, and what an interpreter does at its end.

In: a script or module and its arguments. Out: it runs; its exceptions are the caller's, without the frames that only
start it. Known limit: the module ``__main__`` is runpy's, as under ``python -m runpy``.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from types import TracebackType

import torch

__all__ = ["describe_exception", "python_main", "run_as_main", "run_exit_handlers", "use_threads"]


def use_threads() -> None:
    """As many as OMP_NUM_THREADS says: torch was imported before this process's environment was known."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def run_as_main(script: str, args: Sequence[str], is_module: bool) -> None:
    """Raises whatever the script raises, SystemExit included."""
    sys.argv = [script, *args]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")


def describe_exception(error: BaseException) -> str:
    """Its traceback, from the script on."""
    inner: TracebackType | None = error.__traceback__
    while inner is not None and _only_starts(inner.tb_frame.f_code.co_filename):
        inner = inner.tb_next
    return "".join(traceback.format_exception(type(error), error, inner or error.__traceback__))


def _only_starts(file: str) -> bool:
    """This file, or the one beside it that calls it."""
    return file in (runpy.__file__, "<frozen runpy>") or os.path.dirname(file) == os.path.dirname(__file__)


def run_exit_handlers() -> None:
    """What the interpreter does at its end: this process ends in os._exit, being a fork of the template."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except Exception:
        traceback.print_exc()


def python_main(arguments: Sequence[str]) -> int:
    """As ``python ARGUMENTS``: ``[-u] SCRIPT ...`` or ``[-u] -m MODULE ...``. Returns the exit code."""
    from rendezvous.autoload import autoload

    autoload()  # which torch's import did before this process's environment was known
    if "OMP_NUM_THREADS" in os.environ:
        use_threads()
    rest = list(arguments)
    if rest[0] == "-u":
        rest.pop(0)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    is_module = rest[0] == "-m"
    if is_module:
        rest.pop(0)
    code = 0
    try:
        run_as_main(rest[0], rest[1:], is_module)
    except SystemExit as error:
        if isinstance(error.code, int):
            code = error.code
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            code = 1
    except BaseException as error:
        print(describe_exception(error), end="", file=sys.stderr)
        code = 1
    run_exit_handlers()
    return code
