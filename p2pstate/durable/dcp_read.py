"""Tensors, or parts of them, out of a checkpoint in PyTorch's distributed checkpoint format, by DCP's own reader.

In: a checkpoint that was verified (see catalog.py), the parts that are wanted. Out: tensors in new memory. Parts may be
cut in any way, whatever the parts were that had been written. Nothing collective happens here.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from p2pstate.durable.catalog import Found
from p2pstate.durable.files import digest_of
from p2pstate.durable.manifest import METADATA, Damaged

__all__ = ["Reader", "Wanted"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The part of the tensor ``key`` that begins at ``offsets``."""

    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class Reader:
    """One checkpoint. Raises OSError when it cannot be read, Damaged when its ``.metadata`` is not what was written."""

    def __init__(self, found: Found) -> None:
        assert found.manifest is not None
        with found.open(METADATA) as file:  # a pickle: nothing is believed before its digest is the manifest's
            if digest_of(file) != found.manifest.files[METADATA]:
                raise Damaged(f"{found.name}: {METADATA} is damaged: its digest is not that of what was written")
        self._name = found.name
        self._reader = FileSystemReader(found.name)
        self._reader.fs = _Files(found)
        self._metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)

    def tensors(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """All tensors by key."""
        entries = self._metadata.state_dict_metadata.items()
        return {key: (e.properties.dtype, e.size) for key, e in entries if isinstance(e, TensorStorageMetadata)}

    def whole(self, key: str) -> Wanted:
        """All of a tensor. Raises KeyError."""
        size = self._entry(key).size
        return Wanted(key, (0,) * len(size), tuple(size))

    def read(self, wanted: Mapping[str, Wanted]) -> dict[str, torch.Tensor]:
        """By the caller's names. Raises KeyError for an unknown key, ValueError for parts that are not all there,
        Damaged for what is no tensor."""
        planner = _Planner()
        found: dict[str, torch.Tensor] = {}
        items: list[ReadItem] = []
        for name, want in wanted.items():
            entry = self._entry(want.key)
            target = found[name] = torch.empty(want.shape, dtype=entry.properties.dtype)
            if target.numel() == 0:
                continue
            chunk = ChunkStorageMetadata(torch.Size(want.offsets), torch.Size(want.shape))
            parts = create_read_items_for_chunk_list(want.key, entry, [chunk])
            if sum(part.lengths.numel() for part in parts) != target.numel():
                raise ValueError(f"{want.key} from {list(want.offsets)} on, {list(want.shape)}: not all of it is there")
            planner.targets[MetadataIndex(want.key, want.offsets)] = target
            items += parts
        stored = self._metadata.storage_data
        items.sort(key=lambda item: stored[item.storage_index].offset)  # each file from its begin to its end
        try:
            self._reader.read_data(LoadPlan(items), planner).wait()
        except (OSError, ValueError):
            raise
        except Exception as error:  # whatever torch.load makes of other bytes than those that were written
            raise Damaged(f"{self._name} is damaged: verify it to see which files ({type(error).__name__})") from error
        return found

    def _entry(self, key: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            raise KeyError(f"{key} is not a tensor")
        return entry


class _Files(FileSystem):
    """The files of one checkpoint, wherever they are, as DCP's reader opens them."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self._found = found

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with self._found.open(os.path.basename(path)) as file:
            yield file


class _Planner(LoadPlanner):
    """Tells DCP's reader where each part goes."""

    def __init__(self) -> None:
        self.targets: dict[MetadataIndex, torch.Tensor] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self.targets[read_item.dest_index]
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, begin, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("only tensors are asked for")

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        raise AssertionError("this planner is given its targets")

    def create_local_plan(self) -> LoadPlan:
        raise AssertionError("each rank plans for itself")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise AssertionError("each rank plans for itself")

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan
