"""Canonical names of a model's parameters and buffers, resolved anew each time.

In: a model, however it is wrapped. Out: (name, live tensor, holders) of every parameter and buffer, non-persistent
buffers included, tied ones once under their first name; the modules that keep extra state; which modules evaluate.
Invariants: a name depends on the model only, not on DistributedDataParallel, torch.compile or activation checkpointing
around any part of it. Only names are remembered between calls; tensors are read from their modules every time, because
buffers are re-assigned and ``p.data`` is swapped. Under FSDP2 the sharded parameter is meant, also while it is
gathered.
Under FSDP1 it is the flat parameter's shard, or (``use_orig_params=True``) this rank's piece of each parameter.
Known limit: DistributedDataParallel over tensor parallelism is refused (its parameters leave their modules).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.jit import ScriptModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from p2pstate.state.errors import LeafError
from p2pstate.state.holders import World, current_world, holders_of_parameter, replicas
from p2pstate.state.leaves import Holders
from p2pstate.state.sameness import SameMemory

__all__ = ["Look", "ModelNames", "Named"]

# wrapper -> the name of the child that it wraps; the segment vanishes from names (torch.compile's: _wrapped_child)
_WRAPPERS: tuple[tuple[type, str], ...] = (
    (DistributedDataParallel, "module"),
    (DataParallel, "module"),
    (ActivationWrapper, "_checkpoint_wrapped_module"),
    (FullyShardedDataParallel, "_fsdp_wrapped_module"),
)

Named = tuple[str, torch.Tensor, Holders]

_MODULES = attrgetter("_modules")
_DICTS = (attrgetter("_parameters"), attrgetter("_buffers"))


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found out about a parameter of this type and with these placements."""

    name: str
    kind: type
    spec: Any  # a DTensor's mesh and placements
    holders: Holders


@dataclass(slots=True)
class _Place:
    """One module at its canonical place."""

    module: nn.Module
    prefix: str  # of the names of its tensors
    raw_prefix: str  # the same as DistributedDataParallel counts it: below its 'module', wrappers included
    world: World
    replicas: Holders  # ranks on which a DistributedDataParallel above keeps parameters equal; else the own rank
    ignored: frozenset[str]  # raw names which that DistributedDataParallel leaves alone
    trained: bool  # else nothing keeps it equal anywhere
    children: dict[str, nn.Module | None]
    fsdp_groups: list[Any]
    has_extra_state: bool
    is_wrapper: bool
    parameters: dict[str, _Known] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)

    def parameter(self, key: str, tensor: torch.Tensor) -> _Known:
        kind = type(tensor)
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        known = self.parameters.get(key)
        if known is None or known.kind is not kind or known.spec is not spec:
            in_step = self.world.own if self.raw_prefix + key in self.ignored else self.replicas
            holders = holders_of_parameter(tensor, in_step, self.world) if self.trained else self.world.own
            known = self.parameters[key] = _Known(self.prefix + key, kind, spec, holders)
        return known

    def buffer(self, key: str) -> str:
        name = self.buffers.get(key)
        if name is None:
            name = self.buffers[key] = self.prefix + key
        return name


class Look:
    """A model as it was found: ``named`` as :meth:`ModelNames.tensors` gives it."""

    def __init__(self, places: list[_Place], named: list[Named]) -> None:
        self.named = named
        self._places = places
        self._modules = [place.module for place in places]
        self._groups = [group for place in places for group in place.fsdp_groups]
        self._scripted = any(isinstance(module, ScriptModule) for module in self._modules)
        self._slots = [] if self._scripted else _slots(self._modules)
        self._trains = [tensor.requires_grad for _, tensor, _ in named]
        self._memory = SameMemory(tensor for _, tensor, _ in named)
        self._gathered = not all(group.is_sharded for group in self._groups)

    def holds(self, places: list[_Place]) -> bool:
        """Whether looking again finds the same tensors over the same memory, as trainable as they were."""
        if self._gathered or self._scripted or places is not self._places or not self._memory.known:
            return False
        sizes, keys, values = _slots(self._modules)
        return (
            [sizes, keys] == self._slots[:2]
            and all(map(is_, values, self._slots[2]))
            and all(group.is_sharded for group in self._groups)
            and [tensor.requires_grad for _, tensor, _ in self.named] == self._trains
            and self._memory.holds()
        )


def _slots(modules: Iterable[nn.Module]) -> list[list[Any]]:
    """How many parameters and buffers each module has registered, under which keys, and which."""
    dicts = [get(module) for get in _DICTS for module in modules]
    return [list(map(len, dicts)), [*chain.from_iterable(dicts)], [*chain.from_iterable(map(dict.values, dicts))]]


