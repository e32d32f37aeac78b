"""Local files on their way to the disk.

In: bytes, paths. Out: files whose bytes the disk takes while the next ones are made; digests of files, which are synced
on request. Entries of directories are synced separately, by :func:`sync_directory`.
"""

from __future__ import annotations

import ctypes
import io
import os
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

__all__ = ["EarlyFile", "digest_of", "digest_of_file", "sync_directory"]

_BLOCK_BYTES = 4 << 20
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None)


class EarlyFile(io.FileIO):
    """A new file: the disk begins with what was written while more is being written. To have it there, sync it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(path), "w")
        self._written = self._begun = 0

    def write(self, data: Any) -> int:
        num_bytes = super().write(data)
        self._written += num_bytes
        if self._written - self._begun >= _BLOCK_BYTES:
            # File systems without it begin when the file is synced.
            fields = ctypes.c_int64(self._begun), ctypes.c_int64(self._written - self._begun)
            _libc.sync_file_range(self.fileno(), *fields, _SYNC_FILE_RANGE_WRITE)
            self._begun = self._written
        return num_bytes


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def digest_of(file: BinaryIO | io.RawIOBase) -> tuple[int, str]:
    """(size in bytes, xxh3-128 in hex) of what is read from here on. Raises OSError."""
    state = xxhash.xxh3_128()
    num_bytes = 0
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    while count := cast(io.RawIOBase, file).readinto(buffer):
        state.update(buffer[:count])
        num_bytes += count
    return num_bytes, state.hexdigest()


def digest_of_file(path: Path, *, sync: bool = False) -> tuple[int, str]:
    """Of a whole local file. ``sync``: its bytes are on disk, too, when this returns. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        found = digest_of(file)
        if sync:
            os.fsync(file.fileno())
        return found
