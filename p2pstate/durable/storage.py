"""Where checkpoints are: saves by name, each of them a flat set of files. The interface, and a directory as storage.

In: names, files that were made in a local folder (the *workspace* of a save). Out: the same files on storage, whole or
absent, and their bytes again. What is on other than local file systems is in remote.py. Calls raise OSError when
storage fails, whatever the reason; they may take as long as storage takes.

Invariants: a file that :meth:`Storage.store` returned for was read back from storage, and its bytes outlive a crash; so
does its name after :meth:`Storage.settle`. A save is deleted marker first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO, Protocol

from p2pstate.durable.files import digest_of_file, sync_directory

__all__ = ["Directory", "Storage"]


class Storage(Protocol):
    """Five things to write with, five to read with, and one to delete. Lists may show late what was stored."""

    @property
    def where(self) -> str:
        """For people, and what this storage can be opened by again."""

    def begin(self, save: str) -> None:
        """Make room for a new save, which outlives a crash."""

    def workspace(self, save: str) -> Path:
        """The local folder in which this node makes its files of a save; those of other saves may be removed."""

    def store(self, save: str, source: Path, name: str, *, lasting: bool = True) -> tuple[int, str]:
        """Put a finished file of the workspace on storage, in one step; (bytes, digest) of what is read back from
        there. Not ``lasting``: it need not outlive a crash."""

    def settle(self, save: str) -> None:
        """From here on the names of all files of a save, on whichever node they were stored, outlive a crash."""

    def discard(self, save: str, name: str) -> None:
        """Remove a file that is not needed any more, if there is one."""

    def saves(self) -> list[str]:
        """All names that may be saves; none when nothing was ever saved."""

    def sizes(self, save: str) -> dict[str, int]:
        """The files of a save, in bytes; none when it does not exist."""

    def size(self, save: str, name: str) -> int | None:
        """Of one file, in bytes, as it is now and not as lists have it; None when there is none."""

    def open(self, save: str, name: str) -> BinaryIO:
        """To read; seekable. Raises FileNotFoundError."""

    def open_nearest(self, save: str, name: str, what: tuple[int, str]) -> BinaryIO:
        """The same for a file that has these (bytes, digest) on storage, from the copy that is read fastest."""

    def delete(self, save: str, marker: str) -> None:
        """Remove a save, the file ``marker`` before all others."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory on a file system that all nodes share; files are made where they stay."""

    root: Path

    @property
    def where(self) -> str:
        return str(self.root)

    def begin(self, save: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / save).mkdir()
        sync_directory(self.root)

    def workspace(self, save: str) -> Path:
        return self.root / save

    def store(self, save: str, source: Path, name: str, *, lasting: bool = True) -> tuple[int, str]:
        found = digest_of_file(source, sync=lasting)
        target = self.root / save / name
        if source != target:
            os.replace(source, target)
        return found

    def settle(self, save: str) -> None:
        sync_directory(self.root / save)

    def discard(self, save: str, name: str) -> None:
        (self.root / save / name).unlink(missing_ok=True)

    def saves(self) -> list[str]:
        found = ((entry, _stat(entry)) for entry in _entries(self.root))
        return [entry.name for entry, stat in found if (S_ISDIR(stat.st_mode) if stat else entry.is_symlink())]

    def sizes(self, save: str) -> dict[str, int]:
        found = ((entry.name, _stat(entry)) for entry in _entries(self.root / save))
        return {name: stat.st_size for name, stat in found if stat and S_ISREG(stat.st_mode)}

    def size(self, save: str, name: str) -> int | None:
        try:
            return (self.root / save / name).stat().st_size
        except FileNotFoundError:
            return None

    def open(self, save: str, name: str) -> BinaryIO:
        return open(self.root / save / name, "rb")

    def open_nearest(self, save: str, name: str, what: tuple[int, str]) -> BinaryIO:
        return self.open(save, name)

    def delete(self, save: str, marker: str) -> None:
        path = self.root / save
        if path.is_symlink():
            path.unlink()  # what it leads to was put elsewhere by somebody
            return
        self.discard(save, marker)
        with contextlib.suppress(FileNotFoundError):  # somebody else deletes it as well
            shutil.rmtree(path)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(path))
    except FileNotFoundError:
        if path.is_symlink():  # to storage that is not mounted, say: nobody knows what is there
            raise
        return []


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    """None: it was deleted meanwhile, or is a link that leads nowhere."""
    try:
        return entry.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise
