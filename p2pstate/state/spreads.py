"""How a DTensor is spread over ranks, said so that it can be made again where no parameter lends its mesh.

In: DTensors of objects, of ``extra``, of optimizer state that is not split like its parameter. Out: a row of plain
values, and from it, a local tensor and a mesh that is here, the DTensor.
Invariant: a mesh is the right one if it has the same ranks in the same order and the same names of dimensions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import torch
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from p2pstate.state.encoding import encode
from p2pstate.state.errors import LeafError

__all__ = ["spread", "spread_of"]

_PLACEMENT = re.compile(r"R|S\(([0-9]+)\)(?:/([0-9]+))?")


def spread_of(tensor: DTensor) -> list[Any]:
    """[mesh, placements, shape, strides]; of the whole tensor, not of its local part."""
    placements = [_said(placement) for placement in tensor.placements]
    return [_mesh_digest(tensor.device_mesh), placements, list(tensor.shape), list(tensor.stride())]


def spread(local: torch.Tensor, row: list[Any], here: Iterable[DTensor], name: str) -> DTensor:
    """``local`` as its part of the DTensor that ``row`` describes, over the mesh of one of those that are ``here``."""
    if list(map(type, row)) != [str, list, list, list] or not all(_PLACEMENT.fullmatch(str(p)) for p in row[1]):
        raise LeafError(name, "is spread in a way that makes no sense", "this copy is damaged: use another one")
    digest, placements, shape, strides = row
    mesh = next((each.device_mesh for each in here if _mesh_digest(each.device_mesh) == digest), None)
    if mesh is None:
        what = "is a DTensor over a mesh that no tensor of the models, optimizers and objects here has"
        raise LeafError(name, what, "make the object's tensors before restoring, or spread them over the model's mesh")
    return DTensor.from_local(
        local,
        mesh,
        [_meant(placement) for placement in placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(strides),
    )


@functools.lru_cache(maxsize=16)
def _mesh_digest(mesh: DeviceMesh) -> str:
    names = None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names)
    return xxhash.xxh3_64_hexdigest(encode([mesh.device_type, names, mesh.mesh.tolist()]))


def _said(placement: Placement) -> str:
    if isinstance(placement, _StridedShard):
        return f"S({placement.dim})/{placement.split_factor}"
    return f"S({placement.dim})" if isinstance(placement, Shard) else "R"


def _meant(said: str) -> Placement:
    found = _PLACEMENT.fullmatch(said)
    assert found is not None, said
    dim, factor = found.groups()
    if dim is None:
        return Replicate()
    return Shard(int(dim)) if factor is None else _StridedShard(int(dim), split_factor=int(factor))