class ModelNames:
    """One model's names under ``prefix`` ("model" gives "model/layer.weight")."""

    def __init__(self, model: nn.Module, prefix: str, *, trained: bool = True) -> None:
        """``trained=False``: an average of a model, say; nothing keeps it equal on several ranks."""
        self.model = model
        self.prefix = prefix
        self._trained = trained
        self._places: list[_Place] = []
        self._modules: list[nn.Module] = []
        self._children: list[dict[str, nn.Module | None]] = []
        self._look: Look | None = None
        self._world = World(0, 1)
        self._replicating: list[tuple[str, DistributedDataParallel, Any, int]] = []

    def look(self) -> Look:
        """The model as it is now: the same object as the last time while nothing but the values has changed."""
        places = self._current_places()
        if self._look is None or not self._look.holds(places):
            self._look = Look(places, list(self.tensors()))
        return self._look

    def forget(self) -> None:
        """Let go of the memory that the last look was at, should the model have another one by now."""
        self._look = None

    def tensors(self) -> Iterator[Named]:
        """Every parameter and buffer once, in the order of the module tree."""
        seen: set[int] = set()
        places = self._current_places()
        own = self._world.own
        for place in places:
            sharded = _sharded_parameters(place.fsdp_groups) if place.fsdp_groups else {}
            for key, parameter in place.module._parameters.items():
                if parameter is None:
                    continue
                tensor = sharded.get(id(parameter), parameter)
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    known = place.parameter(key, tensor)
                    yield known.name, tensor, known.holders
            for key, buffer in place.module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield place.buffer(key), buffer, own

    def tied(self) -> dict[str, str]:
        """Further names of tensors that :meth:`tensors` gives under their first one: further name -> first name."""
        first: dict[int, str] = {}
        further: dict[str, str] = {}
        for place in self._current_places():
            for key, tensor in (*place.module._parameters.items(), *place.module._buffers.items()):
                name = place.prefix + key
                if tensor is not None and first.setdefault(id(tensor), name) != name:
                    further[name] = first[id(tensor)]
        return further

    def buffers(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor | None]]:
        """(name, module, key in it, buffer or None) of every buffer once."""
        seen: set[int] = set()
        for place in self._current_places():
            for key, buffer in place.module._buffers.items():
                if buffer is None or id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield place.buffer(key), place.module, key, buffer

    def non_persistent(self) -> Iterator[str]:
        """Every name of a buffer that the model's ``state_dict()`` leaves out."""
        for place in self._current_places():
            unsaved = getattr(place.module, "_non_persistent_buffers_set", ())
            for key, buffer in place.module._buffers.items():
                if buffer is not None and key in unsaved:
                    yield place.prefix + key

    def extra_state_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of every module with ``get_extra_state``."""
        for place in self._current_places():
            if place.has_extra_state:
                yield place.prefix + "_extra_state", place.module

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of every module that is no wrapper."""
        for place in self._current_places():
            if not place.is_wrapper:
                yield place.prefix, place.module

    def data_parallel_modules(self) -> Iterator[tuple[str, DistributedDataParallel]]:
        """(name, module) of every DistributedDataParallel."""
        self._current_places()
        for prefix, module, _, _ in self._replicating:
            yield prefix, module

    def reshard(self) -> None:
        """Drops gathered FSDP2 parameters, so that the next forward gathers the restored shards."""
        for place in self._current_places():
            if isinstance(place.module, FSDPModule):
                place.module.reshard()

    def _current_places(self) -> list[_Place]:
        world = current_world()
        if (
            not self._places
            or world != self._world
            or list(map(_MODULES, self._modules)) != self._children
            or any(m.process_group is not group or len(m._comm_hooks) != num for _, m, group, num in self._replicating)
        ):
            self._world = world
            self._places = list(_walk(self.model, self.prefix, self._trained, world))
            self._modules = [place.module for place in self._places]
            self._children = [place.children for place in self._places]
            self._replicating = [
                (place.prefix, place.module, place.module.process_group, len(place.module._comm_hooks))
                for place in self._places
                if isinstance(place.module, DistributedDataParallel)
            ]
        return self._places


def _walk(model: nn.Module, prefix: str, trained: bool, world: World) -> Iterator[_Place]:
    seen: set[int] = set()
    root = _Place(model, f"{prefix}/", "", world, world.own, frozenset(), trained, {}, [], False, False)
    todo = [root]
    inherited_groups: dict[int, list[Any]] = {}
    while todo:
        place = todo.pop()
        module = place.module
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, DistributedDataParallel):
            place.replicas = replicas(module, world)
            place.ignored = frozenset(module.parameters_to_ignore)
            if _takes_parameters_away(module.module):
                raise LeafError(
                    place.prefix.rstrip("/"),
                    "is tensor parallel below DistributedDataParallel: its first forward unregisters parameters",
                    "use fully_shard over the mesh's other dimensions (two of them, to replicate as well)",
                )
        for group in _fsdp_groups(module):
            for fsdp_parameter in group.fsdp_params:
                info = fsdp_parameter._module_info
                for owner in (info.module, *info.shared_modules):
                    inherited_groups.setdefault(id(owner), []).append(group)
        place.children = dict(module._modules)
        place.fsdp_groups = inherited_groups.get(id(module), [])
        place.is_wrapper = _wrapped_child(module) is not None
        scripted = isinstance(module, ScriptModule)  # which has a get_extra_state that only raises
        place.has_extra_state = not scripted and type(module).get_extra_state is not nn.Module.get_extra_state
        yield place
        todo += [
            _child_place(place, key, child) for key, child in reversed(module._modules.items()) if child is not None
        ]


def _child_place(place: _Place, key: str, child: nn.Module) -> _Place:
    wrapped = _wrapped_child(place.module)
    prefix = place.prefix if key == wrapped else f"{place.prefix}{key}."
    raw = "" if isinstance(place.module, DistributedDataParallel) else f"{place.raw_prefix}{key}."
    return _Place(child, prefix, raw, place.world, place.replicas, place.ignored, place.trained, {}, [], False, False)


def _wrapped_child(module: nn.Module) -> str | None:
    compiler = sys.modules.get("torch._dynamo")  # half a second to import; not loaded means nothing is compiled
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        return "_orig_mod"
    return next((child for kind, child in _WRAPPERS if isinstance(module, kind)), None)


def _takes_parameters_away(module: nn.Module) -> bool:
    """Whether DistributedDataParallel turned DTensors into local tensors, or (after a forward) the other way round."""
    hooks = module._forward_pre_hooks.values()
    if not any(getattr(hook, "__module__", None) == "torch.distributed.tensor.parallel.ddp" for hook in hooks):
        return False
    return any(hasattr(parameter, "_st_info") for parameter in module.parameters()) or any(
        isinstance(value, DTensor) for part in module.modules() for value in vars(part).values()
    )


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
