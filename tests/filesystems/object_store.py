"""``objects:///folder/...``: object storage for tests, seen by every process that has this folder on its path.

A folder of this host behind fsspec that fails on request: a file called FAULT in a
folder says what is wrong with everything below it: ``gone``, ``short``, ``flipped``, ``slow SECONDS``, or
``lists TIME`` (since 1970: lists show nothing that came later).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem


class Refused(Exception):
    """Libraries of object storage raise errors of their own, which are no OSError."""


def _files(path: str) -> list[Path]:
    return [each for each in (Path(path), *Path(path).rglob("*")) if each.is_file()]


class ObjectStore(LocalFileSystem):  # type: ignore[misc]
    protocol = "objects"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._fault(path)
        super().makedirs(path, exist_ok=exist_ok)

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        fault = self._fault(path)
        found = super().ls(path, detail=True, **options)
        if fault.startswith("lists "):
            then = float(fault.removeprefix("lists "))
            found = [each for each in found if any(file.stat().st_mtime <= then for file in _files(each["name"]))]
        return found if detail else [each["name"] for each in found]

    def put_file(self, path1: str, path2: str, callback: Any = None, **options: Any) -> None:
        fault = self._fault(path2)
        super().put_file(path1, path2, **options)
        if fault == "short":
            os.truncate(self._strip_protocol(path2), os.path.getsize(path1) // 2)
        if fault == "flipped":
            with open(self._strip_protocol(path2), "r+b") as file:
                first = file.read(1)
                file.seek(0)
                file.write(bytes([first[0] ^ 1]))
        if callback is not None:
            callback.relative_update(os.path.getsize(path1))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._fault(path)
        return super()._open(path, mode, **options)

    def _fault(self, path: str) -> str:
        """Raises what is asked for, or waits, or returns what is left for the caller to do."""
        found = next((p / "FAULT" for p in Path(self._strip_protocol(path)).parents if (p / "FAULT").exists()), None)
        fault = found.read_text() if found is not None else ""
        if fault == "gone":
            raise Refused("the endpoint does not answer")
        if fault.startswith("slow "):
            time.sleep(float(fault.removeprefix("slow ")))
        return fault
