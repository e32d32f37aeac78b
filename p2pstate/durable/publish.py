"""What all nodes have written becomes a checkpoint: manifest, marker, settling.

In: on storage, the files and the tables of all nodes (see dcp_write.py). Out: the checkpoint's manifest and, last of
all, its ``.metadata``, written by DCP itself.

Invariants: every file has the size that its writer told, every rank's shard is there, every tensor consists of its
parts without a hole; all of it outlives a crash before ``.metadata`` appears, without which there is no checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from p2pstate.durable.dcp_write import SaveFailed
from p2pstate.durable.files import digest_of_file
from p2pstate.durable.keys import Path as KeyPath
from p2pstate.durable.keys import key_of, path_of, without_rank
from p2pstate.durable.manifest import MANIFEST, METADATA, Item, Manifest, PartTable, Row, part_table_name
from p2pstate.durable.storage import Storage
from p2pstate.state.decoding import torch_dtype
from p2pstate.types import Version

__all__ = ["publish_checkpoint"]

_STAGING = ".publishing"


def publish_checkpoint(
    storage: Storage,
    save: str,
    digests: Mapping[int, str],
    run: tuple[str, str],
    version: Version,
    world_size: int,
    created_at: float,
    reason: str,
) -> Manifest:
    """All nodes have written; make their files a checkpoint. ``digests``: place -> digest of its table.

    Raises SaveFailed when something that was written is not there, OSError when storage fails.
    """
    tables = [_table(storage, save, place, digest) for place, digest in sorted(digests.items())]
    files = {name: what for table in tables for name, what in table.files.items()}
    found = storage.sizes(save)
    for name, (size, _) in files.items():
        if found.get(name) != size:
            actual = storage.size(save, name)
            if actual == size:
                continue
            problem = "is not there" if actual is None else f"has {actual} bytes"
            raise SaveFailed(f"{storage.where}/{save}/{name} {problem}, {size} bytes were written")
    own = {rank: rows for table in tables for rank, rows in table.own.items()}
    if sorted(own) != list(range(world_size)):
        raise SaveFailed(f"{len(own)} of {world_size} ranks' shards were written")
    shared: dict[tuple[int, ...], dict[str, Row]] = {}
    for table in tables:
        for members, rows in table.shared.items():
            shared.setdefault(members, {}).update({row.leaf: row for row in rows})
    tied = {further: name for table in tables for further, name in table.tied.items()}
    metadata, results = _metadata([item for table in tables for item in table.items], tied)
    _check_covered(metadata)
    folder = storage.workspace(save)
    staging = folder / _STAGING
    staging.mkdir(exist_ok=True)
    _MetadataWriter(staging, f"{storage.where}/{save}").finish(metadata, [results])
    files[METADATA] = digest_of_file(staging / METADATA)
    all_shared = {members: tuple(rows.values()) for members, rows in shared.items()}
    manifest = Manifest(run, version, world_size, created_at, files, own, all_shared, reason)
    content = manifest.pack()
    (staging / MANIFEST).write_bytes(content)
    expected = len(content), xxhash.xxh3_128_hexdigest(content)
    _store_as_is(storage, save, staging / MANIFEST, MANIFEST, expected)
    storage.settle(save)
    _store_as_is(storage, save, staging / METADATA, METADATA, files[METADATA])  # from here on it is a checkpoint
    storage.settle(save)
    shutil.rmtree(staging, ignore_errors=True)
    for place in digests:
        storage.discard(save, part_table_name(place))
    return manifest


def _store_as_is(storage: Storage, save: str, source: Path, name: str, expected: tuple[int, str]) -> None:
    if storage.store(save, source, name) != expected:
        raise SaveFailed(f"{storage.where}/{save}/{name} reads differently from what was written")


class _MetadataWriter(FileSystemWriter):
    """Writes ``.metadata`` to a place from which it is published in one step."""

    def __init__(self, staging: Path, checkpoint_id: str) -> None:
        super().__init__(staging, sync_files=False)  # synced when it is stored
        self._checkpoint_id = checkpoint_id

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._checkpoint_id, save_id=self.save_id)


def _table(storage: Storage, save: str, place: int, digest: str) -> PartTable:
    name = part_table_name(place)
    try:
        with storage.open(save, name) as file:
            content = file.read()
    except FileNotFoundError as error:
        raise SaveFailed(
            f"{storage.where}/{save}/{name} is not visible on the node that completes the checkpoint: the checkpoint "
            "path has to be on storage that all nodes share"
        ) from error
    if xxhash.xxh3_128_hexdigest(content) != digest:
        raise SaveFailed(f"{storage.where}/{save}/{name} reads differently from what was written")
    return PartTable.unpack(content)


def _metadata(items: Sequence[Item], tied: Mapping[str, str]) -> tuple[Metadata, list[WriteResult]]:
    entries: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    results: list[WriteResult] = []

    def add(path: KeyPath, item: Item) -> None:
        key = key_of(path)
        if paths.setdefault(key, path) != path:
            raise SaveFailed(f"two different things have the key {key!r} in a checkpoint: rename one of them")
        stored = _StorageInfo(item.file, item.position, item.num_bytes)
        if not item.dtype:
            entries[key] = BytesStorageMetadata()
            results.append(WriteResult(MetadataIndex(key), item.num_bytes, stored))
            return
        properties = TensorProperties(torch_dtype(item.dtype))
        entry = entries.setdefault(key, TensorStorageMetadata(properties, torch.Size(item.size), []))
        entry.chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.shape)))
        results.append(WriteResult(MetadataIndex(key, item.offsets), item.num_bytes, stored))

    alone: dict[KeyPath, dict[int, list[Item]]] = {}
    for item in items:
        add(item.path, item)
        found = without_rank(item.path)
        if found is not None and found[1] != ("values",):
            rank, path = found
            alone.setdefault(path, {}).setdefault(rank, []).append(item)
    # What only some ranks have is found under its plain name as well, as the first of them has it (as DDP does it).
    for path, ranks in alone.items():
        if key_of(path) not in entries:
            for item in ranks[min(ranks)]:
                add(path, item)
    for further, name in tied.items():
        path, alias = path_of(name), path_of(further)
        if key_of(alias) not in entries:
            for item in [item for item in items if item.path == path] or alone[path][min(alone[path])]:
                add(alias, item)
    return Metadata(entries, planner_data=paths), results


def _check_covered(metadata: Metadata) -> None:
    """Every tensor must consist of its parts without a hole: parts that overlap were refused as double."""
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            num_stored = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if num_stored != entry.size.numel():
                raise SaveFailed(f"{key} has {entry.size.numel()} elements, {num_stored} of them were written")
