"""Files of raw tokens, read as one long array without ever mapping them.

In: paths of .bin (raw) or .npy files of uint8, uint16 or uint32, here or, through ``CachedFiles``, anywhere. Out: any
range of their tokens; a fingerprint of each file.
Invariants: what is read is what was opened, or DataChanged names the file (files.py); the page cache is the only copy,
so the process's memory stays flat. A window of 4 KiB as a tensor takes 5.5 us of processor time, through a memory map,
where a truncated file is a SIGBUS, 2.2 (bench/data.py).
Known limits: a local file's fingerprint is of its size and 64 blocks; a change of other bytes that keeps size and
modification time is found by ``check_all`` (files written by ``p2pstate data pack``) and not before. A cached file's is
of its size and etag or time of modification at the source. Opening asks the source for each file, one after the other.
"""

from __future__ import annotations

import bisect
import io
import itertools
import json
import os
import tokenize
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pstate.data.files import DataChanged, Files, LocalFiles, OpenFile, changed, full_digest

__all__ = ["DTYPES", "DataChanged", "Shards", "ends_of", "sidecar_of"]

DTYPES = {name: np.dtype(f"<{code}") for name, code in (("uint8", "u1"), ("uint16", "u2"), ("uint32", "u4"))}
MAX_OPEN_FILES = 128
MAX_NPY_HEADER_BYTES = 65536 + 12


def sidecar_of(path: str | os.PathLike[str]) -> str:
    """Where ``p2pstate data pack`` describes the file ``path``."""
    return os.fspath(path) + ".json"


def ends_of(path: str | os.PathLike[str]) -> str:
    """Where ``p2pstate data pack`` says where the documents in ``path`` end."""
    return os.fspath(path) + ".ends.npy"


@dataclass(frozen=True, slots=True)
class _Shard:
    path: str
    offset_bytes: int  # of the first token
    num_tokens: int
    size_bytes: int
    stamp: tuple[int, Any]
    fingerprint: str
    digest: str | None  # of all bytes, from the sidecar


