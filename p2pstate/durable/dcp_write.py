"""Slots -> files of PyTorch's distributed checkpoint format (DCP), by DCP's own writer.

In: the slots that one node writes of a version. Out: ``.distcp`` files, on storage, and the table that says what is in
them, for the node that makes a checkpoint of all nodes' files (see publish.py).

Invariants: a slot's bytes match their digest before they are written, and the slot still holds the same version and the
same bytes afterwards; files are read back for their digests, and outlive a crash. The disk works from the first
megabytes on: slots are checked and files are read back meanwhile.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from p2pstate.durable.division import Share
from p2pstate.durable.files import EarlyFile
from p2pstate.durable.keys import Path as KeyPath
from p2pstate.durable.keys import group_path, key_of, path_of, rank_path, values_path
from p2pstate.durable.manifest import Item, PartTable, Row, part_table_name
from p2pstate.durable.storage import Storage
from p2pstate.image_format import is_image_of, open_image
from p2pstate.redundancy import divide
from p2pstate.slots import Slot
from p2pstate.state.decoding import decode
from p2pstate.state.encoding import TensorRef
from p2pstate.types import Part, Version

__all__ = ["SaveFailed", "write_shares"]

MAX_THREADS = 4


class SaveFailed(Exception):
    """This save cannot become a checkpoint; the next one may."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """What goes into one item: a tensor's part, or a plain value."""

    path: KeyPath
    tensor: torch.Tensor | None
    value: Any
    size: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(key_of(self.path), None if self.tensor is None else self.offsets)

    def write_item(self) -> WriteItem:
        if self.tensor is None:
            return WriteItem(self.index, WriteItemType.BYTE_IO)
        chunk = ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)
        data = TensorWriteData(chunk, TensorProperties(self.tensor.dtype), torch.Size(self.size))
        return WriteItem(self.index, WriteItemType.SHARD, tensor_data=data)


class _Planner(SavePlanner):
    """Gives DCP's writer the bytes of each item."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._pieces = {piece.index: piece for piece in pieces}
        self.plan = SavePlan([piece.write_item() for piece in pieces])

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        raise AssertionError("this planner is given its pieces")

    def create_local_plan(self) -> SavePlan:
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise AssertionError("each node plans for itself")

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        piece = self._pieces[write_item.index]
        if piece.tensor is not None:
            return piece.tensor
        stream = io.BytesIO()
        torch.save(piece.value, stream)
        return stream


def write_shares(
    storage: Storage,
    save: str,
    place: int,
    node: str,
    version: Version,
    num_ranks: int,
    shares: Sequence[tuple[Share, Slot]],
) -> tuple[str, int]:
    """Write one node's shares of ``version`` of all ``num_ranks``; returns (digest of its table's file, bytes written).

    Raises SaveFailed when a slot holds something else or damaged bytes, OSError when storage fails.
    """
    found = _found(version, num_ranks, shares)
    pieces = found.pieces
    folder = storage.workspace(save)
    items: list[Item] = []
    if pieces:
        num_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        writer = FileSystemWriter(folder, thread_count=num_threads, sync_files=False)
        writer.fs = _Files()
        writer.set_up_storage_writer(is_coordinator=False)
        planner = _Planner(pieces)
        plan = writer.prepare_global_plan([SavePlan([])] * place + [planner.plan])[place]
        by_index = {piece.index: piece for piece in pieces}
        for result in writer.write_data(plan, planner).wait():
            items.append(_item(by_index[result.index], result.storage_data))
        if len(items) != len(pieces):
            raise SaveFailed(f"only {len(items)} of {len(pieces)} items were written to {folder}")
    for _, slot in shares:
        _check(slot, version, "was written over while it was being saved")
    files = {name: storage.store(save, folder / name, name) for name in sorted({item.file for item in items})}
    for name, (size, _) in files.items():
        expected = max(item.position + item.num_bytes for item in items if item.file == name)
        if size != expected:
            raise SaveFailed(f"{storage.where}/{save}/{name} has {size} bytes on storage, {expected} were written")
    table = PartTable(node, files, tuple(items), found.own, found.shared, found.tied)
    return _store_table(storage, save, place, folder, table), sum(size for size, _ in files.values())


def _store_table(storage: Storage, save: str, place: int, folder: Path, table: PartTable) -> str:
    """For the lead alone, while the save is made. Returns its digest."""
    name = part_table_name(place)
    source = folder / f"{name}.partial"
    source.write_bytes(table.pack())
    return storage.store(save, source, name, lasting=False)[1]


class _Files(FileSystem):
    """How DCP's writer opens the files of tensors."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with io.BufferedWriter(EarlyFile(path)) as stream:
            yield stream


