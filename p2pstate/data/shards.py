"""Files of raw tokens, read as one long array without ever mapping them.

In: paths of .bin (raw) or .npy files of uint8, uint16 or uint32. Out: any range of their tokens; a fingerprint.
Invariants: files are opened read-only and never written. Bytes come by pread(2): a file that was truncated is a short
read and an error that names it, not a SIGBUS; the page cache is the only copy, so the process's memory stays flat. A
window of 4 KiB as a tensor takes 5.5 us of processor time, through a memory map 2.2 (bench/data.py). At each read the
file still has the size and time of modification it had when it was opened.
Known limit: the fingerprint reads 64 blocks of 4 KiB per file, so that opening is O(1); a change of other bytes that
keeps size and modification time is found by ``check_all`` (files written by ``p2pstate data pack``) and not before.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["DTYPES", "DataChanged", "Shards", "ends_of", "fingerprint", "full_digest", "sidecar_of"]

DTYPES = {name: np.dtype(f"<{code}") for name, code in (("uint8", "u1"), ("uint16", "u2"), ("uint32", "u4"))}
NUM_BLOCKS = 64
BLOCK_BYTES = 4096
MAX_OPEN_FILES = 128
DIGEST_CHUNK_BYTES = 16 << 20


class DataChanged(RuntimeError):
    """A data file is not what it was: the message names it. Training on would be training on something else."""


def sidecar_of(path: Path) -> Path:
    """Where ``p2pstate data pack`` describes the file ``path``."""
    return path.with_name(path.name + ".json")


def ends_of(path: Path) -> Path:
    """Where ``p2pstate data pack`` says where the documents in ``path`` end."""
    return path.with_name(path.name + ".ends.npy")


def fingerprint(descriptor: int, size_bytes: int) -> str:
    """Of an open file: its size and evenly spaced blocks, the first and the last among them; in constant time."""
    digest = xxhash.xxh3_64(str(size_bytes).encode())
    last = max(0, size_bytes - BLOCK_BYTES)
    for start in sorted({last * number // (NUM_BLOCKS - 1) for number in range(NUM_BLOCKS)}):
        digest.update(os.pread(descriptor, BLOCK_BYTES, start))
    return digest.hexdigest()


def full_digest(descriptor: int) -> str:
    """Of all bytes of an open file."""
    digest, at = xxhash.xxh3_128(), 0
    while piece := os.pread(descriptor, DIGEST_CHUNK_BYTES, at):
        digest.update(piece)
        at += len(piece)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    offset_bytes: int  # of the first token
    num_tokens: int
    size_bytes: int
    modified_ns: int
    fingerprint: str
    digest: str | None  # of all bytes, from the sidecar


class Shards:
    """One array of all the files' tokens, in the order of ``paths``.

    Raises ValueError for files that are no token files, DataChanged for one that is not what its sidecar says.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, dtype: str | None = None) -> None:
        self._open_files: OrderedDict[int, int] = OrderedDict()
        if not paths:
            raise ValueError("no token files: give at least one .bin or .npy file")
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r}: token files hold {', '.join(DTYPES)}")
        self._shards: list[_Shard] = []
        found: set[np.dtype[Any]] = set()
        for path in map(Path, paths):
            shard, of_file = _look_at(path, dtype)
            self._shards.append(shard)
            found.add(of_file)
        if len(found) > 1:
            raise ValueError(f"token files of different types ({', '.join(map(str, found))}) cannot be read as one")
        (self.dtype,) = found
        self._ends = list(itertools.accumulate(shard.num_tokens for shard in self._shards))
        self.num_tokens = self._ends[-1]

    @property
    def paths(self) -> list[Path]:
        return [shard.path for shard in self._shards]

    @property
    def ends(self) -> list[int]:
        """Where each file's tokens end."""
        return self._ends

    @property
    def fingerprints(self) -> list[str]:
        """One per file; equal files have equal ones on every machine."""
        return [shard.fingerprint for shard in self._shards]

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Tokens ``start`` to ``start + count``, not to be written to. DataChanged if a file changed since it was
        opened."""
        if not 0 <= start <= start + count <= self.num_tokens:
            raise IndexError(f"tokens {start} to {start + count} are not within the {self.num_tokens} tokens there are")
        number = bisect.bisect_right(self._ends, start)
        if start + count <= self._ends[min(number, len(self._ends) - 1)]:
            return self._piece(number, start, count)
        pieces = []
        while count:
            length = min(count, self._ends[number] - start)
            pieces.append(self._piece(number, start, length))
            start, count, number = start + length, count - length, number + 1
        return np.concatenate(pieces)

    def _piece(self, number: int, start: int, count: int) -> NDArray[Any]:
        """Tokens that are all in one file."""
        if not count:
            return np.empty(0, dtype=self.dtype)
        shard, itemsize = self._shards[number], self.dtype.itemsize
        first = start - (self._ends[number] - shard.num_tokens)
        descriptor = self._descriptor(number)
        data = os.pread(descriptor, count * itemsize, shard.offset_bytes + first * itemsize)
        status = os.fstat(descriptor)
        if (
            status.st_size != shard.size_bytes
            or status.st_mtime_ns != shard.modified_ns
            or len(data) != count * itemsize
        ):
            raise _changed(shard.path, shard.size_bytes, status.st_size, "since it was opened")
        return np.frombuffer(data, dtype=self.dtype)

    def check_all(self) -> None:
        """Read every byte and compare with what ``p2pstate data pack`` wrote. DataChanged names the first
        file that differs."""
        for number, shard in enumerate(self._shards):
            if shard.digest is None:
                raise ValueError(f"{shard.path} has no {sidecar_of(shard.path).name} beside it to compare with")
            if full_digest(self._descriptor(number)) != shard.digest:
                raise _changed(shard.path, shard.size_bytes, shard.size_bytes, "since it was packed")

    def close(self) -> None:
        while self._open_files:
            os.close(self._open_files.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_files": OrderedDict()}  # another process opens its own

    def _descriptor(self, number: int) -> int:
        descriptor = self._open_files.get(number)
        if descriptor is None:
            descriptor = os.open(self._shards[number].path, os.O_RDONLY | os.O_CLOEXEC)
            self._open_files[number] = descriptor
            if len(self._open_files) > MAX_OPEN_FILES:
                os.close(self._open_files.popitem(last=False)[1])
        else:
            self._open_files.move_to_end(number)
        return descriptor


def _look_at(path: Path, dtype: str | None) -> tuple[_Shard, np.dtype[Any]]:
    described = json.loads(sidecar_of(path).read_text()) if sidecar_of(path).exists() else None
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if described is not None and described["size_bytes"] != status.st_size:
            raise _changed(path, described["size_bytes"], status.st_size, "since it was packed")
        marks = fingerprint(file.fileno(), status.st_size)
        if described is not None and described["fingerprint"] != marks:
            raise _changed(path, status.st_size, status.st_size, "since it was packed")
        if path.suffix == ".npy":
            of_file, offset, num_tokens = _npy_header(path, file)
        elif described is None and dtype is None:
            raise ValueError(f"{path}: a raw file does not say what it holds: give dtype= ({', '.join(DTYPES)})")
        else:
            of_file, offset = DTYPES[described["dtype"] if described is not None else dtype or ""], 0
            num_tokens, rest = divmod(status.st_size, of_file.itemsize)
            if rest:
                raise ValueError(f"{path}: {status.st_size} bytes are no whole number of {of_file} tokens: truncated?")
    if dtype is not None and of_file != DTYPES[dtype]:
        raise ValueError(f"{path} holds {of_file}, not {dtype}")
    if offset + num_tokens * of_file.itemsize != status.st_size:
        raise _changed(path, offset + num_tokens * of_file.itemsize, status.st_size, "since it was written")
    digest = described["digest"] if described is not None else None
    return _Shard(path, offset, num_tokens, status.st_size, status.st_mtime_ns, marks, digest), of_file


def _npy_header(path: Path, file: Any) -> tuple[np.dtype[Any], int, int]:
    try:
        major = np.lib.format.read_magic(file)[0]
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except ValueError as error:
        raise ValueError(f"{path} is no .npy file: {error}") from error
    if len(shape) != 1 or dtype not in DTYPES.values():
        raise ValueError(f"{path} holds {dtype} of shape {shape}, not a row of {', '.join(DTYPES)}")
    return dtype, file.tell(), shape[0]


def _changed(path: Path, expected_bytes: int, size_bytes: int, since: str) -> DataChanged:
    how = f"it has {size_bytes} bytes instead of {expected_bytes}"
    if expected_bytes == size_bytes:
        how = "its size is the same, its content or modification time is not"
    return DataChanged(f"{path} has changed {since}: {how}; restore it, or begin a new run on the changed data")
