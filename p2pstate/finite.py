"""Whether the gradients that an optimizer is about to use are numbers.

In: an optimizer. Out: yes or no, for what this rank has of them. It takes one pass over the gradients, and on a card a
wait for it: only where the user has asked for it (``on_nan=``).
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["POLICIES", "all_finite"]

POLICIES = ("ignore", "stop", "skip", "rollback")


def all_finite(optimizer: Optimizer) -> bool:
    """Of all its parameters that have a gradient; of sharded ones the own part."""
    grads = [
        parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    values = [grad for grad in dense if grad.numel()]
    if not values:
        return True
    # The largest magnitude: it overflows in no type, and a NaN is passed on.
    norms = [norm.to(torch.float64) for norm in torch._foreach_norm(values, float("inf"))]
    return all(
        bool(torch.stack([norm for norm in norms if norm.device == device]).isfinite().all())
        for device in {norm.device for norm in norms}  # some of them on the host, where those are offloaded
    )
