"""Text and JSONL files into token files: ``p2pstate data pack``.

In: files of text (one document each) or JSON lines (one document a line); a tokenizer, that is, any callable from a
string to integers. Out: a .bin file of tokens, beside it the ends of its documents (.ends.npy) and its description
(.json: type, counts, size, fingerprint, digest of all bytes).
Invariant: nothing is visible under the final name before it is complete and on disk; the description comes last.
Known limit: one process tokenizes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from p2pstate.data.files import LocalFile, full_digest
from p2pstate.data.shards import DTYPES, ends_of, sidecar_of

__all__ = ["Packed", "bytes_of", "load_tokenizer", "pack", "show"]

PROGRESS_EVERY_S = 1.0
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
    if output.suffix != ".bin":
        raise ValueError(f"{output}: token files are named .bin")
    if not output.parent.is_dir():
        raise ValueError(f"{output}: there is no folder {output.parent}")
    if any(path.exists() and output.exists() and path.samefile(output) for path in inputs):
        raise ValueError(f"{output} is an input, too: give the output another name")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: token files hold {', '.join(DTYPES)}")
    partial = output.with_name(f"{output.name}.{os.getpid()}.partial")
    try:
        with partial.open("w+b") as file:
            ends = _write_tokens(file, inputs, tokenizer, dtype, field, end_token, progress)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        written = LocalFile(partial)
        marks, digest = written.mark(), full_digest(written)
        written.close()
        num_tokens = ends[-1] if ends else 0
        if num_tokens == 0:
            raise ValueError("the input holds no tokens: nothing was written")
        described = {"dtype": dtype, "num_tokens": num_tokens, "num_documents": len(ends), "size_bytes": size_bytes}
        described |= {"fingerprint": marks, "digest": digest}
        Path(sidecar_of(output)).unlink(missing_ok=True)  # of an earlier file of this name
        partial_ends = output.with_name(f"{output.name}.{os.getpid()}.npy")
        np.save(partial_ends, np.asarray(ends, dtype="<u8"))
        os.replace(partial_ends, ends_of(output))
        os.replace(partial, output)
        _write_atomically(Path(sidecar_of(output)), json.dumps(described) + "\n")
    finally:
        partial.unlink(missing_ok=True)
    return Packed(output, len(ends), num_tokens)


def _write_tokens(
    file: BinaryIO,
    inputs: Sequence[Path],
    tokenizer: Tokenizer,
    dtype: str,
    field: str,
    end_token: int | None,
    progress: Callable[[str], None] | None,
) -> array[int]:
    """The tokens of all documents, one document after the other; returns how many there are up to each one's end."""
    limit = np.iinfo(DTYPES[dtype]).max
    ends = array("Q")
    num_tokens, shown_at = 0, time.monotonic()
    total_bytes = sum(path.stat().st_size for path in inputs)
    for where, text, num_read in _documents(inputs, field):
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
        if progress is not None and time.monotonic() - shown_at >= PROGRESS_EVERY_S:
            shown_at = time.monotonic()
            progress(f"{num_read / max(1, total_bytes):6.1%}  {len(ends)} documents  {num_tokens} tokens")
    return ends


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
    num_read = 0
    for path in inputs:
        if path.suffix not in (".jsonl", ".ndjson"):
            num_read += path.stat().st_size
            yield str(path), _decoded(path.read_bytes(), str(path)), num_read
            continue
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                num_read += len(line)
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    document = json.loads(_decoded(line, where))[field]
                except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
                    raise ValueError(f"{where}: no JSON object with a field {field!r} ({error!r})") from error
                if not isinstance(document, str):
                    raise ValueError(f"{where}: field {field!r} is a {type(document).__name__}, not text")
                yield where, document, num_read


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}") from error


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def show(line: str) -> None:
    """Progress, on one line of a terminal."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(line, end=end, file=sys.stderr, flush=True)
