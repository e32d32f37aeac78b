"""Checkpoints on object storage, or whatever else fsspec reaches by a URL; and how storage is opened.

In: a URL, a local folder for the *stage*. Out: storage.Storage. Files are made in the stage, uploaded from there whole,
and read back. The stage keeps the newest save of this node, and no other; a file of it is read instead of the one on
storage when its bytes are those that the checkpoint's manifest names.

Invariants: every error of a file system is an OSError that names the URL; nothing on storage is ever changed, only
added and deleted.
Known limits: what a file system needs to know (credentials, endpoint) comes from its own configuration, or fsspec's;
retries of single requests are the file system's.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from p2pstate.durable.files import digest_of, digest_of_file
from p2pstate.durable.manifest import METADATA
from p2pstate.durable.storage import Directory, Storage

__all__ = ["RemoteStorage", "is_url", "local_path", "open_storage"]

BLOCK_BYTES = 16 << 20  # read at once: a file is read from its begin to its end, mostly
_LOCAL = ("file://", "local://")  # fsspec has two names for it


def is_url(where: str) -> bool:
    """Whether it names something else than a path of this host's file systems."""
    return "://" in where and not where.startswith(_LOCAL)


def local_path(where: str) -> Path:
    """Of what :func:`is_url` does not call a URL; ``~`` is a user's home. Raises ValueError for one without a home."""
    path = os.path.expanduser(where.removeprefix(_LOCAL[0]).removeprefix(_LOCAL[1]))
    if path.startswith("~"):
        raise ValueError(f"{where!r}: no user of that name has a home here; for a folder of that name write ./{path}")
    return Path(path)


def open_storage(where: str, stage: str = "") -> Storage:
    """``where``: a directory or a URL; ``stage``: a local folder for files on their way to a URL (else below TMPDIR).

    Raises ValueError when no file system is known for the URL, or nobody's home is meant by ``~``; ImportError when a
    package is missing.
    """
    if not is_url(where):
        return Directory(local_path(where))
    return RemoteStorage(where.rstrip("/"), _stage_of(where, stage))


def _stage_of(url: str, stage: str) -> Path:
    """One folder per URL and user, which runs on this host do not share by accident."""
    above = Path(stage) if stage else Path(tempfile.gettempdir()) / f"p2pstate-stage-{os.getuid()}"
    return above / xxhash.xxh3_64_hexdigest(url.rstrip("/").encode())


class RemoteStorage:
    """Used by one thread at a time."""

    def __init__(self, url: str, stage: Path) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ImportError(
                f"checkpoints at {url} need the package fsspec: pip install 'p2pstate[fsspec]'"
            ) from error
        self._url, self._stage = url, stage
        with self._errors():
            self._fs, self._path = url_to_fs(url)
        self._same: dict[tuple[str, str], bool] = {}  # files of the stage: whether they have the bytes asked for

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteStorage) and other.where == self.where

    def __hash__(self) -> int:
        return hash(self._url)

    @property
    def where(self) -> str:
        return self._url

    # -- writing

    def begin(self, save: str) -> None:
        if self._list(save) or self.size(save, METADATA) is not None:
            raise FileExistsError(f"{self._url}/{save} has just been begun by somebody else")
        with self._errors():
            self._fs.makedirs(self._path_of(save), exist_ok=True)  # object storage has no folders, and does nothing

    def workspace(self, save: str) -> Path:
        self._stage.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._stage.stat().st_uid != os.getuid():
            raise PermissionError(f"the stage {self._stage} belongs to another user: give checkpoint_stage=")
        for entry in self._stage.iterdir():
            if entry.name != save:
                shutil.rmtree(entry, ignore_errors=True)
        folder = self._stage / save
        folder.mkdir(exist_ok=True)
        return folder

    def store(self, save: str, source: Path, name: str, *, lasting: bool = True) -> tuple[int, str]:
        """A file that is half there after a crash has no place in any checkpoint: its size or its digest is wrong."""
        staged = self._stage / save / name
        if source != staged:
            os.replace(source, staged)
        with self._errors():
            self._fs.put_file(str(staged), self._path_of(save, name))
        with self.open(save, name) as file:
            found = digest_of(file)
        if found != digest_of_file(staged):
            raise OSError(f"{self._url}/{save}/{name} reads differently from what was uploaded")
        return found

    def settle(self, save: str) -> None:
        """What storage has answered for is there."""

    def discard(self, save: str, name: str) -> None:
        (self._stage / save / name).unlink(missing_ok=True)
        with self._errors(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path_of(save, name))

    # -- reading

    def saves(self) -> list[str]:
        return [_last(entry) for entry in self._list() if entry["type"] == "directory"]

    def sizes(self, save: str) -> dict[str, int]:
        return {_last(entry): entry["size"] for entry in self._list(save) if entry["type"] == "file"}

    def size(self, save: str, name: str) -> int | None:
        path = self._path_of(save, name)
        with self._errors():
            self._fs.invalidate_cache(path)
            try:
                return int(self._fs.size(path))
            except FileNotFoundError:
                return None

    def open(self, save: str, name: str) -> BinaryIO:
        path = self._path_of(save, name)
        with self._errors():
            self._fs.invalidate_cache(path)
            file = self._fs.open(path, "rb", block_size=BLOCK_BYTES)
        return cast(BinaryIO, _File(file, f"{self._url}/{save}/{name}"))

    def open_nearest(self, save: str, name: str, what: tuple[int, str]) -> BinaryIO:
        staged = self._stage / save / name
        if (save, name) not in self._same:
            self._same[save, name] = staged.is_file() and digest_of_file(staged) == what
        return open(staged, "rb") if self._same[save, name] else self.open(save, name)

    def delete(self, save: str, marker: str) -> None:
        self.discard(save, marker)
        with self._errors(), contextlib.suppress(FileNotFoundError):  # somebody else deletes it as well
            self._fs.rm(self._path_of(save), recursive=True)

    def _path_of(self, *names: str) -> str:
        return "/".join((self._path.rstrip("/"), *names))

    def _list(self, *names: str) -> list[dict[str, Any]]:
        path = self._path_of(*names)
        with self._errors():
            self._fs.invalidate_cache(path)
            try:
                found: list[dict[str, Any]] = self._fs.ls(path, detail=True)
            except FileNotFoundError:
                return []
        return found

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        with errors_of(self._url):
            yield


@contextlib.contextmanager
def errors_of(url: str) -> Iterator[None]:
    """File systems raise what the libraries below them raise; here it becomes an OSError that says where."""
    try:
        yield
    except (FileNotFoundError, ImportError, ValueError):
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


def _last(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


class _File(io.RawIOBase):
    """A file of fsspec. It says that it is not seekable, although it is: DCP's reader then takes each item in one piece
    from its begin to its end, instead of jumping to and fro in it with a request for each jump."""

    def __init__(self, file: Any, url: str) -> None:
        super().__init__()
        self._file, self._url = file, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with errors_of(self._url):
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        with errors_of(self._url):
            data = self._file.read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
