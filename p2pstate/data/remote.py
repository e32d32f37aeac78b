"""A file somewhere else, by ranges, through fsspec: with retries, and with an end to every wait.

In: a URL (or a local path), options for its file system. Out: what identifies its content now; bytes of any range.
Invariants: a range that comes back has the length that was asked for; no request lasts longer than its timeout,
whatever the file system does, and one that took too long is made once more.
Known limits: from a server that knows no ranges, each of them costs the whole file; a call that is given up goes on in
a thread of its own until the file system returns.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash

from p2pstate.data.files import DataChanged

__all__ = ["Identity", "Remote"]

logger = logging.getLogger("p2pstate.data")

T = TypeVar("T")
NUM_TRIES = 4
FIRST_PAUSE_S = 0.1  # doubled with each try
# What file systems call the mark of a version of a file, the surest first.
MARKS = (
    *("ETag", "etag", "checksum", "Content-MD5", "md5Hash", "md5", "Digest", "versionId", "generation", "blob_id"),
    *("LastModified", "Last-Modified", "last_modified", "modified", "updated", "mtime", "created"),
)
GIVE_UP_ON = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError),
    *(TypeError, ValueError, AttributeError, ImportError, MemoryError),  # of a wrong call or file system
)
TRANSIENT_STATUS = (408, 425, 429)  # of HTTP, besides 500 and above


class _GivenUpError(TimeoutError):
    """A request took too long."""


class _CutShortError(OSError):
    """Less came than was asked for."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Of one version of a file. ``mark``: etag or time of modification, as text; empty if there is none."""

    url: str
    num_bytes: int
    mark: str

    @property
    def digest(self) -> str:
        """16 hexadecimal digits."""
        return xxhash.xxh3_64_hexdigest(f"{self.num_bytes}:{self.mark}".encode())


class Remote:
    """One URL. Usable from several threads."""

    def __init__(self, url: str | os.PathLike[str], options: Mapping[str, Any], timeout_s: float) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ImportError("CachedFiles reads through fsspec: pip install 'p2pstate[fsspec]'") from error
        self.url = os.fspath(url)
        self._fs, self._path = url_to_fs(self.url, **options)
        self._timeout_s = timeout_s

    def identity(self) -> Identity:
        """ValueError for a source that does not say its size."""
        self._fs.invalidate_cache(self._path)
        info = self._try(lambda: self._fs.info(self._path), "look at")
        if not isinstance(info.get("size"), int):
            raise ValueError(f"{self.url}: its file system does not say its size, without which it cannot be cached")
        mark = next((f"{name}={info[name]}" for name in MARKS if info.get(name) is not None), "")
        return Identity(self.url, info["size"], mark)

    def read(self, start: int, end: int) -> bytes:
        """The bytes of this range. DataChanged if there are fewer than the identity has promised."""
        if start >= end:
            return b""

        def fetch() -> bytes:
            data: bytes = self._fs.cat_file(self._path, start=start, end=end)
            if len(data) > end - start:
                data = data[start:end]  # a server that knows no ranges sends the whole file
            if len(data) != end - start:
                raise _CutShortError(f"{len(data)} bytes came instead of {end - start} at {start}")
            return data

        try:
            return self._try(fetch, "read")
        except _CutShortError as error:
            raise DataChanged(
                f"{self.url}: {error}: the file was replaced while it was being read; begin again, or restore it"
            ) from None

    def _try(self, call: Callable[[], T], verb: str) -> T:
        """Tries again what may pass; a request that took too long, once."""
        pause_s, num_given_up = FIRST_PAUSE_S, 0
        for number in range(1, NUM_TRIES + 1):
            try:
                return self._within_time(call, verb)
            except Exception as error:
                num_given_up += isinstance(error, _GivenUpError)
                passes = _may_pass(error)
                if passes and number < NUM_TRIES and num_given_up < 2:
                    said = error.__cause__ if isinstance(error, FileNotFoundError) else error
                    logger.warning("%s: attempt %d of %d to %s it failed: %s", self.url, number, NUM_TRIES, verb, said)
                elif passes and isinstance(error, FileNotFoundError):
                    raise OSError(f"{self.url} cannot be reached: {error.__cause__}") from error
                else:
                    raise
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("not reached")

    def _within_time(self, call: Callable[[], T], verb: str) -> T:
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="p2pstate-fetch", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if errors:
            raise errors[0]
        if not results:
            raise _GivenUpError(f"{self.url}: an attempt to {verb} it did not end within {self._timeout_s:.3g} s")
        return results[0]


def _may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return _may_pass(error.__cause__)  # fsspec says so of HTTP, whatever the server has answered
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return status >= 500 or status in TRANSIENT_STATUS
    return not isinstance(error, GIVE_UP_ON)
