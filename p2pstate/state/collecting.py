"""Trees of state on their way out: tensors become leaves, plain values become MessagePack types.

In: nested values with tensors in them. Out: leaves in ``Collector.leaves``, lowered trees in which a reference stands
for each tensor. Invariant: one leaf per tensor and path; nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from p2pstate.state import quantised
from p2pstate.state.encoding import Path, TensorRef, lower, path_text
from p2pstate.state.errors import LeafError
from p2pstate.state.forms import MAKEABLE, Sharing, form_of
from p2pstate.state.holders import follows
from p2pstate.state.leaves import SHELLS, Holders, Leaf, describe, local_of, plain_parts
from p2pstate.state.spreads import spread_of

__all__ = ["Collector", "FlatDicts", "is_simple"]


class Collector:
    """Gathers the leaves of one capture. ``own`` are the holders of what only this rank has."""

    def __init__(self, own: Holders) -> None:
        self.own = own
        self.leaves: list[Leaf] = []
        self.known: list[list[Leaf]] = []  # as they were the last time, the very same lists
        self.sharing: Sharing | None = None

    def add(self, name: str, tensor: torch.Tensor, holders: Holders) -> None:
        parts = plain_parts(name, tensor)
        whole = tensor if isinstance(tensor, DTensor) and parts[0][0] == name else None
        self.leaves += [Leaf(part, plain, holders, whole) for part, plain in parts]

    def tree(self, value: Any, path: Path, parameter: torch.Tensor | None = None, holders: Holders = ()) -> Any:
        """``value`` lowered; its tensors become leaves named by their paths.

        If ``value`` is the optimizer's state of ``parameter``, what follows it is held by ``holders`` as well.
        """

        def take(at: Path, tensor: torch.Tensor) -> Any:
            name = path_text(at)
            before = len(self.leaves)
            self.add(name, tensor, self.own)
            if parameter is not None and follows(tensor, parameter):
                self.leaves[before:] = [replace(leaf, holders=holders) for leaf in self.leaves[before:]]
            return _lowered(self._with_form(name, tensor, parameter))

        return lower(value, path, take)

    def _with_form(self, name: str, tensor: torch.Tensor, parameter: torch.Tensor | None) -> TensorRef:
        ref = describe(name, tensor)
        if ref.parts or ref.kind not in MAKEABLE:
            if parameter is None:
                _check_makeable(name, tensor, ref)
            return ref
        shared = self.sharing.of(name, tensor) if self.sharing else ()
        if isinstance(tensor, DTensor):
            form = form_of(local_of(tensor), shared, () if _is_split_like(tensor, parameter) else spread_of(tensor))
        else:
            form = form_of(tensor, shared)
        return replace(ref, form=form) if form else ref


def _check_makeable(name: str, tensor: torch.Tensor, ref: TensorRef) -> None:
    """LeafError for what a newcomer could not make, in a place where a newcomer may have nothing to be written into."""
    if ref.form or ref.kind == quantised.KIND or ref.kind in SHELLS:
        return
    what = "whose parts are no plain tensors" if isinstance(tensor, DTensor) else "whose context is no plain value"
    raise LeafError(name, f"is a {type(tensor).__qualname__} {what}", "hold its parts there as plain tensors")


def _is_split_like(tensor: DTensor, parameter: torch.Tensor | None) -> bool:
    return (
        isinstance(parameter, DTensor)
        and tensor.shape == parameter.shape
        and tensor.placements == parameter.placements
        and tensor.device_mesh == parameter.device_mesh
    )


_LOWERED: dict[TensorRef, Any] = {}


def _lowered(ref: TensorRef) -> Any:
    """References are few and equal ones are many."""
    if len(_LOWERED) > 256:
        _LOWERED.clear()
    lowered = _LOWERED.get(ref)
    if lowered is None:
        lowered = _LOWERED[ref] = ref.lowered()
    return lowered


@dataclass(slots=True)
class _Flat:
    own: Holders
    holders: Holders
    keys: list[Any]
    tensors: list[torch.Tensor]
    locals: list[torch.Tensor]
    devices: list[torch.device]
    leaves: list[Leaf]
    lowered: Any


class FlatDicts:
    """Remembers what became of dicts that hold only tensors, which most optimizer state is.

    A remembered dict is used again only if every tensor in it is the same object over the same local tensor on the same
    device; the leaves alias live memory, so values are always current.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Flat] = {}

    def tree(self, collector: Collector, value: Any, name: str, parameter: torch.Tensor, holders: Holders) -> Any:
        """``Collector.tree`` of the state of ``parameter``."""
        flat = None if collector.sharing else self._known.get(name)
        if (
            flat is not None
            and flat.holders == holders
            and flat.own == collector.own
            and type(value) is dict
            and self._holds(flat, value)
        ):
            collector.leaves += flat.leaves
            return flat.lowered
        before = len(collector.leaves)
        lowered = collector.tree(value, name, parameter, holders)
        self._known.pop(name, None)
        if not collector.sharing and type(value) is dict and all(is_simple(tensor) for tensor in value.values()):
            tensors = list(value.values())
            locals_ = [_local(tensor) for tensor in tensors]
            devices = [tensor.device for tensor in tensors]
            leaves = collector.leaves[before:]
            self._known[name] = _Flat(collector.own, holders, list(value), tensors, locals_, devices, leaves, lowered)
        return lowered

    @staticmethod
    def _holds(flat: _Flat, value: dict[Any, Any]) -> bool:
        if list(value) != flat.keys:
            return False
        for item, tensor, local, device in zip(value.values(), flat.tensors, flat.locals, flat.devices, strict=True):
            if item is not tensor or _local(tensor) is not local or tensor.device != device:
                return False
        return True


def is_simple(value: Any) -> bool:
    """Whether it is a tensor that is its own leaf, or the local part of one."""
    kind = type(value)
    if kind is DTensor:
        value = value._local_tensor
    simple = type(value) is torch.Tensor and not value.requires_grad
    return simple and not value.is_quantized and value.dtype not in SHELLS.values()


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if type(tensor) is DTensor else tensor
