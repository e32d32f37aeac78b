"""Canonical names of a model's parameters and buffers, resolved anew each time.

In: a model, however it is wrapped. Out: (name, live tensor, scope) of every parameter and buffer, non-persistent
buffers included, tied ones once under their first name; the modules that keep extra state.
Invariants: a name depends on the model only, not on DistributedDataParallel, torch.compile or activation checkpointing
around any part of it. Only names are remembered between calls; tensors are read from their modules every time, because
buffers are re-assigned and ``p.data`` is swapped. Under FSDP2 the sharded parameter is meant, also while it is
gathered.
Known limits: FSDP1 is refused (its flat parameters have no stable parts).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from p2pstate.state.errors import LeafError
from p2pstate.state.leaves import Scope

__all__ = ["ModelNames", "Named"]

# wrapper -> the name of the child that it wraps; the segment vanishes from names (torch.compile's: _wrapped_child)
_WRAPPERS: tuple[tuple[type, str], ...] = (
    (DistributedDataParallel, "module"),
    (DataParallel, "module"),
    (ActivationWrapper, "_checkpoint_wrapped_module"),
)

Named = tuple[str, torch.Tensor, Scope]


@dataclass(slots=True)
class _Place:
    """One module at its canonical place."""

    module: nn.Module
    prefix: str  # of the names of its tensors
    raw_prefix: str  # the same as DistributedDataParallel counts it: below its 'module', wrappers included
    replicated: bool  # parameters are kept equal by a DistributedDataParallel above
    ignored: frozenset[str]  # raw names which that DistributedDataParallel leaves alone
    children: dict[str, nn.Module | None]
    fsdp_groups: list[Any]
    has_extra_state: bool
    names: dict[str, tuple[str, Scope]] = field(default_factory=dict)

    def name_of(self, key: str, *, is_parameter: bool) -> tuple[str, Scope]:
        known = self.names.get(key)
        if known is None:
            in_step = is_parameter and self.replicated and self.raw_prefix + key not in self.ignored
            known = (self.prefix + key, Scope.REPLICATED if in_step else Scope.RANK)
            self.names[key] = known
        return known


class ModelNames:
    """One model's names under ``prefix`` ("model" gives "model/layer.weight")."""

    def __init__(self, model: nn.Module, prefix: str, *, may_be_replicated: bool = True) -> None:
        """``may_be_replicated=False``: not trained itself (an average), so nothing keeps it equal on all ranks."""
        self.model = model
        self.prefix = prefix
        self._may_be_replicated = may_be_replicated
        self._places: list[_Place] = []

    def tensors(self) -> Iterator[Named]:
        """Every parameter and buffer once, in the order of the module tree."""
        seen: set[int] = set()
        for place in self._current_places():
            sharded = _sharded_parameters(place.fsdp_groups) if place.fsdp_groups else {}
            for key, parameter in place.module._parameters.items():
                if parameter is None:
                    continue
                tensor = sharded.get(id(parameter), parameter)
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    name, scope = place.name_of(key, is_parameter=True)
                    if scope is Scope.REPLICATED and type(tensor) is not nn.Parameter:
                        scope = Scope.RANK  # a shard of another dimension (DDP over tensor parallelism)
                    yield name, tensor, scope
            for key, buffer in place.module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    name, scope = place.name_of(key, is_parameter=False)
                    yield name, buffer, scope

    def extra_state_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of every module with ``get_extra_state``."""
        for place in self._current_places():
            if place.has_extra_state:
                yield place.prefix + "_extra_state", place.module

    def reshard(self) -> None:
        """Drops gathered FSDP2 parameters, so that the next forward gathers the restored shards."""
        for place in self._current_places():
            if isinstance(place.module, FSDPModule):
                place.module.reshard()

    def _current_places(self) -> list[_Place]:
        if not self._places or any(place.module._modules != place.children for place in self._places):
            self._places = list(_walk(self.model, self.prefix, self._may_be_replicated))
        return self._places


def _walk(model: nn.Module, prefix: str, may_be_replicated: bool) -> Iterator[_Place]:
    seen: set[int] = set()
    root = _Place(model, f"{prefix}/", "", False, frozenset(), {}, [], False)
    todo = [root]
    inherited_groups: dict[int, list[Any]] = {}
    while todo:
        place = todo.pop()
        module = place.module
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, FullyShardedDataParallel):
            raise LeafError(place.prefix.rstrip("/"), "is wrapped by FSDP1", "use fully_shard (FSDP2)")
        if isinstance(module, DistributedDataParallel):
            place.replicated = may_be_replicated and _keeps_in_step(module)
            place.ignored = frozenset(module.parameters_to_ignore)
        for group in _fsdp_groups(module):
            for fsdp_parameter in group.fsdp_params:
                info = fsdp_parameter._module_info
                for owner in (info.module, *info.shared_modules):
                    inherited_groups.setdefault(id(owner), []).append(group)
        place.children = dict(module._modules)
        place.fsdp_groups = inherited_groups.get(id(module), [])
        place.has_extra_state = type(module).get_extra_state is not nn.Module.get_extra_state
        yield place
        todo += [
            _child_place(place, key, child) for key, child in reversed(module._modules.items()) if child is not None
        ]


def _child_place(place: _Place, key: str, child: nn.Module) -> _Place:
    wrapped = _wrapped_child(place.module)
    prefix = place.prefix if key == wrapped else f"{place.prefix}{key}."
    raw = "" if isinstance(place.module, DistributedDataParallel) else f"{place.raw_prefix}{key}."
    return _Place(child, prefix, raw, place.replicated, place.ignored, {}, [], False)


def _wrapped_child(module: nn.Module) -> str | None:
    compiler = sys.modules.get("torch._dynamo")  # half a second to import; not loaded means nothing is compiled
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        return "_orig_mod"
    return next((child for kind, child in _WRAPPERS if isinstance(module, kind)), None)


def _keeps_in_step(model: DistributedDataParallel) -> bool:
    """Whether parameters are equal on every rank of the job: it is trained, by a group that holds them all."""
    if not any(p.requires_grad for p in model.parameters()):
        return False  # a frozen copy of a DistributedDataParallel may be updated by one rank only
    return dist.get_world_size(model.process_group) == dist.get_world_size()


def _fsdp_groups(module: nn.Module) -> list[Any]:
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch < 2.13 has at most one
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def _sharded_parameters(groups: list[Any]) -> dict[int, torch.Tensor]:
    """id of a gathered parameter -> its shard, for groups that are gathered now."""
    return {
        id(getattr(owner, parameter._module_info.param_name)): parameter.sharded_param
        for group in groups
        if not group.is_sharded
        for parameter in group.fsdp_params
        for owner in (parameter._module_info.module,)
    }
