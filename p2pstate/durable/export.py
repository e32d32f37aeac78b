"""The weights of a checkpoint as a safetensors file, for whoever trains no further.

In: a checkpoint. Out: one file with every parameter and buffer that the models' ``state_dict()`` has, under its name
there, whole, and the step in the file's own metadata. A tensor that differs from rank to rank is that of one rank; one
that has several names is there once, under its first name, as safetensors has it.
Known limit: all weights are in memory at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from p2pstate.durable.catalog import Found
from p2pstate.durable.dcp_read import Reader
from p2pstate.durable.keys import key_of, path_of, values_path
from p2pstate.durable.manifest import Manifest
from p2pstate.state.decoding import decode

__all__ = ["differing", "export_weights", "keys_of", "read_weights", "weight_names"]


_OF_A_MODEL = re.compile(r"model\d*/")  # an average called model_ema is none of them


def weight_names(manifest: Manifest) -> dict[str, str]:
    """Name in the file -> key, of everything below models; without the model's own name where there is one only."""
    rows = [row for ranks in (manifest.own, manifest.shared) for each in ranks.values() for row in each]
    paths = sorted({path_of(row.leaf) for row in rows if _OF_A_MODEL.match(row.leaf)}, key=key_of)
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


def read_weights(found: Found, rank: int | None = None, *, every_name: bool = False) -> dict[str, torch.Tensor]:
    """Every tensor of the models' ``state_dict()``, whole, by its name there. Raises OSError, Damaged.

    ``rank``: as this one has them; otherwise what differs is of the first rank that has it. ``every_name``: tensors
    that are tied are there under each of their names.
    """
    assert found.manifest is not None
    reader = Reader(found)
    own = {} if rank is None else keys_of(found.manifest, rank)
    names = weight_names(found.manifest)
    if every_name:
        names |= _further_names(names, reader.tensors())
    unsaved = _non_persistent(reader, found.manifest.world_size)
    return reader.read({name: reader.whole(own.get(key, key)) for name, key in names.items() if key not in unsaved})


def _further_names(names: Mapping[str, str], keys: Iterable[str]) -> dict[str, str]:
    """Of tied tensors: all keys below the models that ``names`` does not have."""
    known = set(names.values())
    models = {key.partition(".")[0] for key in known}
    further = [key for key in keys if key.partition(".")[0] in models and key not in known]
    return {key.removeprefix("model."): key for key in further}


def _non_persistent(reader: Reader, world_size: int) -> set[str]:
    """Keys of buffers that ``state_dict()`` leaves out on some rank."""
    values = reader.read({key: reader.whole(key) for key in map(key_of, map(values_path, range(world_size)))})
    return {
        key_of(path_of(name))
        for each in values.values()
        for name in decode(each.numpy().tobytes()).get("non_persistent", ())
    }


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
