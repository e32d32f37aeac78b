"""Which checkpoint all ranks resume from, decided by all of them together, and each rank's state out of it.

In: where checkpoints are, the round's store, this rank's place. Out: one choice that is the same everywhere (a name and
the digest of its manifest), or none; tensors and plain values for ``TrainingState.restore``.

Invariants: every byte of the chosen checkpoint was read and matched its digest on some rank before anybody uses it;
one that did not is named and skipped, by everybody; nobody mixes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgpack
import torch
from torch._C._distributed_c10d import Store

from p2pstate.durable.catalog import Found, damaged_files, find, list_checkpoints
from p2pstate.durable.dcp_read import Reader, Wanted
from p2pstate.durable.keys import key_of, values_path
from p2pstate.durable.resize import resize
from p2pstate.durable.storage import Storage
from p2pstate.errors import ConfigError
from p2pstate.state import Leaf

__all__ = ["Loaded", "Resolved", "load", "load_resized", "resolve"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """``skipped``: a sentence for every newer save that cannot be used."""

    choice: Found | None
    skipped: tuple[str, ...]


def resolve(
    store: Store,
    storage: Storage,
    rank: int,
    world_size: int,
    timeout_s: float,
    before_step: int | None = None,
    num_back: int = 1,
) -> Resolved:
    """Called by all ranks of a round alike: the newest good one; of those before ``before_step``, if given, the
    ``num_back``-th newest, or the oldest where there are fewer. Raises ConfigError when what is there cannot be read.
    """
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        store.set("disk/candidates", _candidates(storage, before_step, num_back))
    store.wait(["disk/candidates"], timeout)
    listed = msgpack.unpackb(store.get("disk/candidates"))
    if listed["error"]:
        raise ConfigError(
            f"the checkpoints at {storage.where} cannot be read ({listed['error']}): what is there would be lost sight "
            "of. Make it readable on every node, or give another place"
        )
    skipped: list[str] = list(listed["skipped"])
    for index, (name, digest) in enumerate(listed["complete"]):
        found, problems = _verify(storage, name, digest, rank, world_size)
        store.set(f"disk/{index}/{rank}", msgpack.packb(problems))
        keys = [f"disk/{index}/{each}" for each in range(world_size)]
        store.wait(keys, timeout)
        everybodys = sorted({problem for key in keys for problem in msgpack.unpackb(store.get(key))})
        if not everybodys:
            return Resolved(found, tuple(skipped))
        skipped.append(f"{name}: {'; '.join(everybodys)}")
    return Resolved(None, tuple(skipped))


def _candidates(storage: Storage, before_step: int | None, num_back: int) -> Any:
    """The complete ones, the newest first, and why the others are none. (The oldest that are broken are not told.)"""
    try:
        found = list_checkpoints(storage)
    except OSError as error:
        return _packed([], [], str(error))
    complete = [each for each in found if each.manifest is not None and not each.problem]
    if before_step is not None:
        complete = [each for each in complete if each.step < before_step]
        complete = complete[min(num_back, len(complete)) - 1 :] if complete else []
    oldest = complete[-1].serial if complete else 0
    broken = [f"{each.name}: {each.problem}" for each in found if each.problem and each.serial > oldest]
    return _packed([(each.name, each.manifest.digest) for each in complete if each.manifest], broken, "")


def _packed(complete: Sequence[tuple[str, str]], skipped: Sequence[str], error: str) -> Any:
    return msgpack.packb({"complete": complete, "skipped": skipped, "error": error})


def _verify(storage: Storage, name: str, digest: str, rank: int, world_size: int) -> tuple[Found, list[str]]:
    """This rank's part of the files. Storage may fail for one rank only: nobody waits for it in vain."""
    found = find(storage, name)
    if found.problem or found.manifest is None:
        return found, [found.problem]
    if found.manifest.digest != digest:
        return found, ["it reads differently on different nodes"]
    return found, damaged_files(found, sorted(found.manifest.files)[rank::world_size])


@dataclass(frozen=True, slots=True)
class Loaded:
    """``values``: decoded plain values. ``said``: what is different, because the number of ranks is."""

    tensors: Mapping[str, torch.Tensor]
    values: Any
    said: tuple[str, ...] = ()


def load_resized(choice: Found, rank: int, num_ranks: int, leaves: Sequence[Leaf]) -> Loaded:
    """The state of ``rank`` of another number of ranks than it was saved by; ``leaves``: the live models'.

    Raises ValueError when a tensor is missing that the live objects need.
    """
    reader = Reader(choice)

    def values_of(each: int) -> bytes:
        key = key_of(values_path(each))
        return reader.read({key: reader.whole(key)})[key].numpy().tobytes()

    assert choice.manifest is not None
    sizes = {key: size for key, (_, size) in reader.tensors().items()}
    try:
        before = choice.manifest.world_size
        keys = {row.leaf: row.key for row in choice.manifest.rows_of(rank % before)}
        resized = resize(sizes, keys, values_of, before, leaves, rank, num_ranks)
    except KeyError as error:
        raise ValueError(
            f"{choice.path} has no tensor {error}: it was written by another model or optimizer"
        ) from error
    return Loaded(reader.read(resized.wanted), resized.values, resized.said)


def load(choice: Found, rank: int) -> tuple[dict[str, torch.Tensor], bytes]:
    """The state of ``rank``, on as many ranks as it was saved by: (leaves by name, plain values)."""
    reader = Reader(choice)
    assert choice.manifest is not None
    rows = choice.manifest.rows_of(rank)
    wanted = {row.leaf: Wanted(row.key, row.offsets, row.shape) for row in rows}
    values = "/values"
    found = reader.read({**wanted, values: reader.whole(key_of(values_path(rank)))})
    return found, found.pop(values).numpy().tobytes()
