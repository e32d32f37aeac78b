"""Which checkpoint all ranks resume from, decided by all of them together, and each rank's state out of it.

In: where checkpoints are, the round's store, this rank's place. Out: one choice that is the same everywhere (a name and
the digest of its manifest), or none; tensors and plain values for ``TrainingState.restore``.

Invariants: every byte of the chosen checkpoint was read and matched its digest on some rank before anybody uses it;
one that did not is named and skipped, by everybody; nobody mixes.
"""

from __future__ import annotations

import time
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
from p2pstate.durable.patience import answer_by
from p2pstate.durable.resize import resize
from p2pstate.durable.storage import Storage
from p2pstate.errors import ConfigError
from p2pstate.state import Leaf

__all__ = ["GIVEN_UP_WITHIN_S", "Loaded", "Resolved", "load", "load_resized", "resolve"]

GIVEN_UP_WITHIN_S = 10.0  # after the deadline a rank whose storage hangs has said so


@dataclass(frozen=True, slots=True)
class Resolved:
    """``skipped``: a sentence for every newer save that cannot be used. ``damaged``: names of those among them that
    look complete, but whose bytes are wrong."""

    choice: Found | None
    skipped: tuple[str, ...]
    damaged: tuple[str, ...] = ()


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
    ``num_back``-th newest, or the oldest where there are fewer. Raises ConfigError when any rank cannot read what is
    there, or not within ``timeout_s`` in all.
    """
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        store.set("disk/candidates", _candidates(storage, before_step, num_back, deadline))
    _wait(store, ["disk/candidates"], deadline)
    listed = msgpack.unpackb(store.get("disk/candidates"))
    if listed["error"]:
        raise _unreadable(storage, listed["error"])
    skipped: list[str] = list(listed["skipped"])
    damaged: list[str] = []
    for index, (name, digest) in enumerate(listed["complete"]):
        verified = _verify_by(deadline, storage, name, digest, rank, world_size)
        store.set(f"disk/{index}/{rank}", msgpack.packb([verified.problems, verified.hung]))
        keys = [f"disk/{index}/{each}" for each in range(world_size)]
        _wait(store, keys, deadline)
        everybodys: set[str] = set()
        for key in keys:
            problems, hung = msgpack.unpackb(store.get(key))
            if hung:
                raise _unreadable(storage, hung)
            everybodys |= set(problems)
        if not everybodys:
            return Resolved(verified.found, tuple(skipped), tuple(damaged))
        skipped.append(f"{name}: {'; '.join(sorted(everybodys))}")
        damaged.append(name)
    return Resolved(None, tuple(skipped), tuple(damaged))


def _wait(store: Store, keys: list[str], deadline: float) -> None:
    store.wait(keys, timedelta(seconds=max(0.0, deadline - time.monotonic()) + GIVEN_UP_WITHIN_S))


def _unreadable(storage: Storage, why: str) -> ConfigError:
    return ConfigError(
        f"the checkpoints at {storage.where} cannot be read ({why}): what is there would be lost sight of. Make it "
        "readable on every node, or give another place"
    )


def _candidates(storage: Storage, before_step: int | None, num_back: int, deadline: float) -> Any:
    """The complete ones, the newest first, and why the others are none. (The oldest that are broken are not told.)"""
    try:
        found = answer_by(deadline, lambda: list_checkpoints(storage), f"the list of checkpoints at {storage.where}")
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


@dataclass(frozen=True, slots=True)
class _Verified:
    """``hung``: storage did not answer, so nothing is known."""

    found: Found | None
    problems: list[str]
    hung: str = ""


def _verify_by(deadline: float, storage: Storage, name: str, digest: str, rank: int, num_ranks: int) -> _Verified:
    """This rank's part of the files. Storage may fail or hang for one rank only: nobody waits for it in vain."""

    def verify() -> _Verified:
        found = find(storage, name)
        if found.problem or found.manifest is None:
            return _Verified(found, [found.problem])
        if found.manifest.digest != digest:
            return _Verified(found, ["it reads differently on different nodes"])
        return _Verified(found, damaged_files(found, sorted(found.manifest.files)[rank::num_ranks]))

    try:
        return answer_by(deadline, verify, f"the content of {storage.where}/{name}")
    except TimeoutError as error:
        return _Verified(None, [], str(error))


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
