"""Which checkpoint all ranks resume from, decided by all of them together, and each rank's state out of it.

In: the directory, the round's store, this rank's place. Out: one choice that is the same everywhere (a name and the
digest of its manifest), or none; tensors and plain values for ``TrainingState.restore``.

Invariants: every byte of the chosen checkpoint was read and matched its digest on some rank before anybody uses it;
one that did not is named and skipped, by everybody; nobody mixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch._C._distributed_c10d import Store

from p2pstate.durable.catalog import Found, damaged_files, find, list_checkpoints
from p2pstate.durable.dcp_read import Reader, Wanted
from p2pstate.durable.keys import key_of, values_path
from p2pstate.durable.manifest import Manifest
from p2pstate.errors import ConfigError

__all__ = ["Choice", "Resolved", "load", "resolve"]


@dataclass(frozen=True, slots=True)
class Choice:
    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.version.step


@dataclass(frozen=True, slots=True)
class Resolved:
    """``skipped``: a sentence for every newer save that cannot be used."""

    choice: Choice | None
    skipped: tuple[str, ...]


def resolve(store: Store, root: Path, rank: int, world_size: int, timeout_s: float) -> Resolved:
    """Called by all ranks of a round alike. Raises ConfigError when the directory cannot be read."""
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        store.set("disk/candidates", _candidates(root))
    store.wait(["disk/candidates"], timeout)
    listed = msgpack.unpackb(store.get("disk/candidates"))
    if listed["error"]:
        raise ConfigError(
            f"the checkpoint directory {root} cannot be read ({listed['error']}): what is in it would be lost sight "
            "of. Make it readable on every node, or give another one"
        )
    skipped: list[str] = list(listed["skipped"])
    for index, (name, digest) in enumerate(listed["complete"]):
        found = find(root / name)
        problems = _verify(found, digest, rank, world_size)
        store.set(f"disk/{index}/{rank}", msgpack.packb(problems))
        keys = [f"disk/{index}/{each}" for each in range(world_size)]
        store.wait(keys, timeout)
        everybodys = sorted({problem for key in keys for problem in msgpack.unpackb(store.get(key))})
        if not everybodys:
            assert found.manifest is not None
            return Resolved(Choice(found.path, found.manifest), tuple(skipped))
        skipped.append(f"{name}: {'; '.join(everybodys)}")
    return Resolved(None, tuple(skipped))


def _candidates(root: Path) -> Any:
    """The complete ones, the newest first, and why the others are none. (The oldest that are broken are not told.)"""
    try:
        found = list_checkpoints(root)
    except OSError as error:
        return _packed([], [], str(error))
    complete = [each for each in found if each.manifest is not None and not each.problem]
    oldest = complete[-1].serial if complete else 0
    broken = [f"{each.name}: {each.problem}" for each in found if each.problem and each.serial > oldest]
    return _packed([(each.name, each.manifest.digest) for each in complete if each.manifest], broken, "")


def _packed(complete: Sequence[tuple[str, str]], skipped: Sequence[str], error: str) -> Any:
    return msgpack.packb({"complete": complete, "skipped": skipped, "error": error})


def _verify(found: Found, digest: str, rank: int, world_size: int) -> list[str]:
    """This rank's part of the files."""
    if found.problem or found.manifest is None:
        return [found.problem]
    if found.manifest.digest != digest:
        return ["it reads differently on different nodes"]
    return damaged_files(found, sorted(found.manifest.files)[rank::world_size])


def load(choice: Choice, rank: int) -> tuple[dict[str, torch.Tensor], bytes]:
    """The state of ``rank``, on as many ranks as it was saved by: (leaves by name, plain values)."""
    reader = Reader(choice.path)
    rows = choice.manifest.rows_of(rank)
    wanted = {row.leaf: Wanted(row.key, row.offsets, row.shape) for row in rows}
    values = "/values"
    found = reader.read({**wanted, values: reader.whole(key_of(values_path(rank)))})
    return found, found.pop(values).numpy().tobytes()
