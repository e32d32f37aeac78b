"""Text and JSONL files into token files: ``p2pstate data pack``.

In: files of text (one document each) or JSON lines (one document a line), compressed (.gz) or not; a tokenizer, that
is, any callable from a string to integers. Out: a .bin file of tokens, beside it the ends of its documents (.ends.npy)
and its description (.json: type, counts, size, fingerprint, digest of all bytes).
Invariant: nothing is visible under the final name before it is complete and on disk; the description comes last.
Known limit: one process tokenizes.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import os
import sys
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from p2pstate.data.files import LocalFile, full_digest
from p2pstate.data.shards import DTYPES, ends_of, sidecar_of

__all__ = ["Packed", "bytes_of", "load_tokenizer", "pack", "show"]

PROGRESS_EVERY_S = 1.0
LINES = (".jsonl", ".ndjson")
Tokenizer = Callable[[str], Iterable[int]]


@dataclass(frozen=True, slots=True)
class Packed:
    path: Path
    num_documents: int
    num_tokens: int


def bytes_of(text: str) -> bytes:
    """The tokenizer that is always there: UTF-8 bytes."""
    return text.encode()


def load_tokenizer(name: str) -> Tokenizer:
    """``module:function``; dots in the function part are attributes. ValueError if there is no such callable."""
    module_name, colon, attributes = name.partition(":")
    if not colon or not attributes:
        raise ValueError(f"tokenizer {name!r}: name it module:function")
    try:
        found = importlib.import_module(module_name)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except Exception as error:  # its module may do anything
        raise ValueError(f"tokenizer {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"tokenizer {name!r} is a {type(found).__name__} and cannot be called")
    return found


def pack(
    inputs: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    *,
    dtype: str = "uint16",
    field: str = "text",
    end_token: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Packed:
    """Tokenize ``inputs`` into ``output``. ``end_token`` is put behind each document.

    Raises ValueError, naming file and line, for input that is no text or JSON, for a tokenizer that fails there, and
    for tokens that ``dtype`` cannot hold; then nothing was written under the final names.
    """
    _check(inputs, output, dtype)
    partial, partial_ends = (output.with_name(f"{output.name}.{os.getpid()}.{kind}") for kind in ("partial", "npy"))
    try:
        with partial.open("w+b") as file:
            ends = _write_tokens(file, _documents(inputs, field), tokenizer, dtype, end_token, _shown(inputs, progress))
            _to_disk(file)
        if not ends or ends[-1] == 0:
            raise ValueError("the input holds no tokens: nothing was written")
        with partial_ends.open("wb") as file:
            np.save(file, np.asarray(ends, dtype="<u8"))
            _to_disk(file)
        described = {"dtype": dtype, "num_tokens": ends[-1], "num_documents": len(ends), **_marks_of(partial)}
        Path(sidecar_of(output)).unlink(missing_ok=True)  # of an earlier file of this name
        os.replace(partial_ends, ends_of(output))
        os.replace(partial, output)
        _write_atomically(Path(sidecar_of(output)), json.dumps(described) + "\n")
    finally:
        partial.unlink(missing_ok=True)
        partial_ends.unlink(missing_ok=True)
    return Packed(output, len(ends), ends[-1])


def _check(inputs: Sequence[Path], output: Path, dtype: str) -> None:
    if output.suffix != ".bin":
        raise ValueError(f"{output}: token files are named .bin")
    if not output.parent.is_dir():
        raise ValueError(f"{output}: there is no folder {output.parent}")
    for path in inputs:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no regular file: give files; what comes through a pipe, write to one before")
    if any(path.exists() and output.exists() and path.samefile(output) for path in inputs):
        raise ValueError(f"{output} is an input, too: give the output another name")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: token files hold {', '.join(DTYPES)}")


def _write_tokens(
    file: BinaryIO,
    documents: Iterable[tuple[str, str, int]],
    tokenizer: Tokenizer,
    dtype: str,
    end_token: int | None,
    show_progress: Callable[[int, int, int], None],
) -> array[int]:
    """Where each document ends, in tokens."""
    limit = np.iinfo(DTYPES[dtype]).max
    ends, num_tokens = array("Q"), 0
    for where, text, num_read in documents:
        tokens = _tokens(tokenizer, text, where)
        if end_token is not None:
            tokens = np.append(tokens, end_token)
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) <= limit:
            raise ValueError(
                f"{where}: tokens from {tokens.min()} to {tokens.max()} do not fit into {dtype} "
                f"(0 to {limit}): choose a wider --dtype"
            )
        file.write(tokens.astype(DTYPES[dtype]).tobytes())
        num_tokens += len(tokens)
        ends.append(num_tokens)
        show_progress(num_read, len(ends), num_tokens)
    return ends


def _shown(inputs: Sequence[Path], progress: Callable[[str], None] | None) -> Callable[[int, int, int], None]:
    """(bytes of input read, documents, tokens) -> a line of progress, now and then."""
    total_bytes, shown_at = sum(path.stat().st_size for path in inputs), time.monotonic()

    def show_progress(num_read: int, num_documents: int, num_tokens: int) -> None:
        nonlocal shown_at
        if progress is not None and time.monotonic() - shown_at >= PROGRESS_EVERY_S:
            shown_at = time.monotonic()
            progress(f"{num_read / max(1, total_bytes):6.1%}  {num_documents} documents  {num_tokens} tokens")

    return show_progress


def _marks_of(path: Path) -> dict[str, Any]:
    file = LocalFile(path)
    try:
        return {"size_bytes": file.num_bytes, "fingerprint": file.mark(), "digest": full_digest(file)}
    finally:
        file.close()


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _tokens(tokenizer: Tokenizer, text: str, where: str) -> NDArray[np.int64]:
    try:
        found = tokenizer(text)
        if isinstance(found, bytes | bytearray):
            return np.frombuffer(found, dtype=np.uint8).astype(np.int64)
        tokens = np.asarray(found if hasattr(found, "__array__") else list(found))
    except Exception as error:
        raise ValueError(f"{where}: the tokenizer failed: {type(error).__name__}: {error}") from error
    if tokens.size == 0:
        return np.empty(0, dtype=np.int64)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{where}: the tokenizer gave {found!r:.80} and not integers in a row (of a tokenizer that gives a "
            "dictionary, name a function that takes its input_ids)"
        )
    return tokens.astype(np.int64)


def _documents(inputs: Sequence[Path], field: str) -> Iterator[tuple[str, str, int]]:
    """(where it stands, text, bytes of input read so far)."""
    num_before = 0
    for path in inputs:
        is_packed = path.suffix == ".gz"
        with path.open("rb") as raw, gzip.open(raw) if is_packed else contextlib.nullcontext(raw) as file:
            try:
                if path.with_suffix("").suffix in LINES if is_packed else path.suffix in LINES:
                    for where, text in _lines(path, file, field):
                        yield where, text, num_before + raw.tell()
                else:
                    yield str(path), _decoded(file.read(), str(path)), num_before + raw.tell()
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(f"{path} is no whole .gz file: {error}") from error
            num_before += raw.tell()


def _lines(path: Path, file: Iterable[bytes], field: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            document = json.loads(_decoded(line, where))[field]
        except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{where}: no JSON object with a field {field!r} ({error!r})") from error
        if not isinstance(document, str):
            raise ValueError(f"{where}: field {field!r} is a {type(document).__name__}, not text")
        yield where, document


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")  # some editors put a mark at a file's beginning
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}") from error


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(text.encode())
        _to_disk(file)
    os.replace(partial, path)


def show(line: str) -> None:
    """Progress, on one line of a terminal."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(line, end=end, file=sys.stderr, flush=True)
