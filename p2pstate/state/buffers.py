"""Buffers that come, go and change their shape while a model is trained; parameters that change shape or dtype.

In: models, captured tensors by leaf name. Out: the names of tensors that are not as they were when the model was built,
and for a restore what has to be put in their place.
Invariant: only a tensor that has changed since its model was built, here or on the owner, may differ from what was
captured; of any other a difference means that two ranks have built different models, and is an error elsewhere.
Known limits: a tensor that is a subclass or quantised has to keep its shape; a buffer that is registered here by a
restore is persistent; a parameter that was not there when the model was built is not registered by a restore.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from p2pstate.state.leaves import is_plain
from p2pstate.state.naming import ModelNames

__all__ = ["BufferShapes", "ParameterRefit", "Refit"]


@dataclass(frozen=True, slots=True)
class Refit:
    """One buffer, and the captured value that does not fit into it (None: there was no such buffer).

    ``goes``: without a value it is no buffer of its module any more.
    """

    name: str
    module: nn.Module
    key: str
    value: torch.Tensor | None
    goes: bool

    def apply(self) -> None:
        live = self.module._buffers.get(self.key)
        if self.value is None and self.goes:
            delattr(self.module, self.key)
            return
        if self.value is None:
            self.module._buffers[self.key] = None
            return
        device = live.device if live is not None else next((p.device for p in self.module.parameters()), None)
        fresh = self.value.detach().to(device or "cpu", copy=True, memory_format=torch.contiguous_format)
        if live is not None and live.dtype is fresh.dtype:
            live.data = fresh  # the same object, for other modules may share it
        else:
            self.module._buffers[self.key] = fresh


@dataclass(frozen=True, slots=True)
class ParameterRefit:
    """One parameter, and the captured value that does not fit into it."""

    name: str
    parameter: nn.Parameter
    value: torch.Tensor

    def apply(self) -> None:
        """The same object, for optimizers hold it; a gradient would not fit any more."""
        self.parameter.grad = None
        self.parameter.data = self.value.detach().to(
            self.parameter.device, copy=True, memory_format=torch.contiguous_format
        )


class BufferShapes:
    """Remembers shapes and dtypes of all buffers and parameters as they are when this is made."""

    def __init__(self, models: Sequence[ModelNames]) -> None:
        self._models = models
        self._built = {name: _kind(buffer) for model in models for name, _, _, buffer in model.buffers()}
        self._parameters = {name: _kind(parameter) for name, parameter in self._live_parameters()}
        self._inherited: frozenset[str] = frozenset()

    def changed(self) -> list[str]:
        """Names of those that have changed since then, in this process or in the one that was restored from."""
        now = {name: _kind(buffer) for model in self._models for name, _, _, buffer in model.buffers()}
        built = self._parameters
        parameters = [n for n, p in self._live_parameters() if n in built and _kind(p) != built[n]]
        if now == self._built and not self._inherited and not parameters:
            return []
        names = now.keys() | self._built.keys()
        return sorted({*self._inherited, *parameters, *(n for n in names if now.get(n) != self._built.get(n))})

    def deleted(self) -> list[str]:
        """Names of buffers that the models had when they were built and have not any more."""
        now = {name for model in self._models for name, *_ in model.buffers()}
        return sorted(self._built.keys() - now)

    def _live_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, tensor, _ in (each for model in self._models for each in model.tensors()):
            if isinstance(tensor, nn.Parameter) and is_plain(tensor) and not tensor.is_quantized:
                yield name, tensor

    def plan(
        self, tensors: Mapping[str, torch.Tensor], changed_on_owner: Iterable[str], deleted_on_owner: Collection[str]
    ) -> list[Refit | ParameterRefit]:
        """What does not fit and may be made to fit; writes nothing."""
        on_owner = frozenset(changed_on_owner)
        flexible = {*self.changed(), *on_owner}
        refits: list[Refit | ParameterRefit] = [*self._missing(tensors, flexible)]
        for name, parameter in self._live_parameters():
            captured = tensors.get(name) if name in flexible else None
            if captured is not None and _kind(parameter) != _kind(captured):
                refits.append(ParameterRefit(name, parameter, captured))
        for name, module, key, buffer in (item for model in self._models for item in model.buffers()):
            value = tensors.get(name)
            plain = buffer is None or (is_plain(buffer) and not buffer.is_quantized)
            goes = name not in self._built or name in deleted_on_owner
            if plain and ((name in flexible and _kind(buffer) != _kind(value)) or name in deleted_on_owner):
                refits.append(Refit(name, module, key, value, goes))
        return refits

    def _missing(self, tensors: Mapping[str, torch.Tensor], flexible: set[str]) -> Iterator[Refit]:
        """What the owner's model had registered after it was built, or the one here has deleted."""
        here = {name for model in self._models for name, *_ in model.buffers()}
        modules = {prefix: module for model in self._models for prefix, module in model.modules()}
        for name in sorted(flexible & tensors.keys() - here):
            prefix, key = _split(name)
            if prefix in modules and not hasattr(modules[prefix], key):
                yield Refit(name, modules[prefix], key, tensors[name], goes=False)

    def inherit(self, changed_on_owner: Iterable[str]) -> None:
        """These have changed on the rank that was restored from: they may differ between versions for ever."""
        self._inherited = frozenset(changed_on_owner)


def _split(name: str) -> tuple[str, str]:
    """The name of a buffer's module, as a prefix, and the buffer's name in it."""
    end = max(name.rfind("."), name.rfind("/")) + 1
    return name[:end], name[end:]


def _kind(buffer: torch.Tensor | None) -> Any:
    if buffer is None or buffer.is_nested or not is_plain(buffer):
        return buffer if buffer is None else type(buffer)
    return buffer.shape, buffer.dtype
