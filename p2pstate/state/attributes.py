"""What a user's own optimizer keeps in attributes of itself: counters, averages, buffers.

In: a live optimizer. Out: a tree of those attributes that are plain values or tensors; on restore the same attributes,
tensors in place.
Invariants: torch's own optimizers are not looked at, they keep everything in ``state``. What never changed after it was
first looked at is a setting (a device, a path): it is captured and, unless a tensor is in it, not written anywhere.
Known limits: attributes that hold anything else (functions, objects, parameters, tensors over the memory of state that
is captured anyway) are left out.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from p2pstate.state.collecting import Collector
from p2pstate.state.encoding import Path, lower, pack
from p2pstate.state.errors import LeafError
from p2pstate.state.leaves import Holders
from p2pstate.state.rebuilding import Rebuilder

__all__ = ["OptimizerAttributes"]

_TORCHS = frozenset({"defaults", "state", "param_groups", "step", "grad_scale", "found_inf"})
_TORCHS_PREFIXES = (
    "_optimizer_",
    "_hook_for_profile",
    "_zero_grad_profile_name",
    "_warned_capturable",
    "_opt_called",
    "_step_supports_amp_scaling",
    "_need_device_dtype_check_for_fused",
)


class OptimizerAttributes:
    """Of one optimizer; ``prefix`` is that of its state."""

    def __init__(self, optimizer: Optimizer, prefix: str) -> None:
        self._optimizer = optimizer
        self._prefix = f"{prefix}/:attributes"
        self._looked_at = not type(optimizer).__module__.startswith("torch.")
        self._built = {name: _digestible(value, name) for name, value in self._candidates()}
        self._inherited: frozenset[str] = frozenset()
        self._kept: set[str] = set()

    def collect(self, collector: Collector) -> dict[str, Any]:
        """Name -> [whether it changed, its tree]. The models' leaves and the optimizer's are known already."""
        if not self._looked_at:
            return {}
        known = chain.from_iterable(collector.known)
        memory = {leaf.tensor.untyped_storage().data_ptr() for leaf in known}
        found: dict[str, Any] = {}
        for name, value in self._candidates():
            own = _Own(collector.own, memory)
            try:
                tree = own.tree(value, (self._prefix, name))
            except LeafError:
                continue
            changed = bool(own.leaves) or name in self._inherited or self._has_changed(name, value)
            found[name] = [changed, tree]
            collector.leaves += own.leaves
        self._kept |= found.keys()
        return found

    def plan(self, saved: Mapping[str, Any], rebuilder: Rebuilder) -> dict[str, Any]:
        """The attributes that are to be set; writes nothing."""
        live = vars(self._optimizer)
        planned = {}
        for name, (changed, tree) in saved.items():
            if changed or name not in live or self._has_changed(name, live[name]):
                planned[name] = rebuilder.tree(tree, live.get(name), (self._prefix, name), None)
        return planned

    def apply(self, planned: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Sets what was planned, and removes what came after the captured step."""
        vars(self._optimizer).update(planned)
        for name in self._kept - saved.keys() - self._built.keys():
            vars(self._optimizer).pop(name, None)
        self._inherited = frozenset(name for name, (changed, _) in saved.items() if changed)

    def _candidates(self) -> Iterator[tuple[str, Any]]:
        if self._looked_at:
            for name, value in [*vars(self._optimizer).items()]:
                if name not in _TORCHS and not name.startswith(_TORCHS_PREFIXES):
                    yield name, value

    def _has_changed(self, name: str, value: Any) -> bool:
        return name not in self._built or _digestible(value, name) != self._built[name]


class _Own(Collector):
    """Refuses parameters, and tensors over ``memory`` that is captured under other names."""

    def __init__(self, own: Holders, memory: Container[int]) -> None:
        super().__init__(own)
        self._memory = memory

    def add(self, name: str, tensor: torch.Tensor, holders: Holders) -> None:
        before = len(self.leaves)
        super().add(name, tensor, holders)
        added = (leaf.tensor for leaf in self.leaves[before:] if leaf.tensor.numel())
        if isinstance(tensor, nn.Parameter) or any(t.untyped_storage().data_ptr() in self._memory for t in added):
            raise LeafError(name, "is a parameter, or over the memory of other state", "nothing is to be done")


def _digestible(value: Any, name: str) -> bytes | None:
    """The value as bytes, tensors without their content; None for what cannot be kept."""

    def take(_: Path, tensor: torch.Tensor) -> Any:
        return [str(tensor.dtype), list(tensor.shape)]

    try:
        return pack(lower(value, name, take))
    except LeafError:
        return None
