"""What the kernel tells of a process, whatever its interpreter does.

In: a process id, of a process that is not reaped yet. Out: its state, the processor time and the bytes it has used, and
for a person what its threads wait in. Invariant: never waits for the process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Vitals", "describe_threads", "python_stacks", "vitals_of"]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PY_SPY_S = 5.0
_MAX_THREADS = 64


@dataclass(frozen=True, slots=True)
class Vitals:
    """``state``: the letter of proc(5) of the main thread: R runs or could, S and D sleep, T is stopped by a signal, t
    by a debugger. ``cpu_s``, ``num_io_bytes``: of all its threads, since it began."""

    state: str
    cpu_s: float
    num_io_bytes: int


def vitals_of(pid: int) -> Vitals | None:
    """None when there is no such process any more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) * _TICK_S
        return Vitals(fields[0].decode(), cpu_s, _num_io_bytes(pid))
    except (OSError, IndexError, ValueError):
        return None


def _num_io_bytes(pid: int) -> int:
    """Read and written through descriptors; 0 where the kernel does not say."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["rchar"]) + int(counts["wchar"])


def describe_threads(pid: int) -> str:
    """One line per thread: its name, its state and the kernel function it sleeps in."""
    lines = []
    try:
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))[:_MAX_THREADS]:
            name = (task / "comm").read_text().strip()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            lines.append(f"thread {task.name} ({name}): state {state}, in {_wchan(task)}\n")
    except (OSError, IndexError):
        pass  # it, or a thread of it, ended meanwhile
    return "".join(lines)


def _wchan(task: Path) -> str:
    try:
        function = (task / "wchan").read_text()
    except OSError:
        return "?"
    return function if function not in ("", "0") else "user code"


def python_stacks(pid: int) -> str:
    """The stacks of a process that is stopped and cannot write them itself. Takes up to a few seconds."""
    beside = Path(sys.executable).with_name("py-spy")
    command = str(beside) if beside.exists() else shutil.which("py-spy")
    if command is None:
        return "its stacks cannot be read while it is stopped (py-spy, if installed, is used for that)\n"
    try:
        done = subprocess.run(
            [command, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PY_SPY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy could not read its stacks: {error}\n"
    return done.stdout or f"py-spy could not read its stacks: {done.stderr.strip()}\n"
