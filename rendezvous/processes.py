"""Processes of this host that are not our children: noticed by descriptors, ended without hitting a stranger.

Flows in: process ids, a variable in an environment. Flows out: pidfds, signals. Linux only.
Invariants: a signal goes to a process only while a descriptor of exactly that process is held, so a reused id is never
hit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it is gone already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel end this process with the thread that started it; at once if that is gone already, or
    the kernel refuses. Call it first thing in a child."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_marked(name: str, value: str) -> int:
    """SIGKILL every process of this user that was started with `name=value` in its environment; -> how many."""
    marker = f"{name}={value}".encode()
    num_killed = 0
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid() or not _is_marked(entry, marker):
            continue
        fd = open_pidfd(int(entry))
        if fd is None:
            continue
        try:
            if _is_marked(entry, marker):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    num_killed += 1
        finally:
            os.close(fd)
    return num_killed


def _is_marked(pid: str, marker: bytes) -> bool:
    try:
        return marker in Path("/proc", pid, "environ").read_bytes().split(b"\0")
    except OSError:
        return False
