"""Forgetting what a discarded step left behind: gradients, wherever they are kept.

In: models, optimizers, loss scalers. Out: no gradient, no half of an accumulation window, no scaler that believes it
has unscaled. What a state_dict shows is restored elsewhere; this is what none shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

__all__ = ["discard_gradients"]


def discard_gradients(models: Iterable[nn.Module], optimizers: Iterable[Optimizer], scalers: Iterable[Any]) -> None:
    """Leave every parameter without a gradient, as after ``zero_grad(set_to_none=True)`` in a new process."""
    for model in models:
        model.zero_grad(set_to_none=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _discard_unsharded(module)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)  # parameters of no given model
    for scaler in scalers:
        # The stage of each optimizer: a retry would otherwise step on gradients that are still scaled.
        scaler._per_optimizer_states.clear()


def _discard_unsharded(module: Any) -> None:
    """FSDP2 accumulates unreduced gradients (``set_requires_gradient_sync(False)``) out of sight of zero_grad."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13
        groups = [state._fsdp_param_group]
    for group in groups:
        if group is None:
            continue
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None