class Shards:
    """One array of all the files' tokens, in the order of ``paths``.

    Raises ValueError for files that are no token files, DataChanged for one that is not what its sidecar says.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        dtype: str | None = None,
        files: Files | None = None,
    ) -> None:
        self._open_files: OrderedDict[int, OpenFile] = OrderedDict()
        self._pid = os.getpid()
        self._files = files or LocalFiles()
        paths = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not paths:
            raise ValueError("no token files: give at least one .bin or .npy file")
        if dtype is not None:
            dtype = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r}: token files hold {', '.join(DTYPES)}")
        self._shards: list[_Shard] = []
        found: set[np.dtype[Any]] = set()
        for path in paths:
            shard, of_file = _look_at(self._files, os.fspath(path), dtype)
            self._shards.append(shard)
            found.add(of_file)
        if len(found) > 1:
            raise ValueError(f"token files of different types ({', '.join(map(str, found))}) cannot be read as one")
        (self.dtype,) = found
        self._ends = list(itertools.accumulate(shard.num_tokens for shard in self._shards))
        self.num_tokens = self._ends[-1]

    @property
    def paths(self) -> list[str]:
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
        offset = shard.offset_bytes + first * itemsize
        return np.frombuffer(self._open(number).read(offset, offset + count * itemsize), dtype=self.dtype)

    def document_ends(self, number: int) -> NDArray[Any] | None:
        """Where documents end in a file, counted from its beginning; None if nothing beside the file says so."""
        shard = self._shards[number]
        data = self._files.read_if_there(ends_of(shard.path))
        if data is None:
            return None
        try:
            ends: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DataChanged(f"{ends_of(shard.path)} is damaged ({error}): restore it, or pack again") from error
        if (
            ends.ndim != 1
            or ends.dtype.kind not in "iu"
            or (ends[1:] < ends[:-1]).any()
            or (ends > shard.num_tokens).any()
        ):
            raise DataChanged(
                f"{ends_of(shard.path)} does not say where documents end in the {shard.num_tokens} tokens of "
                f"{shard.path}: restore it, or pack again"
            )
        return ends

    def prefetch(self, tokens: Iterable[int]) -> None:
        """The files that hold these tokens will be read soon."""
        numbers = dict.fromkeys(bisect.bisect_right(self._ends, token) for token in tokens)
        self._files.prefetch(self._shards[number].path for number in numbers if number not in self._open_files)

    def check_all(self) -> None:
        """Read every byte and compare with what ``p2pstate data pack`` wrote. DataChanged names the first
        file that differs."""
        for number, shard in enumerate(self._shards):
            if shard.digest is None:
                raise ValueError(f"{shard.path} has no {_name(sidecar_of(shard.path))} beside it to compare with")
            if full_digest(self._open(number)) != shard.digest:
                raise changed(shard.path, shard.size_bytes, shard.size_bytes, "since it was packed")

    def close(self) -> None:
        while self._open_files:
            self._open_files.popitem()[1].close()

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_files": OrderedDict()}  # another process opens its own

    def _open(self, number: int) -> OpenFile:
        if self._pid != os.getpid():  # connections do not survive a fork
            self._pid = os.getpid()
            self.close()
        opened = self._open_files.get(number)
        if opened is not None:
            self._open_files.move_to_end(number)
            return opened
        shard = self._shards[number]
        opened = self._files.source(shard.path)
        if opened.stamp != shard.stamp:
            raise changed(shard.path, shard.size_bytes, opened.num_bytes, "since it was opened")
        self._open_files[number] = opened
        if len(self._open_files) > MAX_OPEN_FILES:
            self._open_files.popitem(last=False)[1].close()
        return opened


def _look_at(files: Files, path: str, dtype: str | None) -> tuple[_Shard, np.dtype[Any]]:
    sidecar = files.read_if_there(sidecar_of(path))
    described = _description(path, sidecar) if sidecar is not None else None
    file = files.source(path, whole=False)
    try:
        num_bytes = file.num_bytes
        if described is not None and described["size_bytes"] != num_bytes:
            raise changed(path, described["size_bytes"], num_bytes, "since it was packed")
        marks = file.mark()
        if described is not None and isinstance(files, LocalFiles) and described["fingerprint"] != marks:
            raise changed(path, num_bytes, num_bytes, "since it was packed")
        if path.endswith(".npy"):
            of_file, offset, num_tokens = _npy_header(path, file.read(0, min(num_bytes, MAX_NPY_HEADER_BYTES)))
        elif described is None and dtype is None:
            raise ValueError(f"{path}: a raw file does not say what it holds: give dtype= ({', '.join(DTYPES)})")
        else:
            of_file, offset = DTYPES[described["dtype"] if described is not None else dtype or ""], 0
            num_tokens, rest = divmod(num_bytes, of_file.itemsize)
            if rest:
                raise ValueError(f"{path}: {num_bytes} bytes are no whole number of {of_file} tokens: truncated?")
        if dtype is not None and of_file != DTYPES[dtype]:
            raise ValueError(f"{path} holds {of_file}, not {dtype}")
        if offset + num_tokens * of_file.itemsize != num_bytes:
            raise changed(path, offset + num_tokens * of_file.itemsize, num_bytes, "since it was written")
        digest = described["digest"] if described is not None else None
        return _Shard(path, offset, num_tokens, num_bytes, file.stamp, marks, digest), of_file
    finally:
        file.close()


def _description(path: str, sidecar: bytes) -> dict[str, Any]:
    """What the sidecar of ``path`` says. ValueError if it is none."""
    try:
        found = json.loads(sidecar)
        if found["dtype"] in DTYPES and {"size_bytes", "fingerprint", "digest"} <= set(found):
            return dict(found)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ValueError(
        f"{sidecar_of(path)} is damaged, or is not of p2pstate data pack, which describes {path} there: restore it, or "
        "move it away and give dtype="
    )


def _npy_header(path: str, beginning: bytes) -> tuple[np.dtype[Any], int, int]:
    stream = io.BytesIO(beginning)
    try:
        major = np.lib.format.read_magic(stream)[0]
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except (ValueError, SyntaxError, tokenize.TokenError) as error:
        raise ValueError(f"{path} is no .npy file: {error}") from error
    if len(shape) != 1 or dtype not in DTYPES.values():
        raise ValueError(f"{path} holds {dtype} of shape {shape}, not a row of {', '.join(DTYPES)}")
    return dtype, stream.tell(), shape[0]


def _name(path: str) -> str:
    return path.rpartition("/")[2]
