"""Files that are whole or absent, on storage that may fail at any moment.

In: bytes, paths. Out: files that were synced before they got their name; digests of files. Invariant: what
:func:`publish` returned for is on disk with its directory entry, and a reader never sees half of it.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO, cast

import xxhash

__all__ = ["digest_of", "digest_of_file", "publish", "sync_directory"]

_BLOCK_BYTES = 4 << 20
_PARTIAL = ".partial"


def publish(path: Path, content: bytes) -> None:
    """Write a file in one step: under another name first, synced, then renamed. Raises OSError."""
    partial = path.with_name(path.name + _PARTIAL)
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_directory(path.parent)


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


def digest_of_file(path: Path) -> tuple[int, str]:
    """Of a whole local file. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return digest_of(file)
