"""One slot: a fixed region of shared memory that holds one part of one version, described by its own header.

In: bytes written by the worker that owns the slot. Out: the same bytes, readable by any process that has the memfd,
with version and digest, even when the writer was killed at any instant. Layout::

    header (4096 bytes) | data (tensors, at the offsets of a state.Layout) | tail (MessagePack: layout table, plain
    values)

Invariants: a header says *complete* only when all bytes it describes are in place; whoever starts to write first marks
the slot as being written, so a torn slot is never taken for a version; a torn header fails its own checksum. The digest
is xxh3-128 over data and tail together.
Known limit: a process that was stopped and resumed can write through its mapping for as long as it lives; the agent
therefore gives a slot to a successor only after the predecessor was reaped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from dataclasses import dataclass

import xxhash

from p2pstate.types import Part, Version

__all__ = ["HEADER_BYTES", "Header", "Slot", "capacity_for", "digest_of", "part_name", "slot_bytes"]

HEADER_BYTES = 4096
SLACK_BYTES = 1 << 16  # plain values grow: not every byte more shall need new memory
_MAGIC = b"p2pslot1"
_WRITING, _COMPLETE = 1, 2
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_POPULATED_BYTES = 1 << 20  # at a time
# magic, state, number of shared sets, epoch, step, data bytes, tail bytes, balance, digest, checksum of all before
_FIELDS = struct.Struct("<8sIIqqqqq16s")
_CHECK = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Header:
    """``balance``: of an own part, see sampling.py."""

    version: Version
    data_bytes: int
    tail_bytes: int
    digest: bytes
    num_shared_sets: int
    balance: int = 0

    @property
    def num_bytes(self) -> int:
        return self.data_bytes + self.tail_bytes


def capacity_for(num_bytes: int) -> int:
    """How much room a slot for an image of ``num_bytes`` is given."""
    return num_bytes + num_bytes // 64 + SLACK_BYTES


def slot_bytes(num_bytes: int) -> int:
    """Memory that a slot for an image of ``num_bytes`` takes at most."""
    return capacity_for(num_bytes) + HEADER_BYTES


def digest_of(body: memoryview) -> bytes:
    """xxh3-128 of a region. Releases the GIL while it reads."""
    return xxhash.xxh3_128_digest(body)


def part_name(part: Part) -> bytes:
    """16 bytes that name a part."""
    return xxhash.xxh3_128_digest(repr(tuple(part)).encode())


class Slot:
    """A mapped slot. ``fd`` stays the caller's; the mapping is never inherited by forked children."""

    def __init__(self, fd: int, *, header_only: bool = False) -> None:
        size = os.fstat(fd).st_size
        self.capacity = size - HEADER_BYTES
        self._map = mmap.mmap(fd, HEADER_BYTES if header_only else size)
        self._map.madvise(mmap.MADV_DONTFORK)

    def header(self) -> Header | None:
        """What a complete slot holds; None for an empty, torn or half-written one."""
        raw = self._map[: _FIELDS.size + _CHECK.size]
        magic, state, num_shared_sets, epoch, step, data_bytes, tail_bytes, balance, digest = _FIELDS.unpack_from(raw)
        (check,) = _CHECK.unpack_from(raw, _FIELDS.size)
        if magic != _MAGIC or state != _COMPLETE or check != xxhash.xxh3_64_intdigest(raw[: _FIELDS.size]):
            return None
        if data_bytes < 0 or tail_bytes < 0 or data_bytes + tail_bytes > self.capacity:
            return None
        return Header(Version(epoch, step), data_bytes, tail_bytes, digest, num_shared_sets, balance)

    def begin(self) -> None:
        """Mark the slot as being written: what it held is gone from now on."""
        struct.pack_into("<8sI", self._map, 0, _MAGIC, _WRITING)

    def complete(self, header: Header) -> None:
        """Publish what was written. The state word goes last: a writer killed in between leaves no version."""
        sizes = header.data_bytes, header.tail_bytes
        fields = (header.num_shared_sets, *header.version, *sizes, header.balance, header.digest)
        raw = _FIELDS.pack(_MAGIC, _COMPLETE, *fields)
        self._map[_FIELDS.size : _FIELDS.size + _CHECK.size] = _CHECK.pack(xxhash.xxh3_64_intdigest(raw))
        self._map[12 : _FIELDS.size] = raw[12:]
        self._map[:12] = raw[:12]

    def body(self, num_bytes: int | None = None) -> memoryview:
        """The region after the header (all of it, or its first ``num_bytes``), writable."""
        end = HEADER_BYTES + (self.capacity if num_bytes is None else num_bytes)
        return memoryview(self._map)[HEADER_BYTES:end]

    def populate(self) -> None:
        """Have the kernel give all memory of the slot now; where it cannot, the first write takes longer.

        Piece by piece: the interpreter is held up meanwhile. What the slot holds stays.
        """
        size = HEADER_BYTES + self.capacity
        with contextlib.suppress(OSError, ValueError):
            for start in range(0, size, _POPULATED_BYTES):
                self._map.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATED_BYTES, size - start))

    def verify(self, header: Header) -> bool:
        """Whether the bytes still match the digest in the header."""
        return digest_of(self.body(header.num_bytes)) == header.digest
