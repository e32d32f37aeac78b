"""The names that tensors have in a checkpoint: those that stock PyTorch gives them.

In: names of leaves. Out: paths in a nested state dict, and keys, which are paths as DCP flattens them. With one model
and one optimizer they are those of ``{"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model,
optimizer)}``, so stock ``torch.distributed.checkpoint.load`` fills exactly that. What only one rank has is below
``p2pstate.rank<r>``: equal keys of two ranks would be taken for the same tensor.
"""

from __future__ import annotations

import re

__all__ = ["Path", "group_path", "key_of", "path_of", "rank_path", "values_path", "without_rank"]

Path = tuple[str | int, ...]

_MODEL = re.compile(r"(model\d*)/(.*)")
_OPTIMIZER = re.compile(r"(optimizer\d*)/(model\d*)/(.*)/([^/]*)")
_GROUP = re.compile(r"(optimizer\d*)/:groups/(\d+)/([^/]*)")
_OURS = "p2pstate"


def path_of(leaf: str) -> Path:
    """``optimizer/model/a.weight/step`` -> ``("optimizer", "state", "a.weight", "step")``."""
    if found := _OPTIMIZER.fullmatch(leaf):
        optimizer, model, parameter, entry = found.groups()
        return optimizer, "state", parameter if model == "model" else f"{model}.{parameter}", entry
    if found := _GROUP.fullmatch(leaf):
        return group_path(found[1], int(found[2]), found[3])
    if found := _MODEL.fullmatch(leaf):
        return found[1], found[2]
    return tuple(leaf.split("/"))


def key_of(path: Path) -> str:
    return ".".join(map(str, path))


def rank_path(rank: int, path: Path) -> Path:
    return _OURS, f"rank{rank}", *path


def without_rank(path: Path) -> tuple[int, Path] | None:
    """The rank and the path that :func:`rank_path` was given; None for other paths."""
    if path[0] != _OURS or len(path) < 3:
        return None
    return int(str(path[1]).removeprefix("rank")), path[2:]


def values_path(rank: int) -> Path:
    """The plain values of one rank (random streams, data position and so on): MessagePack as a 1-D uint8 tensor."""
    return rank_path(rank, ("values",))


def group_path(optimizer: str, index: int, name: str) -> Path:
    """One setting of one parameter group."""
    return optimizer, "param_groups", index, name
