"""What a checkpoint on disk consists of: its files with their digests, and where each rank's leaves are in it.

In: what the writers of a save report. Out: one file of bytes with a digest of its own, and the same back. DCP's
``.metadata`` says the same of the tensors to readers without p2pstate; this says what DCP has no place for: which
version it is, how to know that every byte is right, and which leaf of which rank is which part of which tensor.

Invariants: no pickle; nothing is believed before the digest of all of it matched.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import xxhash

from p2pstate.types import Version

__all__ = ["MANIFEST", "METADATA", "Damaged", "Item", "Manifest", "PartTable", "Row", "part_table_name"]

MANIFEST = "p2pstate.manifest"
METADATA = ".metadata"  # DCP's; the last file to appear: with it the checkpoint is complete
FORMAT = 1
_DIGEST_BYTES = 16
_MAX_BYTES = 4 << 30


class Damaged(ValueError):
    """Bytes that are not what was written."""


@dataclass(frozen=True, slots=True)
class Row:
    """One leaf of a rank: the part of the tensor ``key`` that begins at ``offsets``. ``shape`` is the part's."""

    leaf: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def pack(self) -> list[Any]:
        return [self.leaf, self.key, self.dtype, self.shape, self.offsets]

    @staticmethod
    def unpack(raw: Sequence[Any]) -> Row:
        leaf, key, dtype, shape, offsets = raw
        return Row(leaf, key, dtype, tuple(shape), tuple(offsets))


@dataclass(frozen=True, slots=True)
class Item:
    """One written piece of a tensor (with an empty dtype: one plain value) in a file."""

    path: tuple[str | int, ...]  # see keys.py
    dtype: str
    size: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]  # of this piece
    file: str
    position: int  # bytes from the file's begin
    num_bytes: int  # in the file

    def pack(self) -> list[Any]:
        return [
            self.path,
            self.dtype,
            self.size,
            self.offsets,
            self.shape,
            self.file,
            self.position,
            self.num_bytes,
        ]

    @staticmethod
    def unpack(raw: Sequence[Any]) -> Item:
        path, dtype, size, offsets, shape, file, position, num_bytes = raw
        return Item(tuple(path), dtype, tuple(size), tuple(offsets), tuple(shape), file, position, num_bytes)


@dataclass(frozen=True, slots=True)
class PartTable:
    """What one node wrote. ``own``: rank -> its rows; ``shared``: ranks that hold the same -> their rows; ``tied``:
    further name of a tensor -> its name, both as leaves."""

    node: str
    files: Mapping[str, tuple[int, str]]  # name -> (bytes, digest)
    items: tuple[Item, ...]
    own: Mapping[int, tuple[Row, ...]]
    shared: Mapping[tuple[int, ...], tuple[Row, ...]]
    tied: Mapping[str, str]

    def pack(self) -> bytes:
        return _sealed(
            {
                "node": self.node,
                "tied": self.tied,
                "files": [[name, *what] for name, what in self.files.items()],
                "items": [item.pack() for item in self.items],
                "own": [[rank, [row.pack() for row in rows]] for rank, rows in self.own.items()],
                "shared": [[members, [row.pack() for row in rows]] for members, rows in self.shared.items()],
            }
        )

    @staticmethod
    def unpack(data: bytes) -> PartTable:
        """Raises Damaged."""
        raw = _opened(data)
        return PartTable(
            raw["node"],
            {name: (size, digest) for name, size, digest in raw["files"]},
            tuple(map(Item.unpack, raw["items"])),
            {rank: tuple(map(Row.unpack, rows)) for rank, rows in raw["own"]},
            {tuple(members): tuple(map(Row.unpack, rows)) for members, rows in raw["shared"]},
            raw["tied"],
        )


def part_table_name(place: int) -> str:
    return f"p2pstate.part{place}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """``run``: run id and nonce of the run that wrote it; ``created_at``: seconds since 1970, for people only."""

    run: tuple[str, str]
    version: Version
    world_size: int
    created_at: float
    files: Mapping[str, tuple[int, str]]  # name -> (bytes, digest), ``.metadata`` included
    own: Mapping[int, tuple[Row, ...]]
    shared: Mapping[tuple[int, ...], tuple[Row, ...]]
    reason: str = ""  # why it was saved
    digest: str = field(default="", compare=False)  # of the manifest itself: names exactly this checkpoint

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def rows_of(self, rank: int) -> list[Row]:
        """Every leaf of ``rank``, in the order of names."""
        rows = [*self.own[rank], *(row for members, rows in self.shared.items() if rank in members for row in rows)]
        return sorted(rows, key=lambda row: row.leaf)

    def pack(self) -> bytes:
        return _sealed(
            {
                "run": self.run,
                "version": self.version,
                "world_size": self.world_size,
                "created_at": self.created_at,
                "reason": self.reason,
                "files": [[name, *what] for name, what in self.files.items()],
                "own": [[rank, [row.pack() for row in rows]] for rank, rows in self.own.items()],
                "shared": [[members, [row.pack() for row in rows]] for members, rows in self.shared.items()],
            }
        )

    @staticmethod
    def unpack(data: bytes) -> Manifest:
        """Raises Damaged."""
        raw = _opened(data)
        run_id, nonce = raw["run"]
        return Manifest(
            (run_id, nonce),
            Version(*raw["version"]),
            raw["world_size"],
            raw["created_at"],
            {name: (size, digest) for name, size, digest in raw["files"]},
            {rank: tuple(map(Row.unpack, rows)) for rank, rows in raw["own"]},
            {tuple(members): tuple(map(Row.unpack, rows)) for members, rows in raw["shared"]},
            raw["reason"],
            data[:_DIGEST_BYTES].hex(),
        )


def _sealed(content: Mapping[str, Any]) -> bytes:
    body = zlib.compress(msgpack.packb({"format": FORMAT, **content}, use_bin_type=True), 1)
    return xxhash.xxh3_128_digest(body) + body


def _opened(data: bytes) -> dict[str, Any]:
    body = data[_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(body) != data[:_DIGEST_BYTES]:
        raise Damaged(f"its digest does not match its {len(data)} bytes")
    inflater = zlib.decompressobj()
    raw: dict[str, Any] = msgpack.unpackb(inflater.decompress(body, _MAX_BYTES), raw=False, strict_map_key=False)
    if raw.get("format") != FORMAT:
        raise Damaged(f"it has format {raw.get('format')}, this release of p2pstate reads format {FORMAT}")
    return raw
