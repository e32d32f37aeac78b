"""How much memory this process can still take, and what stands in the way first.

In: /proc and the control groups, below a root that tests may put elsewhere. Out: every bound with what is left of it:
the host's memory, the limit of the own control group and of each group around it (versions 1 and 2, wherever they are
mounted), and the process's address space.

Invariants: nothing is written; a file that is not there or cannot be understood is no bound. Clean file pages of a
control group count as free: the kernel drops them before it ends a process.
Known limits: swap is not counted; RLIMIT_MEMLOCK bounds pinned memory, of which none is taken so far.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from p2pstate.sizes import mib

__all__ = ["Bound", "address_space", "bounds", "room"]

_UNLIMITED_BYTES = 1 << 60  # version 1 writes "no limit" as a number close to 2**63


@dataclass(frozen=True, slots=True)
class Bound:
    """``left_bytes`` can still be taken before ``what`` stops it."""

    left_bytes: int
    what: str


def room(root: Path = Path("/"), pid: str = "self") -> Bound:
    """The bound that is reached first, by whatever a node's processes take together."""
    return min(bounds(root, pid), key=lambda bound: bound.left_bytes, default=Bound(_UNLIMITED_BYTES, "nothing known"))


def bounds(root: Path = Path("/"), pid: str = "self") -> list[Bound]:
    """What bounds a node's processes together: the host and the control groups, the innermost first."""
    return [*_groups(root, pid), *_host(root)]


def address_space(root: Path = Path("/"), pid: str = "self") -> Bound | None:
    """What is left of this one process's own limit (RLIMIT_AS); None when it has none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    used = _fields(root / "proc" / pid / "status", "VmSize:")
    return Bound(max(0, soft - used.get("VmSize:", 0) * 1024), f"the process's address space (ulimit -v), {mib(soft)}")


def _host(root: Path) -> list[Bound]:
    found = _fields(root / "proc" / "meminfo", "MemAvailable:")
    return [Bound(number * 1024, "the host's available memory") for number in found.values()]


def _groups(root: Path, pid: str) -> Iterator[Bound]:
    mounts = list(_mounts(root / "proc" / pid / "mountinfo"))
    for line in _lines(root / "proc" / pid / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for mount in mounts:
            if mount.version == (2 if not controllers else 1 if "memory" in controllers.split(",") else 0):
                yield from _chain(root, mount, path)


@dataclass(frozen=True, slots=True)
class _Mount:
    version: int
    shown: str  # the group that is seen at ``point``: the own one or one around it, in a container
    point: str


def _mounts(mountinfo: Path) -> Iterator[_Mount]:
    for line in _lines(mountinfo):
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield _Mount(2, fields[3], fields[4])
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield _Mount(1, fields[3], fields[4])


def _chain(root: Path, mount: _Mount, path: str) -> Iterator[Bound]:
    """The bounds of the group ``path`` and of all around it, as far as they are seen."""
    shown = mount.shown.rstrip("/")
    # A group outside of what is mounted (seen from a container with a name space of its own): what is there is ours.
    inside = path.removeprefix(shown) if path == shown or path.startswith(f"{shown}/") else ""
    top = root / mount.point.lstrip("/")
    group = top / inside.strip("/")
    while True:
        bound = _unified(group) if mount.version == 2 else _legacy(group)
        if bound is not None:
            yield bound
        if group == top:
            return
        group = group.parent


def _unified(group: Path) -> Bound | None:
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(group / name)) is not None]
    return _of_group(group, limits, group / "memory.current", "inactive_file")


def _legacy(group: Path) -> Bound | None:
    limit = _number(group / "memory.limit_in_bytes")
    limits = [limit] if limit is not None and limit < _UNLIMITED_BYTES else []
    return _of_group(group, limits, group / "memory.usage_in_bytes", "total_inactive_file")


def _of_group(group: Path, limits: list[int], usage: Path, reclaimable: str) -> Bound | None:
    used = _number(usage)
    if not limits or used is None:
        return None
    used -= _fields(group / "memory.stat", reclaimable).get(reclaimable, 0)
    return Bound(max(0, min(limits) - max(0, used)), f"the memory limit of control group {group}, {mib(min(limits))}")


def _number(path: Path) -> int | None:
    """None for a file that is not there, and for "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path, *names: str) -> dict[str, int]:
    """Numbers that follow these words at the beginning of a line."""
    found = {}
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] in names and words[1].isdecimal():
            found[words[0]] = int(words[1])
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
