"""One file's copy on local storage, filled chunk by chunk by whichever process needs one, shared by all of a node.

In: a folder, an identity, bytes of chunks. Out: bytes that were there before, each verified once per process.

On disk a copy is two files: ``<key>.data``, of the full size from the beginning, and ``<key>.map``: a description, a
byte per chunk (1: it is there), and a digest (xxh3, 64 bit) per block. A chunk counts from the moment its byte is set,
after its data and digests were written; what a crash left half written does not have its digest and is fetched again.

Invariants: a chunk is fetched by one process at a time, whose claim (a lock on the chunk's byte) ends with it; a copy
that somebody has open (a shared lock on the map) is never evicted, the least recently opened of the others is first.
Known limits: Linux (locks of open file descriptions); one node: the folder must not be on a network file system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import struct
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from p2pstate.data.remote import Identity

__all__ = ["BLOCK_BYTES", "Copy", "CopyFolder", "NoRoomError"]

BLOCK_BYTES = 64 << 10
_HEADER_BYTES = 4096
_VERDICT_AT = _HEADER_BYTES - 1  # a byte of the header: whether the file was still the same when all was fetched
_SAME, _REPLACED = 1, 2
_TOTAL = struct.Struct("<q")
_USED = struct.Struct("<Q")  # when the copy was last opened for reading, in ns; mtime moves with every chunk
_USED_AT = _VERDICT_AT - 15  # aligned
_FORMAT = 1
_LOCK_WITHIN_S = 60.0
_POLL_S = 0.002
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


_open_copies: weakref.WeakSet[Copy] = weakref.WeakSet()
_claims: set[int] = set()  # descriptors that hold one


class NoRoomError(Exception):
    """There is no place for a copy: the message says why."""


class Copy:
    """An open copy. Usable from several threads; the holder closes it."""

    def __init__(self, folder: CopyFolder, key: str, identity: Identity, chunk_bytes: int) -> None:
        self.identity, self.chunk_bytes = identity, chunk_bytes
        self.num_chunks = max(1, -(-identity.num_bytes // chunk_bytes))
        self._map_path = folder.map_path(key)
        self._data = os.open(folder.data_path(key), os.O_RDWR | os.O_CLOEXEC)
        self._map = os.open(self._map_path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._map, fcntl.LOCK_SH)
        num_blocks = -(-identity.num_bytes // BLOCK_BYTES)
        with self._map_path.open("r+b") as unlocked:  # the mapping keeps its file open, and must not keep the lock
            mapped = mmap.mmap(unlocked.fileno(), map_bytes(identity.num_bytes, chunk_bytes))
        self._header = np.frombuffer(mapped, np.uint8, _HEADER_BYTES)
        self._states = np.frombuffer(mapped, np.uint8, self.num_chunks, _HEADER_BYTES)
        first = _HEADER_BYTES + self.num_chunks + -self.num_chunks % 8
        self._digests = np.frombuffer(mapped, "<u8", num_blocks, first)
        self._verified = bytearray(num_blocks)  # by this process
        _open_copies.add(self)

    def has(self, chunk: int) -> bool:
        return bool(self._states[chunk])

    def is_complete(self) -> bool:
        return bool(self._states.all())

    def bounds(self, chunk: int) -> tuple[int, int]:
        """The bytes of the file that are in this chunk."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.identity.num_bytes)

    def chunks(self, start: int, end: int) -> range:
        return range(start // self.chunk_bytes, -(-end // self.chunk_bytes))

    @contextlib.contextmanager
    def claim(self, chunk: int) -> Iterator[bool]:
        """Whether this thread, of all processes' threads, is to fetch this chunk."""
        descriptor = os.open(f"/proc/self/fd/{self._map}", os.O_RDWR | os.O_CLOEXEC)  # a lock owner of its own
        _claims.add(descriptor)
        try:
            lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, _HEADER_BYTES + chunk, 1, 0)
            try:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                yield False
            else:
                yield not self.has(chunk)
        finally:
            _claims.discard(descriptor)
            os.close(descriptor)

    def put(self, chunk: int, data: bytes) -> None:
        """Store a chunk that this thread has claimed. NoRoomError if the storage is full."""
        start, _ = self.bounds(chunk)
        _write_all(self._data, data, start)
        for at in range(0, len(data), BLOCK_BYTES):
            block = (start + at) // BLOCK_BYTES
            self._digests[block] = xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES])
            self._verified[block] = 1
        self._states[chunk] = 1

    def read_verified(self, start: int, end: int) -> bytes | None:
        """Bytes that this process has compared with their digests before, at the cost of the system's call; else None.
        ``end`` is beyond ``start``."""
        if 0 in self._verified[start // BLOCK_BYTES : (end - 1) // BLOCK_BYTES + 1]:
            return None
        data = _read(self._data, start, end)
        return data if len(data) == end - start else None

    def read(self, start: int, end: int) -> bytes | None:
        """Bytes of chunks that are there; None if some are not what was stored: their chunks count as missing now."""
        if start >= end:
            return b""
        if (known := self.read_verified(start, end)) is not None:
            return known
        first, last = start // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        begin = first * BLOCK_BYTES  # whole blocks, to compare their digests
        data = _read(self._data, begin, min(last * BLOCK_BYTES, self.identity.num_bytes))
        good = True
        for block in range(first, last):
            at = block * BLOCK_BYTES - begin
            if xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES]) == int(self._digests[block]):
                self._verified[block] = 1
            else:
                good = False
                self._states[block * BLOCK_BYTES // self.chunk_bytes] = 0
        return data[start - begin : end - begin] if good else None

    @property
    def is_confirmed(self) -> bool:
        """The file was still the same when all of it had been fetched."""
        return bool(self._header[_VERDICT_AT] == _SAME)

    @property
    def is_replaced(self) -> bool:
        """It was not: some chunks belong to another version."""
        return bool(self._header[_VERDICT_AT] == _REPLACED)

    def stamp(self) -> None:
        """It is used: what was used last is evicted last."""
        self._header[_USED_AT : _USED_AT + _USED.size] = list(_USED.pack(time.time_ns()))

    def judge(self, identity: Identity) -> None:
        """What the file is now, after all was fetched. Everybody who has the copy open learns whether it is good; the
        next one to open a bad one gets a new one."""
        if identity != self.identity:
            self._header[_VERDICT_AT] = _REPLACED
        elif not self.is_replaced:
            self._header[_VERDICT_AT] = _SAME

    def let_go(self) -> None:
        """Without a lock from here on: it can be evicted, and still be read."""
        if self._map >= 0:
            unlocked = os.open(f"/proc/self/fd/{self._map}", os.O_RDWR | os.O_CLOEXEC)
            os.dup2(unlocked, self._map, inheritable=False)
            os.close(unlocked)

    def close(self) -> None:
        for descriptor in (self._data, self._map):
            if descriptor >= 0:
                os.close(descriptor)
        self._data = self._map = -1

    def __del__(self) -> None:
        if hasattr(self, "_map"):
            self.close()


def _let_go_of_all() -> None:
    """In a process that was forked: locks are those of who forked it, and would outlast what that one closes."""
    while _claims:
        os.close(_claims.pop())
    for copy in list(_open_copies):
        with contextlib.suppress(OSError):
            copy.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


class CopyFolder:
    """All copies of a node. Several processes may use the same folder, also with limits of their own."""

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.close(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        except OSError as error:
            raise ValueError(
                f"{folder} cannot hold copies of files ({error}): name a folder on local storage that can be written to"
            ) from error
        self._folder, self._max_bytes = folder, max_bytes
        self._counted = False  # by this object
        self._oldest_last: list[tuple[int, Path]] = []

    def data_path(self, key: str) -> Path:
        return self._folder / f"{key}.data"

    def map_path(self, key: str) -> Path:
        return self._folder / f"{key}.map"

    def open(self, identity: Identity, chunk_bytes: int, *, to_read: bool) -> Copy:
        """The copy of this version of a file, made if need be; ``to_read`` counts as use of an old one. NoRoomError:
        there is no place for it, or the folder cannot be used any more."""
        try:
            return self._open(identity, chunk_bytes, to_read)
        except OSError as error:
            raise NoRoomError(f"{self._folder} cannot be used ({error})") from error

    def _open(self, identity: Identity, chunk_bytes: int, to_read: bool) -> Copy:
        key = key_of(identity, chunk_bytes)
        with self._lock() as lock:
            if self.map_path(key).exists():
                copy = self._found(key, identity, chunk_bytes)
                if copy is not None:
                    if to_read:
                        copy.stamp()
                    return copy
                for path in (self.map_path(key), self.data_path(key)):
                    path.unlink(missing_ok=True)
                if self._counted:
                    self._add(lock, -identity.num_bytes)
            self._make_room(lock, identity.num_bytes)
            self._create(lock, key, identity, chunk_bytes)
            copy = Copy(self, key, identity, chunk_bytes)
            copy.stamp()
            return copy

    def num_bytes(self) -> int:
        """What all copies take."""
        return sum(map(_size_of, self._folder.glob("*.data")))

    def _found(self, key: str, identity: Identity, chunk_bytes: int) -> Copy | None:
        """None for a copy that is of no use: of parts of two versions, or with a file missing or cut off."""
        try:
            copy = Copy(self, key, identity, chunk_bytes)
        except (FileNotFoundError, ValueError):
            return None
        if not copy.is_replaced:
            return copy
        copy.close()
        return None

    def _create(self, lock: int, key: str, identity: Identity, chunk_bytes: int) -> None:
        described = {"format": _FORMAT, "url": identity.url, "bytes": identity.num_bytes, "mark": identity.mark}
        header = json.dumps(described).encode()[:_USED_AT]
        while True:
            try:
                _allocate(self.data_path(key), identity.num_bytes)
                fresh = self._folder / f"{key}.new"
                _allocate(fresh, map_bytes(identity.num_bytes, chunk_bytes))
                with fresh.open("r+b") as file:
                    file.write(header)
                fresh.rename(self.map_path(key))
                self._add(lock, identity.num_bytes)
                return
            except OSError as error:
                for path in (self.data_path(key), self._folder / f"{key}.new"):
                    path.unlink(missing_ok=True)
                if error.errno not in _FULL:
                    raise
                if not self._evict_one(lock):
                    raise NoRoomError(f"the storage of {self._folder} is full") from error

    def _make_room(self, lock: int, num_bytes: int) -> None:
        if not self._counted:
            self._counted = True
            for data in self._folder.glob("*.data"):
                if data.is_file() and not data.with_suffix(".map").exists():
                    data.unlink()  # what a crash left
            os.pwrite(lock, _TOTAL.pack(self.num_bytes()), 0)
        if self._max_bytes is None:
            return
        while self._add(lock, 0) + num_bytes > self._max_bytes:
            if num_bytes > self._max_bytes or not self._evict_one(lock):
                raise NoRoomError(
                    f"{num_bytes} bytes do not fit into the {self._max_bytes} of {self._folder} and what is being read"
                )

    def _add(self, lock: int, num_bytes: int) -> int:
        """The bytes of all copies; the lock's file keeps count, because looking at a million of them takes too long."""
        total: int = _TOTAL.unpack(os.pread(lock, _TOTAL.size, 0))[0] + num_bytes
        os.pwrite(lock, _TOTAL.pack(total), 0)
        return total

    def _evict_one(self, lock: int) -> bool:
        """Remove the copy that nobody has open and that was opened longest ago. The list of them is made again only
        when it is used up: what was opened since is not in it, or has another time."""
        for is_new in (False, True):
            if is_new:
                self._oldest_last = sorted(
                    ((_used_at(path), path) for path in self._folder.glob("*.map")), reverse=True
                )
            while self._oldest_last:
                used_at, path = self._oldest_last.pop()
                if path.exists() and _used_at(path) == used_at and self._evict(lock, path):
                    return True
        return False

    def _evict(self, lock: int, path: Path) -> bool:
        """False: somebody has this copy open."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            data = path.with_suffix(".data")
            self._add(lock, -_size_of(data))
            path.unlink()
            data.unlink(missing_ok=True)
            return True
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[int]:
        """One process at a time makes or evicts copies. Gives the lock's file."""
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + _LOCK_WITHIN_S
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise NoRoomError(f"another process has held {self._folder}/lock for a minute") from None
                    time.sleep(_POLL_S)
            yield descriptor
        finally:
            os.close(descriptor)


def _used_at(path: Path) -> int:
    with path.open("rb") as file:
        file.seek(_USED_AT)
        when: int = _USED.unpack(file.read(_USED.size))[0]
        return when


def key_of(identity: Identity, chunk_bytes: int) -> str:
    """The name of a copy: another version of the file has another one."""
    text = json.dumps([_FORMAT, identity.url, identity.num_bytes, identity.mark, chunk_bytes])
    return xxhash.xxh3_128_hexdigest(text.encode())


def map_bytes(num_bytes: int, chunk_bytes: int) -> int:
    num_chunks = max(1, -(-num_bytes // chunk_bytes))
    return _HEADER_BYTES + num_chunks + -num_chunks % 8 + 8 * -(-num_bytes // BLOCK_BYTES)


def _allocate(path: Path, num_bytes: int) -> None:
    """A file of this size whose space is reserved, so that writing into it later cannot fail for lack of space."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        if num_bytes:
            os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while len(view):
        try:
            written = os.pwrite(descriptor, view, at)
        except OSError as error:
            raise NoRoomError(str(error)) from error
        view, at = view[written:], at + written


def _read(descriptor: int, start: int, end: int) -> bytes:
    """Nothing from storage that fails: as good as damaged."""
    try:
        return os.pread(descriptor, end - start, start)
    except OSError:
        return b""


def _size_of(path: Path) -> int:
    """0 for a file that another process has evicted meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
