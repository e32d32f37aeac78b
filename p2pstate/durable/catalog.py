"""Which checkpoints are on storage, which of them can be used, and which may be deleted.

In: storage with one folder per save, ``<serial>-step<step>``. Out: what each of them is, the newest first;
the reason why one cannot be used; names to delete. Listing reads manifests only, verifying reads every byte.

Invariants: a save without ``.metadata`` is no checkpoint, whatever else it has; nothing is decided from the times of
files; the newest complete checkpoint is never deleted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from p2pstate.durable.files import digest_of
from p2pstate.durable.manifest import MANIFEST, METADATA, Damaged, Manifest
from p2pstate.durable.storage import Storage

__all__ = ["Found", "damaged_files", "delete", "deleted_since", "find", "list_checkpoints", "next_name", "to_delete"]
__all__ += ["written_by_others"]

_NAME = re.compile(r"(\d{6,})-step(\d+)")


@dataclass(frozen=True, slots=True)
class Found:
    """``problem``: why it cannot be used; empty for a complete one, whose bytes may still turn out to be damaged.
    ``interrupted``: the save did not come to its end (or has not yet), nothing else is known to be wrong.
    ``unreadable``: storage failed when it was looked at, so nothing is known of it."""

    storage: Storage
    name: str
    serial: int
    step: int
    problem: str = ""
    interrupted: bool = False
    unreadable: bool = False
    manifest: Manifest | None = None

    @property
    def path(self) -> str:
        """For people."""
        return f"{self.storage.where}/{self.name}"

    def open(self, name: str) -> BinaryIO:
        """A file of a complete checkpoint, from the copy that is read fastest."""
        assert self.manifest is not None
        return self.storage.open_nearest(self.name, name, self.manifest.files[name])


def list_checkpoints(storage: Storage) -> list[Found]:
    """The newest first; empty when nothing was ever saved. Raises OSError when the place cannot be read, or some saves
    cannot, and none of the others is complete. What a running job deletes meanwhile is passed over."""
    found = [find(storage, name) for name in storage.saves() if _NAME.fullmatch(name)]
    if any(each.problem for each in found):
        still_there = set(storage.saves())
        found = [each for each in found if each.name in still_there]
    unreadable = [f"{each.name} {each.problem}" for each in found if each.unreadable]
    if unreadable and all(each.problem for each in found):
        raise OSError("; ".join(unreadable))
    return sorted(found, key=lambda each: each.serial, reverse=True)


def find(storage: Storage, name: str) -> Found:
    """Look at one save: are all of its files there, with the right sizes?"""
    match = _NAME.fullmatch(name)
    serial, step = (int(match[1]), int(match[2])) if match else (0, 0)
    try:
        return _look(storage, name, serial, step)
    except OSError as error:
        return Found(storage, name, serial, step, f"cannot be read: {error.strerror or error}", unreadable=True)


def _look(storage: Storage, name: str, serial: int, step: int) -> Found:
    sizes = storage.sizes(name)
    if MANIFEST not in sizes:
        if METADATA in sizes:
            return Found(storage, name, serial, step, f"{MANIFEST} is missing")
        return Found(storage, name, serial, step, "interrupted before it was complete", interrupted=True)
    try:
        with storage.open(name, MANIFEST) as file:
            manifest = Manifest.unpack(file.read())
    except FileNotFoundError:
        return Found(storage, name, serial, step, "being deleted", interrupted=True)
    except (Damaged, ValueError, KeyError, TypeError) as error:
        return Found(storage, name, serial, step, f"{MANIFEST} is damaged: {error}")
    if METADATA not in sizes:
        problem = f"interrupted: {METADATA} was not published"
        return Found(storage, name, serial, step, problem, interrupted=True)
    for file_name, (size, _) in sorted(manifest.files.items()):
        if file_name not in sizes:
            return Found(storage, name, serial, step, f"{file_name} is missing", manifest=manifest)
        if sizes[file_name] != size:
            problem = f"{file_name} has {sizes[file_name]} bytes instead of {size}"
            return Found(storage, name, serial, step, problem, manifest=manifest)
    return Found(storage, name, serial, manifest.version.step, manifest=manifest)


def damaged_files(
    found: Found, names: Iterable[str] | None = None, progress: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """Read files of a complete checkpoint (all, or ``names``); returns one sentence per file that is not as written."""
    assert found.manifest is not None
    wrong = []
    for name in sorted(found.manifest.files if names is None else names):
        size, digest = found.manifest.files[name]
        try:
            with found.storage.open(found.name, name) as file:
                actual = digest_of(file)
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error.strerror or error}")
            continue
        if actual != (size, digest):
            wrong.append(f"{name} is damaged: its digest is not that of what was written")
        progress(size)
    return wrong


def deleted_since(found: Found) -> bool:
    """Whether a checkpoint that was complete has been deleted, or is being: its marker goes first. Raises OSError."""
    return found.storage.size(found.name, METADATA) is None


def next_name(storage: Storage, step: int, newest: str = "") -> str:
    """A name that no save has had: serials only grow, so the newest save has the highest. ``newest``: of this run, as
    lists may show it late. Raises OSError."""
    serials = [int(match[1]) for match in map(_NAME.fullmatch, [*storage.saves(), newest]) if match]
    return f"{max(serials, default=0) + 1:06d}-step{step}"


def written_by_others(existing: Iterable[Found], run: tuple[str, str], first: str) -> list[Found]:
    """Complete saves that other runs have made since ``run`` made its first one, which is called ``first``."""
    since = int(first.partition("-")[0])
    return [
        found
        for found in existing
        if found.serial >= since and found.manifest is not None and found.manifest.run != run
    ]


def to_delete(existing: Sequence[Found], keep: int, run: tuple[str, str], first: str) -> list[Found]:
    """Once the newest complete one has been published: older ones beyond ``keep``, and older saves that are nothing.

    ``existing``: the newest first. What is damaged is kept while fewer than ``keep`` complete ones exist: a person may
    still get something out of it. Where other runs write as well, only what is known to be of ``run`` may go (see
    :func:`written_by_others`).
    """
    if written_by_others(existing, run, first):
        existing = [found for found in existing if found.manifest is not None and found.manifest.run == run]
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
    found.storage.delete(found.name, METADATA)
