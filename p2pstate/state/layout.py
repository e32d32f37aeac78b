"""Where each leaf lies in one flat region of bytes.

In: leaves, or a table that another process made. Out: offsets, copies of leaves into a region, views of leaves in one.
Invariants: equal names, dtypes and shapes give the same layout on every machine (offsets are multiples of
``ALIGNMENT_BYTES``, entries are in the order of their names), so equal digests mean that regions can be exchanged byte
for byte. Bytes between leaves are zeroed when a region is first written and not touched again.
Known limit: views into the regions written last are kept and hold their memory mapped until ``release``; an explicit
``close`` of a mapping that is still written to ends the process (torch does not lock the buffers it is given).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
import xxhash

from p2pstate.state.decoding import torch_dtype
from p2pstate.state.errors import LeafError
from p2pstate.state.leaves import Leaf

__all__ = ["ALIGNMENT_BYTES", "MAX_KEPT_REGIONS", "Entry", "Layout"]

ALIGNMENT_BYTES = 64
MAX_KEPT_REGIONS = 8


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    dtype: torch.dtype
    shape: torch.Size
    offset_bytes: int
    num_bytes: int


class Layout:
    """Offsets of leaves in a region of ``num_bytes`` bytes. Make one with ``build`` or ``from_table``."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)
        last = self.entries[-1] if self.entries else None
        self.num_bytes = _aligned(last.offset_bytes + last.num_bytes) if last else 0
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}

    @classmethod
    def build(cls, leaves: Sequence[Leaf]) -> Layout:
        """The layout of these leaves, whatever their order. ValueError if two have the same name."""
        entries: list[Entry] = []
        offset = 0
        for leaf in sorted(leaves, key=lambda leaf: leaf.name):
            tensor = leaf.tensor
            num_bytes = tensor.numel() * tensor.element_size()
            entries.append(Entry(leaf.name, tensor.dtype, tensor.shape, offset, num_bytes))
            offset = _aligned(offset + num_bytes)
        if len({entry.name for entry in entries}) != len(entries):
            raise ValueError("two leaves have the same name")
        return cls(entries)

    def table(self) -> list[list[Any]]:
        """Rows [name, dtype, shape]: all that ``from_table`` needs; made of MessagePack's own types."""
        return [[e.name, str(e.dtype).removeprefix("torch."), list(e.shape)] for e in self.entries]

    @classmethod
    def from_table(cls, table: Any) -> Layout:
        """The layout a peer described. ValueError if the rows are not what ``table`` makes."""
        entries: list[Entry] = []
        offset = 0
        if not isinstance(table, list | tuple):
            raise ValueError("a layout's table is not a list")
        for row in table:
            name, dtype, shape = _checked_row(row)
            if entries and name <= entries[-1].name:
                raise ValueError(f"a layout's table is not in the order of its names at {name!r}")
            num_bytes = dtype.itemsize
            for size in shape:
                num_bytes *= size
            if num_bytes + offset >= 1 << 62:
                raise ValueError(f"a layout's table claims too many bytes at {name!r}")
            entries.append(Entry(name, dtype, torch.Size(shape), offset, num_bytes))
            offset = _aligned(offset + num_bytes)
        return cls(entries)

    def digest(self) -> str:
        """xxh3_64 of the table as MessagePack, in hex: equal on ranks whose leaves have equal names and shapes."""
        return xxhash.xxh3_64_hexdigest(msgpack.packb(self.table(), unicode_errors="surrogatepass"))

    def write(self, leaves: Sequence[Leaf], region: torch.Tensor) -> None:
        """Copies every leaf of this layout from ``leaves`` (which may hold more) into ``region`` (uint8, 1-D).

        LeafError if a leaf is missing or has another dtype or shape than the layout says.
        """
        self.write_fitting(self.sources(leaves), region)

    def write_fitting(self, sources: Sequence[torch.Tensor], region: torch.Tensor) -> None:
        """:meth:`write` of the tensors of leaves that are known to fit (see :meth:`fits`), in their order."""
        if not sources:
            return
        views = self.places(region)
        with torch.no_grad():
            torch._foreach_copy_(views, list(sources))

    def places(self, region: torch.Tensor) -> list[torch.Tensor]:
        """Views of all leaves in a ``region`` that is written; what lies between them is zeroed at the first time."""
        key = (region.data_ptr(), region.numel())
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= MAX_KEPT_REGIONS:
                self._views.pop(next(iter(self._views)))
            self._zero_gaps(region)
            views = self._views[key] = list(self.read(region).values())
        return views

    def fits(self, leaves: Sequence[Leaf]) -> bool:
        """Whether exactly these leaves (in the order of their names) have this layout: then it can be used again."""
        return len(leaves) == len(self.entries) and all(map(_matches, leaves, self.entries))

    def read(self, region: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of all leaves in ``region``, by name. ValueError if it is not 1-D uint8 or too small."""
        if region.dtype is not torch.uint8 or region.dim() != 1 or region.numel() < self.num_bytes:
            raise ValueError(f"a region must be 1-D uint8 of at least {self.num_bytes} bytes, not {region.shape}")
        return {
            e.name: region[e.offset_bytes : e.offset_bytes + e.num_bytes].view(e.dtype).view(e.shape)
            for e in self.entries
        }

    def release(self) -> None:
        """Forgets all views kept for ``write``, so that their regions' memory can go."""
        self._views.clear()

    def sources(self, leaves: Sequence[Leaf]) -> list[torch.Tensor]:
        """The tensors of this layout's leaves, in its order. LeafError as :meth:`write`."""
        if len(leaves) != len(self.entries):
            by_name = {leaf.name: leaf for leaf in leaves}
            leaves = [by_name[e.name] for e in self.entries if e.name in by_name]
        if not self.fits(leaves):
            pairs = zip(self.entries, [*leaves, *[None] * len(self.entries)], strict=False)
            entry = next(entry for entry, leaf in pairs if leaf is None or not _matches(leaf, entry))
            raise LeafError(
                entry.name,
                f"the leaves are not those of the layout ({entry.dtype}, {list(entry.shape)} expected here)",
                "build a new layout: parameters, buffers or optimizer state changed shape or came and went",
            )
        return [leaf.tensor for leaf in leaves]

    def _zero_gaps(self, region: torch.Tensor) -> None:
        for entry in self.entries:
            end = entry.offset_bytes + entry.num_bytes
            region[end : min(_aligned(end), self.num_bytes)].zero_()


def _matches(leaf: Leaf, entry: Entry) -> bool:
    tensor = leaf.tensor
    return leaf.name == entry.name and tensor.dtype is entry.dtype and tensor.shape == entry.shape


def _checked_row(row: Any) -> tuple[str, torch.dtype, list[int]]:
    if not isinstance(row, list | tuple) or len(row) != 3:
        raise ValueError("a row of a layout's table is not [name, dtype, shape]")
    name, dtype, shape = row
    if not isinstance(name, str) or not isinstance(shape, list | tuple):
        raise ValueError("a row of a layout's table is not [name, dtype, shape]")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"a layout's table gives {name!r} the shape {shape!r}")
    return name, torch_dtype(dtype), list(shape)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
