"""The weights of a checkpoint as a safetensors file, for whoever trains no further.

In: a checkpoint. Out: one file with every parameter and buffer of the models under its name in the model,
whole, and the step in the file's own metadata. Known limit: all weights are in memory at once.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from p2pstate.durable.catalog import Found
from p2pstate.durable.dcp_read import Reader
from p2pstate.durable.keys import key_of, path_of
from p2pstate.durable.manifest import Manifest

__all__ = ["export_weights", "read_weights", "weight_names"]


def weight_names(manifest: Manifest) -> dict[str, str]:
    """Name in the file -> key, of everything below models; without the model's own name where there is one only."""
    rows = [row for ranks in (manifest.own, manifest.shared) for each in ranks.values() for row in each]
    paths = sorted({path_of(row.leaf) for row in rows if row.leaf.startswith("model")}, key=key_of)
    single = {path[0] for path in paths} == {"model"}
    return {key_of(path[1:] if single else path): key_of(path) for path in paths}


def read_weights(found: Found) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of the models, whole, by its name in the model. Raises OSError."""
    assert found.manifest is not None
    reader = Reader(found)
    return reader.read({name: reader.whole(key) for name, key in weight_names(found.manifest).items()})


def export_weights(found: Found, target: Path) -> tuple[int, int]:
    """Write ``target``; returns (number of tensors, bytes). Raises ImportError, OSError, ValueError."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("export needs the package safetensors: pip install 'p2pstate[export]'") from error
    assert found.manifest is not None
    tensors = read_weights(found)
    partial = target.with_name(target.name + ".partial")
    save_file(tensors, partial, metadata={"format": "pt", "step": str(found.manifest.version.step)})
    os.replace(partial, target)
    return len(tensors), target.stat().st_size
