"""Where bytes of data files come from: this machine, by pread(2), or whatever else gives ranges of bytes.

In: paths or URLs. Out: open files that give ranges, say which version of the file they are, and notice when it changes.
Invariants: files are opened read-only and never mapped. A file that was truncated is a short read and an error that
names it, not a SIGBUS; at each read it still has the size and time of modification that it had when it was opened.
Known limit: the mark of a local file reads 64 blocks of 4 KiB, so that opening is O(1) at any size.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import xxhash

__all__ = ["BLOCK_BYTES", "NUM_BLOCKS", "DataChanged", "Files", "LocalFile", "LocalFiles", "OpenFile", "full_digest"]

NUM_BLOCKS = 64
BLOCK_BYTES = 4096
DIGEST_CHUNK_BYTES = 16 << 20


class DataChanged(RuntimeError):
    """A data file is not what it was: the message names it. Training on would be training on something else."""


class OpenFile(Protocol):
    """One version of a file. ``stamp``: equal for the same version, cheap to compare."""

    num_bytes: int
    stamp: tuple[int, Any]

    def read(self, start: int, end: int) -> bytes:
        """The bytes of this range, all of them. DataChanged if the file is not the one that was opened."""

    def mark(self) -> str:
        """16 hexadecimal digits that name the content."""

    def close(self) -> None: ...


class Files(Protocol):
    """A way to open files. ``CachedFiles`` is one for URLs."""

    def source(self, path: str, *, whole: bool = True) -> OpenFile:
        """``whole``: all of it will be read."""

    def read_if_there(self, path: str) -> bytes | None:
        """The whole of a small file; None if it does not exist."""

    def prefetch(self, paths: Iterable[str]) -> None:
        """They will be read soon."""


class LocalFile:
    """A file of this machine."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{self._path} is no regular file: give the files themselves")
        self.num_bytes, self._modified_ns = status.st_size, status.st_mtime_ns
        self.stamp = (self.num_bytes, self._modified_ns)

    def read(self, start: int, end: int) -> bytes:
        data = os.pread(self._descriptor, end - start, start)
        status = os.fstat(self._descriptor)
        if status.st_size != self.num_bytes or status.st_mtime_ns != self._modified_ns or len(data) != end - start:
            raise changed(self._path, self.num_bytes, status.st_size, "since it was opened")
        return data

    def mark(self) -> str:
        """Of the size and evenly spaced blocks, the first and the last among them; in constant time."""
        digest = xxhash.xxh3_64(str(self.num_bytes).encode())
        last = max(0, self.num_bytes - BLOCK_BYTES)
        for start in sorted({last * number // (NUM_BLOCKS - 1) for number in range(NUM_BLOCKS)}):
            digest.update(self.read(start, min(start + BLOCK_BYTES, self.num_bytes)))
        return digest.hexdigest()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


class LocalFiles:
    """Files of this machine."""

    def source(self, path: str, *, whole: bool = True) -> LocalFile:
        return LocalFile(path)

    def read_if_there(self, path: str) -> bytes | None:
        return Path(path).read_bytes() if Path(path).exists() else None

    def prefetch(self, paths: Iterable[str]) -> None:
        """They are here."""


def full_digest(file: OpenFile) -> str:
    """Of all bytes."""
    digest = xxhash.xxh3_128()
    for at in range(0, file.num_bytes, DIGEST_CHUNK_BYTES):
        digest.update(file.read(at, min(at + DIGEST_CHUNK_BYTES, file.num_bytes)))
    return digest.hexdigest()


def changed(path: str, expected_bytes: int, num_bytes: int, since: str) -> DataChanged:
    how = f"it has {num_bytes} bytes instead of {expected_bytes}"
    if expected_bytes == num_bytes:
        how = "its size is the same, its content or modification time is not"
    return DataChanged(f"{path} has changed {since}: {how}; restore it, or begin a new run on the changed data")