@dataclass(slots=True)
class _Found:
    """What this node's slots hold and what of it this node writes; see manifest.PartTable."""

    pieces: list[_Piece] = field(default_factory=list)
    own: dict[int, tuple[Row, ...]] = field(default_factory=dict)
    shared: dict[tuple[int, ...], tuple[Row, ...]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)


def _found(version: Version, num_ranks: int, shares: Sequence[tuple[Share, Slot]]) -> _Found:
    found = _Found()
    sets: dict[tuple[int, ...], list[_Leaf]] = {}
    writers: dict[tuple[int, ...], Share] = {}
    for share, slot in shares:
        leaves, tail = _leaves(slot, version, share.part, num_ranks)
        found.tied |= tail["tied"]
        if share.part.kind != "own":
            sets.setdefault(share.part.members, []).extend(leaves)
            writers[share.part.members] = share
            continue
        (rank,) = share.part.members
        found.own[rank] = tuple(leaf.row() for leaf in leaves)
        found.pieces += [leaf.piece() for leaf in leaves if leaf.holders[0] == rank and not leaf.empty]
        found.pieces.append(_values_piece(rank, tail["values"]))
        if rank == 0:
            found.pieces += _group_pieces(tail["values"])
    for members, leaves in sets.items():
        found.shared[members] = tuple(leaf.row() for leaf in leaves)
        share = writers[members]
        mine = set(divide([(leaf.name, leaf.tensor.nbytes) for leaf in leaves], share.num_writers)[share.writer])
        found.pieces += [leaf.piece() for leaf in leaves if leaf.name in mine and not leaf.empty]
    return found


@dataclass(frozen=True, slots=True)
class _Leaf:
    """``holders``: the ranks that hold the same; the first of them writes it, where they are on one node."""

    name: str
    path: KeyPath
    tensor: torch.Tensor
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    holders: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """A part without elements of a tensor that has some."""
        return self.tensor.numel() == 0 and 0 not in self.size

    def row(self) -> Row:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return Row(self.name, key_of(self.path), dtype, tuple(self.tensor.shape), self.offsets)

    def piece(self) -> _Piece:
        return _Piece(self.path, self.tensor, None, self.size, self.offsets)


def _leaves(slot: Slot, version: Version, part: Part, num_ranks: int) -> tuple[list[_Leaf], dict[str, Any]]:
    header = _check(slot, version, "does not hold it")
    body = slot.body(header.num_bytes)
    image = torch.frombuffer(body, dtype=torch.uint8)
    if not is_image_of(image, version, part):
        raise SaveFailed(f"a slot of step {version.step} of round {version.epoch} is not {part}")
    layout, tail = open_image(image)
    leaves = []
    for entry in layout.entries:
        alone = [entry.shape, [0] * len(entry.shape), part.members, part.members]
        size, offsets, holders, ranks = tail["chunks"].get(entry.name) or alone
        path = path_of(entry.name)
        if len(ranks) < num_ranks:  # the others may have a tensor of the same name, and another one
            path = rank_path(min(ranks), path)
        # A storage of its own: torch.save writes all of a view's storage.
        region = body[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]
        flat = torch.frombuffer(region, dtype=torch.uint8) if entry.num_bytes else torch.empty(0, dtype=torch.uint8)
        tensor = flat.view(entry.dtype).view(entry.shape)
        leaves.append(_Leaf(entry.name, path, tensor, tuple(size), tuple(offsets), tuple(holders)))
    return leaves, tail


def _check(slot: Slot, version: Version, otherwise: str) -> Any:
    header = slot.header()
    if header is None or header.version != version:
        raise SaveFailed(f"a slot of step {version.step} of round {version.epoch} {otherwise}")
    if not slot.verify(header):
        raise SaveFailed(f"a slot of step {version.step} of round {version.epoch} does not match its digest")
    return header


def _values_piece(rank: int, values: bytes) -> _Piece:
    tensor = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    return _Piece(values_path(rank), tensor, None, tuple(tensor.shape), (0,))


def _group_pieces(values: bytes) -> list[_Piece]:
    """The optimizers' parameter groups as stock PyTorch saves them; settings that are tensors are leaves already."""
    pieces = []
    for optimizer, saved in decode(values)["optimizers"].items():
        for index, group in enumerate(saved["groups"]):
            settings = {name: value for name, value in group["values"].items() if not isinstance(value, TensorRef)}
            settings["params"] = [name.removeprefix("model/").replace("/", ".", 1) for name in group["params"]]
            pieces += [_Piece(group_path(optimizer, index, name), None, v, (), ()) for name, v in settings.items()]
    return pieces


def _item(piece: _Piece, stored: Any) -> Item:
    shape = () if piece.tensor is None else tuple(piece.tensor.shape)
    dtype = "" if piece.tensor is None else str(piece.tensor.dtype).removeprefix("torch.")
    where = (stored.relative_path, stored.offset, stored.length)
    return Item(piece.path, dtype, piece.size, piece.offsets, shape, *where)
