"""Optimizer state that does not exist yet, estimated: most optimizers make theirs in the first step.

In: an optimizer, one of its parameters. Out: bytes that its state will have.
Known limits: only torch's own optimizers and what derives from them are known; of others, and of tables smaller than a
parameter (Adafactor's rows and columns, steps), nothing is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from p2pstate.state.leaves import local_of

__all__ = ["expected_state_bytes"]

Group = Mapping[str, Any]

# Of each kind: how many tensors of the parameter's size it keeps.
_NUM_TENSORS: dict[str, Callable[[Group], int]] = {
    "Adadelta": lambda group: 2,
    "Adam": lambda group: 2 + bool(group.get("amsgrad")),
    "AdamW": lambda group: 2 + bool(group.get("amsgrad")),
    "Adamax": lambda group: 2,
    "ASGD": lambda group: 1,
    "Muon": lambda group: 1,
    "NAdam": lambda group: 2,
    "RAdam": lambda group: 2,
    "RMSprop": lambda group: 1 + (group.get("momentum", 0) > 0) + bool(group.get("centered")),
    "Rprop": lambda group: 2,
    "SGD": lambda group: int(group.get("momentum", 0) != 0),
    "SparseAdam": lambda group: 2,
}


def expected_state_bytes(optimizer: Optimizer, group: Group, parameter: torch.Tensor) -> int:
    """Bytes on this rank of the state that ``optimizer`` will make for ``parameter``; 0 for one that is frozen."""
    if not parameter.requires_grad:
        return 0
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and kind.__name__ in _NUM_TENSORS:
            local = local_of(parameter) if isinstance(parameter, DTensor) else parameter
            return _NUM_TENSORS[kind.__name__](group) * local.numel() * local.element_size()
    return 0
