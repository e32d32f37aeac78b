"""A checkpoint of one number of ranks for a run of another: what each rank reads, and what has no meaning any more.

In: what the checkpoint holds, the live model's leaves (which say how it is divided now). Out: the parts to read, plain
values to restore, sentences for a person. Tensors are the same as before, cut anew; what every rank had for itself
(random streams, BatchNorm statistics, positions that differ from rank to rank) goes to rank ``r`` from rank ``r``
modulo the old number. Pure, but for the live random streams, which a rank beyond the old number keeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from p2pstate.durable.dcp_read import Wanted
from p2pstate.durable.keys import key_of, path_of
from p2pstate.state import Leaf
from p2pstate.state import rng as random_streams
from p2pstate.state.chunks import chunks_of
from p2pstate.state.decoding import decode
from p2pstate.state.restore import names_in

__all__ = ["Resized", "resize"]

_OPTIMIZER_LEAF = re.compile(r"optimizer\d*/(model\d*/.*)/[^/]*")


@dataclass(frozen=True, slots=True)
class Resized:
    """``values``: decoded. ``said``: what is different from going on with the old number of ranks."""

    wanted: Mapping[str, Wanted]
    values: Any
    said: tuple[str, ...]


def resize(
    sizes: Mapping[str, torch.Size],
    keys: Mapping[str, str],
    values_of: Callable[[int], bytes],
    num_ranks_before: int,
    leaves: Sequence[Leaf],
    rank: int,
    num_ranks: int,
) -> Resized:
    """``sizes``: of all tensors, by key. ``keys``: of the leaves of the rank that this one goes on from (``rank``
    modulo the old number). ``leaves``: the live models'. Raises KeyError for a missing tensor."""
    source = rank % num_ranks_before
    values = decode(values_of(source))
    if rank >= num_ranks_before and values["rng"] is not None:
        values["rng"] = random_streams.capture()
    live = {leaf.name: leaf for leaf in leaves}
    chunks = chunks_of(leaves)
    wanted = {}
    for name in sorted(live.keys() | names_in(values)):
        key = keys.get(name) or key_of(path_of(name))
        found = _OPTIMIZER_LEAF.fullmatch(name)
        like = name if name in live else found[1] if found else ""
        if like in chunks and list(sizes[key]) == chunks[like][0]:
            wanted[name] = Wanted(key, tuple(chunks[like][1]), tuple(live[like].tensor.shape))
        else:
            wanted[name] = _whole(key, sizes[key])
    every = [msgpack.unpackb(values_of(each), strict_map_key=False, raw=True) for each in range(num_ranks_before)]
    return Resized(wanted, values, tuple(_said(every, num_ranks)))


def _whole(key: str, size: torch.Size) -> Wanted:
    return Wanted(key, (0,) * len(size), tuple(size))


def _said(every: Sequence[Mapping[bytes, Any]], num_ranks: int) -> list[str]:
    before = len(every)
    instead = f"differs from rank to rank: rank r goes on with that of rank r modulo {before}"
    said = [f"it was written by {before} ranks and is resumed on {num_ranks}: steps are not the same bits as before"]
    if num_ranks > before and every[0][b"rng"] is not None:
        said.append(f"ranks {before} to {num_ranks - 1} keep the random streams that the script has given them")
    for name in every[0][b"objects"]:
        if any(each[b"objects"].get(name) != every[0][b"objects"][name] for each in every):
            said.append(f"the state of {name.decode()!r} {instead}")
    if every[0][b"extra"] is not None and any(each[b"extra"] != every[0][b"extra"] for each in every):
        said.append(f"extra {instead}")
    return said
