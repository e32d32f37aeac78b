"""The weights of a checkpoint as a safetensors file, for whoever trains no further.

In: a checkpoint. Out: one file with every parameter and buffer of the models under its name in the model,
whole, and the step in the file's own metadata. A tensor that differs from rank to rank is that of one rank.
Known limit: all weights are in memory at once.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from p2pstate.durable.catalog import Found
from p2pstate.durable.dcp_read import Reader
from p2pstate.durable.keys import key_of, path_of
from p2pstate.durable.manifest import Manifest

__all__ = ["differing", "export_weights", "keys_of", "read_weights", "weight_names"]


def weight_names(manifest: Manifest) -> dict[str, str]:
    """Name in the file -> key, of everything below models; without the model's own name where there is one only."""
    rows = [row for ranks in (manifest.own, manifest.shared) for each in ranks.values() for row in each]
    paths = sorted({path_of(row.leaf) for row in rows if row.leaf.startswith("model")}, key=key_of)
    single = {path[0] for path in paths} == {"model"}
    return {key_of(path[1:] if single else path): key_of(path) for path in paths}


def keys_of(manifest: Manifest, rank: int) -> dict[str, str]:
    """Key -> the key under which ``rank`` has it: another one where ranks differ."""
    return {key_of(path_of(row.leaf)): row.key for row in manifest.rows_of(rank)}


def differing(manifest: Manifest) -> list[str]:
    """Names of what several ranks have under one name, and differently."""
    ranks = [keys_of(manifest, rank) for rank in range(manifest.world_size)]
    names = weight_names(manifest)
    return [name for name, key in names.items() if len({keys[key] for keys in ranks if key in keys}) > 1]


def read_weights(found: Found, rank: int | None = None) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of the models, whole, by its name in the model. Raises OSError.

    ``rank``: as this one has them; otherwise what differs is of the first rank that has it.
    """
    assert found.manifest is not None
    reader = Reader(found)
    own = {} if rank is None else keys_of(found.manifest, rank)
    names = weight_names(found.manifest)
    return reader.read({name: reader.whole(own.get(key, key)) for name, key in names.items()})


def export_weights(found: Found, target: Path, rank: int | None = None) -> tuple[int, int]:
    """Write ``target``; returns (number of tensors, bytes). Raises ImportError, OSError, ValueError."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("export needs the package safetensors: pip install 'p2pstate[export]'") from error
    assert found.manifest is not None
    num_ranks = found.manifest.world_size
    if rank is not None and not 0 <= rank < num_ranks:
        raise ValueError(f"there is no rank {rank} in it: it was written by ranks 0 to {num_ranks - 1}")
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"{target}: name a file in a folder that exists")
    tensors = read_weights(found, rank)
    partial = target.with_name(target.name + ".partial")
    try:
        save_file(tensors, partial, metadata={"format": "pt", "step": str(found.manifest.version.step)})
    except SafetensorError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"{target} cannot be written: {error}") from error
    except KeyError as error:
        raise ValueError(f"safetensors cannot hold tensors of type {error}") from error
    os.replace(partial, target)
    return len(tensors), target.stat().st_size
