"""Which checkpoints are in a directory, which of them can be used, and which may be deleted.

In: a directory with one subdirectory per save, ``<serial>-step<step>``. Out: what each of them is, the newest first;
the reason why one cannot be used; names to delete. Listing reads manifests only, verifying reads every byte.

Invariants: a save without ``.metadata`` is no checkpoint, whatever else it has; nothing is decided from the times of
files; the newest complete checkpoint is never deleted.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pstate.durable.files import digest_of_file
from p2pstate.durable.manifest import MANIFEST, METADATA, Damaged, Manifest

__all__ = ["Found", "damaged_files", "delete", "find", "list_checkpoints", "next_name", "to_delete"]

_NAME = re.compile(r"(\d{6,})-step(\d+)")


@dataclass(frozen=True, slots=True)
class Found:
    """``problem``: why it cannot be used; empty for a complete one, whose bytes may still turn out to be damaged.
    ``interrupted``: the save did not come to its end (or has not yet), nothing else is known to be wrong."""

    path: Path
    serial: int
    step: int
    problem: str = ""
    interrupted: bool = False
    manifest: Manifest | None = None

    @property
    def name(self) -> str:
        return self.path.name


def list_checkpoints(root: Path) -> list[Found]:
    """The newest first; empty when ``root`` does not exist. Raises OSError when it cannot be read."""
    try:
        entries = [(entry, match) for entry in root.iterdir() if (match := _NAME.fullmatch(entry.name))]
    except FileNotFoundError:
        return []
    found = [find(entry, int(match[1]), int(match[2])) for entry, match in entries if entry.is_dir()]
    return sorted(found, key=lambda each: each.serial, reverse=True)


def find(path: Path, serial: int = 0, step: int = 0) -> Found:
    """Look at one save: are all of its files there, with the right sizes?"""
    try:
        content = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        if (path / METADATA).exists():
            return Found(path, serial, step, f"{MANIFEST} is missing")
        return Found(path, serial, step, "interrupted before it was complete", interrupted=True)
    try:
        manifest = Manifest.unpack(content)
    except (Damaged, ValueError, KeyError, TypeError) as error:
        return Found(path, serial, step, f"{MANIFEST} is damaged: {error}")
    if not (path / METADATA).exists():
        return Found(path, serial, step, f"interrupted: {METADATA} was not published", interrupted=True)
    for name, (size, _) in sorted(manifest.files.items()):
        try:
            actual = (path / name).stat().st_size
        except FileNotFoundError:
            return Found(path, serial, step, f"{name} is missing", manifest=manifest)
        if actual != size:
            return Found(path, serial, step, f"{name} has {actual} bytes instead of {size}", manifest=manifest)
    return Found(path, serial, manifest.version.step, manifest=manifest)


def damaged_files(
    found: Found, names: Iterable[str] | None = None, progress: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """Read files of a complete checkpoint (all, or ``names``); returns one sentence per file that is not as written."""
    assert found.manifest is not None
    wrong = []
    for name in sorted(found.manifest.files if names is None else names):
        size, digest = found.manifest.files[name]
        try:
            actual = digest_of_file(found.path / name)
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error.strerror}")
            continue
        if actual != (size, digest):
            wrong.append(f"{name} is damaged: its digest is not that of what was written")
        progress(size)
    return wrong


def next_name(existing: Sequence[Found], step: int) -> str:
    """A name that no save has had: serials only grow, so the newest save has the highest."""
    serial = max((found.serial for found in existing), default=0) + 1
    return f"{serial:06d}-step{step}"


def to_delete(existing: Sequence[Found], keep: int) -> list[Found]:
    """Once the newest complete one has been published: older ones beyond ``keep``, and older saves that are nothing.

    ``existing``: the newest first. What is damaged is kept while fewer than ``keep`` complete ones exist: a person may
    still get something out of it.
    """
    complete = [found for found in existing if not found.problem]
    if not complete:
        return []
    newest = complete[0].serial
    kept = {found.serial for found in complete[:keep]}
    enough = len(complete) >= keep
    return [
        found
        for found in existing
        if found.serial < newest and found.serial not in kept and (not found.problem or found.interrupted or enough)
    ]


def delete(found: Found) -> None:
    """Remove a save, its marker first: what is left of it after a crash is no checkpoint. Raises OSError."""
    (found.path / METADATA).unlink(missing_ok=True)
    shutil.rmtree(found.path)
