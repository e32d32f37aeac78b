"""Which ranks hold exactly the bytes that this rank holds, read off from how a model is distributed.

In: DTensors with their placements, DistributedDataParallel modules, optimizer state. Out: *holders*, sorted global
ranks with the own rank among them.
Invariants: all ranks named in a tuple compute the same tuple; what nothing keeps equal is held by the own rank only.
Known limits: holders follow from structure; whether the bytes are equal is seen elsewhere (replicas.py). Replicas of a
parameter that is no DTensor and not below DistributedDataParallel are not known of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from p2pstate.state.leaves import Holders, is_plain

__all__ = ["World", "current_world", "follows", "holders_of_parameter", "replicas"]

# Communication hooks after which every rank has the same gradient: torch's own, except those that average among a
# few ranks or not at all.
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_HOOKS_OUT_OF_STEP = (f"{_HOOKS}post_localSGD_hook", f"{_HOOKS}debugging_hooks", f"{_HOOKS}ddp_zero_hook")


@dataclass(frozen=True, slots=True)
class World:
    """This process among all: rank 0 of 1 where no process group exists."""

    rank: int
    size: int

    @property
    def own(self) -> Holders:
        return (self.rank,)


def current_world() -> World:
    if not dist.is_initialized():
        return World(0, 1)
    return World(dist.get_rank(), dist.get_world_size())


def replicas(model: DistributedDataParallel, world: World) -> Holders:
    """The ranks on which ``model`` keeps its parameters equal: those of its group, or only the own one."""
    # A frozen copy of a DistributedDataParallel may be updated by one rank only (an average).
    if world.size == 1 or not any(p.requires_grad for p in model.parameters()):
        return world.own
    if not all(_keeps_in_step(hook) for hook, _ in model._comm_hooks):
        return world.own
    try:
        ranks = tuple(sorted(dist.get_process_group_ranks(model.process_group)))
    except KeyError:  # its group is one of an earlier job in this process
        return world.own
    return ranks if world.rank in ranks else world.own


def holders_of_parameter(parameter: torch.Tensor, replicated: Holders, world: World) -> Holders:
    """Who holds ``parameter``'s local bytes; ``replicated`` are the ranks of the DistributedDataParallel above it.

    Those of a DTensor are the ranks of its mesh that differ from the own rank only where its placements replicate.
    """
    if not isinstance(parameter, DTensor):
        return replicated if _is_whole(parameter) else world.own
    if world.size == 1:
        return world.own
    try:
        ranks = parameter.device_mesh.mesh
    except RuntimeError:  # part of a mesh that this rank is not in
        return world.own
    at = (ranks == world.rank).nonzero().tolist()
    if not at:
        return world.own
    where = tuple(slice(None) if p.is_replicate() else at[0][dim] for dim, p in enumerate(parameter.placements))
    return tuple(sorted(ranks[where].flatten().tolist()))


def follows(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether optimizer state ``value`` is equal wherever the local bytes of its parameter are.

    True for what has the parameter's shape and is split like it, and for single numbers (``step``).
    """
    if not isinstance(value, DTensor):
        return value.dim() == 0 or (value.shape == parameter.shape and not isinstance(parameter, DTensor))
    if not isinstance(parameter, DTensor) or value.device_mesh != parameter.device_mesh:
        return False
    if value.dim() == 0:
        return all(placement.is_replicate() for placement in value.placements)
    return value.shape == parameter.shape and value.placements == parameter.placements


def _keeps_in_step(hook: Any) -> bool:
    module = str(getattr(hook, "__module__", ""))
    return module.startswith(_HOOKS) and not module.startswith(_HOOKS_OUT_OF_STEP)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Not a shard of something bigger, as far as its type tells."""
    if is_plain(tensor):
        return True
    wrapper: Any = tensor
    if isinstance(tensor, DTensor) or not is_traceable_wrapper_subclass(wrapper):
        return False
    attributes, _ = wrapper.__tensor_flatten__()
    return "_local_tensor" not in attributes and all(_is_whole(getattr(wrapper, a)) for a in attributes)
