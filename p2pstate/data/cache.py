"""Remote files read through copies on local storage: fetched once per node, by chunks, while training computes.

In: URLs that fsspec knows, a folder on local storage. Out: files to read from; a read waits only for the chunks that it
needs, the rest of the file and the files named by ``prefetch`` come in the background.

Invariants: bytes are those of the version that was there when the file was first opened in this process (size and etag
or time of modification are part of a copy's name), and are compared with their digests; what is being read is not
evicted; every wait ends. Without room for a copy a file is read from its source, with one warning.
Known limits: a source that changes without changing size and mark is not noticed; the metadata of a file are asked for
once per process and URL.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from p2pstate.data.chunks import BLOCK_BYTES, Copy, CopyFolder, NoRoomError
from p2pstate.data.counters import count
from p2pstate.data.files import DataChanged, OpenFile
from p2pstate.data.remote import Identity, Remote

__all__ = ["CachedFiles"]

logger = logging.getLogger("p2pstate.data")

OTHERS_WITHIN_S = 60.0  # how long another process may take for a chunk before this one reads it for itself
FIRST_POLL_S, LAST_POLL_S = 0.001, 0.05


class CachedFiles:
    """Give it to a data set, and open files through it. Usable from several threads, and in loader workers.

    Args:
        folder: on local storage; all ranks of a node name the same one. It stays for later runs.
        max_bytes: of all copies together; without it, until the storage is full. Least recently opened ones go first.
        chunk_bytes: fetched at once; a multiple of 64 KiB.
        num_threads: that fetch in the background, in each process.
        timeout_s: for a single request to the source.
        storage_options: for fsspec, as its file systems take them.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        chunk_bytes: int = 8 << 20,
        num_threads: int = 4,
        timeout_s: float = 120.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if chunk_bytes < BLOCK_BYTES or chunk_bytes % BLOCK_BYTES:
            raise ValueError(f"chunk_bytes={chunk_bytes}: give a multiple of {BLOCK_BYTES}")
        if num_threads < 1:
            raise ValueError(f"num_threads={num_threads}: at least one thread has to fetch")
        if not timeout_s > 0 or (max_bytes is not None and max_bytes < 0):
            raise ValueError(
                f"timeout_s={timeout_s}, max_bytes={max_bytes}: a request needs time, and bytes count from 0"
            )
        self._folder = CopyFolder(Path(folder), max_bytes)
        self._chunk_bytes, self._num_threads = chunk_bytes, num_threads
        self._timeout_s, self._options = timeout_s, dict(storage_options or {})
        self._reset()

    def open(self, url: str | os.PathLike[str]) -> io.BufferedReader:
        """The file, for reading in binary. Close it: until then its copy stays."""
        return io.BufferedReader(_Raw(self.source(url)), buffer_size=128 << 10)

    def read(self, url: str | os.PathLike[str]) -> bytes:
        """The whole file."""
        source = self.source(url)
        try:
            return source.read(0, source.num_bytes)
        finally:
            source.close()

    def read_if_there(self, url: str | os.PathLike[str]) -> bytes | None:
        """The whole file; None if it does not exist."""
        try:
            return self.read(url)
        except FileNotFoundError:
            return None

    def source(self, url: str | os.PathLike[str], *, whole: bool = True) -> OpenFile:
        """The file as ranges of bytes. ``whole``: the rest of it comes in the background. The holder closes it."""
        remote, identity = self._known(url)
        try:
            copy = self._folder.open(identity, self._chunk_bytes, to_read=True)
        except NoRoomError as error:
            self._tell(
                "no room", f"no copy is kept of {identity.url}: {error}. It is read from its source; training goes on"
            )
            return _Direct(self, remote, identity)
        source = _Cached(self, remote, copy)
        if whole and not copy.is_complete():
            self._ask(identity, min(self._num_threads, copy.num_chunks))
        return source

    def prefetch(self, urls: Iterable[str | os.PathLike[str]]) -> None:
        """Fetch these files in the background, in this order."""
        for url in urls:
            self._ask(os.fspath(url), 1)

    def num_bytes(self) -> int:
        """What all copies in the folder take."""
        return self._folder.num_bytes()

    @property
    def num_pending(self) -> int:
        """Files that this process is fetching in the background, or is going to."""
        return len(self._asked)

    # -- inside

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_folder", "_chunk_bytes", "_num_threads", "_timeout_s", "_options")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._known_files: dict[str, tuple[Remote, Identity]] = {}
        self._jobs: queue.SimpleQueue[str | Identity] = queue.SimpleQueue()
        self._asked: dict[str, int] = {}  # URLs that are to be fetched, and how many threads are to do it
        self._num_running = 0
        self._told: set[str] = set()

    def _here(self) -> None:
        """In a forked process neither threads nor connections are usable."""
        if self._pid != os.getpid():
            self._reset()

    def _known(self, url: str | os.PathLike[str]) -> tuple[Remote, Identity]:
        self._here()
        name = os.fspath(url)
        found = self._known_files.get(name)
        if found is None:
            remote = Remote(name, self._options, self._timeout_s)
            found = self._known_files[name] = (remote, remote.identity())
        return found

    def _ask(self, job: str | Identity, num_threads: int) -> None:
        self._here()
        with self._lock:
            name = job if isinstance(job, str) else job.url
            if name in self._asked:
                return
            self._asked[name] = num_threads
            for _ in range(num_threads):
                self._jobs.put(job)
            while self._num_running < min(self._num_threads, self._jobs.qsize() + self._num_running):
                self._num_running += 1
                threading.Thread(target=self._work, name="p2pstate-prefetch", daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            name = job if isinstance(job, str) else job.url
            try:
                self._fetch_whole(name)
            except Exception as error:  # whoever reads the file gets it, too
                self._tell(name, f"fetching {name} ahead failed: {error}")
            finally:
                with self._lock:
                    self._asked[name] -= 1
                    if not self._asked[name]:
                        del self._asked[name]

    def _fetch_whole(self, url: str) -> None:
        remote, identity = self._known(url)
        try:
            copy = self._folder.open(identity, self._chunk_bytes, to_read=False)
        except NoRoomError:
            return  # it will be read from its source
        source = _Cached(self, remote, copy)
        with contextlib.closing(source), contextlib.suppress(NoRoomError):
            for chunk in range(copy.num_chunks):
                if not copy.has(chunk):
                    source.fetch(chunk)

    def _tell(self, kind: str, text: str) -> None:
        """A warning, once for each kind of it."""
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("%s", text)

    def _forget(self, identity: Identity) -> None:
        self._known_files.pop(identity.url, None)

    def _read(self, remote: Remote, identity: Identity, start: int, end: int) -> bytes:
        """From the source. A file that turns out to be another one is asked for anew by whoever opens it next."""
        try:
            return remote.read(start, end)
        except DataChanged:
            self._forget(identity)
            raise


class _Direct:
    """Without a copy."""

    def __init__(self, files: CachedFiles, remote: Remote, identity: Identity) -> None:
        self._files, self._remote, self._identity = files, remote, identity
        self.num_bytes = identity.num_bytes
        self.stamp = (identity.num_bytes, identity.mark)

    def mark(self) -> str:
        return self._identity.digest

    def read(self, start: int, end: int) -> bytes:
        count("cache_misses")
        count("fetched_bytes", end - start)
        return self._files._read(self._remote, self._identity, start, end)

    def close(self) -> None:
        """Nothing is held."""


class _Cached:
    def __init__(self, files: CachedFiles, remote: Remote, copy: Copy) -> None:
        self._files, self._remote, self._copy = files, remote, copy
        self._confirmed = copy.is_confirmed
        self.num_bytes = copy.identity.num_bytes
        self.stamp = (copy.identity.num_bytes, copy.identity.mark)

    def mark(self) -> str:
        return self._copy.identity.digest

    def read(self, start: int, end: int) -> bytes:
        copy = self._copy
        if self._confirmed and start < end and (data := copy.read_verified(start, end)) is not None:
            count("cache_hits")
            return data
        missing = [chunk for chunk in copy.chunks(start, end) if not copy.has(chunk)]
        count("cache_hits", len(copy.chunks(start, end)) - len(missing))
        count("cache_misses", len(missing))
        if all(self._wait_for(chunk) for chunk in missing):
            self._check()
            data = copy.read(start, end)
            if data is not None:
                return data
            logger.warning("the copy of %s was damaged on local storage: it is fetched again", self._remote.url)
            chunks = [chunk for chunk in copy.chunks(start, end) if not copy.has(chunk)]
            if all(self._wait_for(chunk) for chunk in chunks) and (data := copy.read(start, end)) is not None:
                return data
        count("fetched_bytes", end - start)
        return self._files._read(self._remote, copy.identity, start, end)

    def fetch(self, chunk: int) -> bool:
        """Fetch a chunk if nobody else does. False: somebody is at it. NoRoomError: it cannot be stored."""
        copy = self._copy
        with copy.claim(chunk) as mine:
            if not mine:
                return copy.has(chunk)
            data = self._files._read(self._remote, copy.identity, *copy.bounds(chunk))
            count("fetched_bytes", len(data))
            copy.put(chunk, data)
        self._check()
        return True

    def close(self) -> None:
        self._copy.close()

    def _check(self) -> None:
        """Before bytes of a complete copy are used: was the file the same until its last chunk had come?"""
        copy = self._copy
        self._confirmed = self._confirmed or copy.is_confirmed
        if self._confirmed:
            return
        if not copy.is_replaced and copy.is_complete():
            copy.judge(self._remote.identity())
        if copy.is_replaced:
            self._files._forget(copy.identity)
            raise DataChanged(
                f"{self._remote.url} was replaced while it was being fetched: parts of two versions were read; begin "
                "again, or restore the file"
            )

    def _wait_for(self, chunk: int) -> bool:
        """Until the chunk is there, fetched by this thread or by another one. False: it cannot be had this way."""
        deadline, pause_s = time.monotonic() + OTHERS_WITHIN_S, FIRST_POLL_S
        try:
            while not self.fetch(chunk):
                if time.monotonic() > deadline:
                    self._files._tell("waiting", f"another process is at a part of {self._remote.url} and does not end")
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_POLL_S)
        except NoRoomError as error:
            self._files._tell("no room", f"a part of {self._remote.url} cannot be kept: {error}. Training goes on")
            return False
        return True


class _Raw(io.RawIOBase):
    def __init__(self, source: OpenFile) -> None:
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.num_bytes}[whence]
        if begin + offset < 0:
            raise ValueError(f"seek to {begin + offset}: before the file's beginning")
        self._at = begin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._source.read(self._at, max(self._at, min(self._at + len(view), self._source.num_bytes)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()
