"""From the live training state to the slots of the own node: one version, two kinds of parts.

In: what ``TrainingState.collect`` found, the version, and the version whose slots must not be touched. Out: filled
slots, not yet *complete*: the shipper hashes them and publishes their headers.

Invariants: called on the training thread, between two steps; a slot that holds the version to keep is never written;
what every rank holds alike is written once per node, divided over the node's ranks, what only this rank has is written
by this rank.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
import torch

from p2pstate.redundancy import divide
from p2pstate.slots import Header, Slot
from p2pstate.state import Collected, Layout, Leaf, Scope
from p2pstate.types import Part, Version
from p2pstate.worker.link import Link

__all__ = ["Capturer", "Image", "SlotPair", "read_image"]

SLACK_BYTES = 1 << 16  # plain values grow: not every byte more shall need new memory
_FOOTER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Image:
    """One part of one version in a slot: all bytes in place, digest not yet known."""

    part: Part
    slot: Slot
    version: Version
    data_bytes: int
    tail_bytes: int
    num_rep_parts: int

    @property
    def num_bytes(self) -> int:
        return self.data_bytes + self.tail_bytes

    def header(self, digest: bytes) -> Header:
        return Header(self.version, self.data_bytes, self.tail_bytes, digest, self.num_rep_parts)


class SlotPair:
    """The two slots of one part: one keeps the version to fall back to, the other takes the next."""

    def __init__(self, link: Link, part: Part) -> None:
        self._link = link
        self._part = part
        self._slots: list[Slot | None] = [None, None]

    def target(self, num_bytes: int, keep: Version | None) -> Slot:
        """The slot to write next, with room for ``num_bytes``; never the one that holds ``keep``.

        Raises Retryable when the node has no memory for it.
        """
        versions = [self._version(index) for index in (0, 1)]
        index = 1 if versions[0] is not None and versions[0] == keep else 0
        if keep is None or keep not in versions:
            # Nothing to keep: prefer an empty slot, else the older one.
            index = min((0, 1), key=lambda i: versions[i] or Version(-1, -1))
        slot = self._slots[index]
        if slot is None or slot.capacity < num_bytes:
            slot = self._slots[index] = self._map(index, num_bytes + num_bytes // 64 + SLACK_BYTES)
        return slot

    def _version(self, index: int) -> Version | None:
        slot = self._slots[index]
        if slot is None:
            # A predecessor of this process may have left a version here.
            slot = self._slots[index] = self._map(index, 0)
        header = slot.header()
        return header.version if header else None

    def _map(self, index: int, num_bytes: int) -> Slot:
        fd = self._link.allocate(self._part, index, num_bytes)
        try:
            return Slot(fd)
        finally:
            os.close(fd)


class Capturer:
    """Writes this rank's parts. ``local_rank`` of ``num_local`` decides which replicated part is its."""

    def __init__(self, link: Link, rank: int, local_rank: int, num_local: int) -> None:
        self._own = SlotPair(link, Part.own(rank))
        self._rep = SlotPair(link, Part.rep(local_rank, num_local))
        self._rank, self._local_rank, self._num_local = rank, local_rank, num_local
        self._layouts: dict[Part, Layout] = {}

    def capture(self, collected: Collected, version: Version, keep: Version | None) -> list[Image]:
        """Copy the state into this rank's slots. The caller may change the state as soon as this returns."""
        rank_only = [leaf for leaf in collected.leaves if leaf.scope is Scope.RANK]
        replicated = [leaf for leaf in collected.leaves if leaf.scope is Scope.REPLICATED]
        num_rep_parts = self._num_local if replicated else 0
        images = [
            self._write(self._own, Part.own(self._rank), rank_only, collected.values, version, keep, num_rep_parts)
        ]
        if replicated:
            sizes = [(leaf.name, leaf.tensor.numel() * leaf.tensor.element_size()) for leaf in replicated]
            mine = set(divide(sizes, self._num_local)[self._local_rank])
            leaves = [leaf for leaf in replicated if leaf.name in mine]
            part = Part.rep(self._local_rank, self._num_local)
            images.append(self._write(self._rep, part, leaves, b"", version, keep, num_rep_parts))
        return images

    def _write(
        self,
        pair: SlotPair,
        part: Part,
        leaves: Sequence[Leaf],
        values: bytes,
        version: Version,
        keep: Version | None,
        num_rep_parts: int,
    ) -> Image:
        layout = self._layout_for(part, leaves)
        tail = msgpack.packb({"table": layout.table(), "values": values}, use_bin_type=True)
        tail += _FOOTER.pack(layout.num_bytes)
        needed = layout.num_bytes + len(tail)
        slot = pair.target(needed, keep)
        slot.begin()
        body = slot.body()
        if layout.num_bytes:
            layout.write(leaves, torch.frombuffer(body, dtype=torch.uint8, count=layout.num_bytes))
        body[layout.num_bytes : needed] = tail
        return Image(part, slot, version, layout.num_bytes, len(tail), num_rep_parts)

    def _layout_for(self, part: Part, leaves: Sequence[Leaf]) -> Layout:
        """The layout of the last version while it fits: its views into the slots are reused."""
        known = self._layouts.get(part)
        if known is None or not known.fits(leaves):
            known = self._layouts[part] = Layout.build(leaves)
        return known


def read_image(body: torch.Tensor) -> tuple[dict[str, torch.Tensor], bytes]:
    """The leaves (views into ``body``) and the plain values of one image.

    ``body``: 1-D uint8, exactly the bytes of one image: data, tail, and eight bytes that say where the tail begins.
    Raises ValueError when it is not an image.
    """
    num_bytes = body.numel()
    (data_bytes,) = _FOOTER.unpack(bytes(body[num_bytes - _FOOTER.size :].numpy()))
    if not 0 <= data_bytes <= num_bytes - _FOOTER.size:
        raise ValueError(f"not an image: its tail would begin at {data_bytes} of {num_bytes} bytes")
    raw = bytes(body[data_bytes : num_bytes - _FOOTER.size].numpy())
    tail = msgpack.unpackb(raw, raw=False, strict_map_key=False)
    return Layout.from_table(tail["table"]).read(body[:data_bytes]), tail["values"]
