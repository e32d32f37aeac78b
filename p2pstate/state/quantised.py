"""Quantised tensors (``torch.quantize_per_tensor`` and ``_per_channel``) as plain tensors, and back, code for code.

In: live quantised tensors, captured parts. Out: their codes as integers over the same memory, and scales, zero points
and axis as small tensors; a live one that has the captured codes and is quantised as the captured one was, in place.
Invariant: nothing is converted to a floating point value and back, which would change codes.
Known limit: kinds of fewer than eight bits per element are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from p2pstate.state.errors import LeafError

__all__ = ["KIND", "copy_into", "make", "parts"]

KIND = "quantised"
_CODES = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_PER_TENSOR = ("scale", "zero_point")
_PER_CHANNEL = ("scales", "zero_points", "axis")


def parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Named plain tensors that together are ``tensor``: the codes are live, the others tell what it is now."""
    plain = _CODES.get(tensor.dtype)
    if plain is None:
        raise LeafError(name, f"is quantised to {tensor.dtype}", "hold its codes and scales as plain tensors")
    codes = torch.empty(0, dtype=plain, device=tensor.device)
    codes.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        scale = torch.tensor(tensor.q_scale(), dtype=torch.float64)
        values = dict(zip(_PER_TENSOR, (scale, torch.tensor(tensor.q_zero_point())), strict=True))
    else:
        found = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        values = dict(zip(_PER_CHANNEL, (*found, torch.tensor(tensor.q_per_channel_axis())), strict=True))
    return [(f"{name}/{_codes_of(tensor)}", codes), *((f"{name}/{key}", value) for key, value in values.items())]


def make(name: str, keys: tuple[str, ...], tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """A new tensor of captured ``tensors``; ``keys``: what its parts are called below ``name``, the codes first."""
    codes, *values = (tensors[f"{name}/{key}"].to(device) for key in keys)
    if keys[1:] == _PER_TENSOR:
        scale, zero_point = (value.item() for value in values)
        return torch._make_per_tensor_quantized_tensor(codes, float(scale), int(zero_point))
    if keys[1:] != _PER_CHANNEL:
        raise LeafError(name, f"has the parts {', '.join(keys)}", "this copy is damaged: use another one")
    return torch._make_per_channel_quantized_tensor(codes, values[0], values[1], int(values[2].item()))


def copy_into(live: torch.Tensor, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """``live`` gets the captured codes, scales and zero points, and keeps its memory."""
    keys = tuple(part.removeprefix(f"{name}/") for part, _ in parts(name, live))
    live.copy_(make(name, keys, tensors, live.device))


def _codes_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
