"""Batches on their way to a device: pinned, and copied on a stream of their own while the step before computes.

In: batches in host memory. Out: the same on the device, safe to use on the current stream.
Invariant: memory that the side stream writes is not reused before the current stream is done with it.
Known limits: CUDA only (other devices are copied to without a stream); pinning is a copy made on the training thread.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils.data

__all__ = ["Stager"]


class Stager:
    def __init__(self, device: torch.device | None, pin_memory: bool) -> None:
        self._device = device
        self._pin = pin_memory and torch.cuda.is_available()
        on_card = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_card else None

    @property
    def idle(self) -> bool:
        """Nothing is to be done to a batch."""
        return self._device is None and not self._pin

    def start(self, batch: Any) -> Any:
        """Begin the way of one batch."""
        if self._pin:
            batch = torch.utils.data._utils.pin_memory.pin_memory(batch)
        if self._device is None:
            return batch
        if self._stream is None:
            return _each_tensor(batch, lambda tensor: tensor.to(self._device))
        with torch.cuda.stream(self._stream):
            return _each_tensor(batch, lambda tensor: tensor.to(self._device, non_blocking=True))

    def finish(self, batch: Any) -> Any:
        """The end of the way of what ``start`` returned: the current stream waits for the copies."""
        if self._stream is None:
            return batch
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)

        def claim(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(current)
            return tensor

        return _each_tensor(batch, claim)


def _each_tensor(value: Any, change: Any) -> Any:
    """The same structure of lists, tuples, mappings and dataclasses with each tensor changed; anything else stays."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: _each_tensor(each, change) for key, each in value.items()}
        return changed if type(value) is dict else type(value)(changed)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each_tensor(each, change) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(_each_tensor(each, change) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        moved = copy.copy(value)  # replace() calls __init__, which may do more than set its fields
        for field in dataclasses.fields(value):
            object.__setattr__(moved, field.name, _each_tensor(getattr(value, field.name), change))
        return moved
    return value
