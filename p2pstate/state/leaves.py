"""Any tensor of the training state as named plain tensors that alias its memory, and bytes written back into it.

In: live tensors (parameters, buffers, optimizer state; DTensors and traceable subclasses among them). Out: ``Leaf``s
whose tensor is a detached ``torch.Tensor`` over the same memory; in-place writes by value.
Invariants: nothing here copies, converts or allocates tensor data, and no autograd graph is touched. A DTensor's leaf
is its local tensor; a wrapper subclass (``__tensor_flatten__``) becomes one leaf per inner tensor, named below it.
A quantised tensor becomes its codes, scales and zero points.
Known limits: sparse, nested and meta tensors are refused, and so are subclasses whose inner tensors cannot be named;
DTensors with a Partial placement too, and views whose elements overlap other than by a stride of 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import Buffer, Parameter, is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from p2pstate.state import quantised
from p2pstate.state.encoding import TensorRef, encode
from p2pstate.state.errors import LeafError

__all__ = ["SHELLS", "Holders", "Leaf", "describe", "is_plain", "plain_parts", "write_into"]

Holders = tuple[int, ...]  # sorted global ranks that hold the same bytes, the own one among them

_PLAIN = (torch.Tensor, Parameter, Buffer)
# One byte per element, but torch has no kernel that copies them.
SHELLS = {name: getattr(torch, name) for name in (f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))}
_MAX_COUNTED = 1 << 20  # elements of which the addresses are compared one by one


@dataclass(frozen=True, slots=True)
class Leaf:
    """One named tensor of the state: plain, detached, aliasing live memory."""

    name: str
    tensor: torch.Tensor
    holders: Holders
    whole: DTensor | None = None  # the distributed tensor that this is the local part of


def is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN


def plain_parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Named plain tensors that together are ``tensor``. LeafError names what cannot be captured."""
    if tensor.is_nested:  # a jagged one keeps lengths beside its parts that a copy of these would not set
        raise LeafError(name, "is a nested tensor", "hold its values() and offsets() as plain tensors")
    if type(tensor) in _PLAIN:
        _check_plain(name, tensor)
        if tensor.is_quantized:
            return quantised.parts(name, tensor)
        if tensor.dtype in SHELLS.values():
            return [(f"{name}/{str(tensor.dtype).removeprefix('torch.')}", tensor.detach().view(torch.uint8))]
        return [(name, tensor.detach() if tensor.requires_grad or type(tensor) is not torch.Tensor else tensor)]
    if isinstance(tensor, DTensor):
        for placement in tensor._spec.placements:
            if placement.is_partial():
                advice = "redistribute it to Shard or Replicate before capturing"
                raise LeafError(name, f"has the placement {placement}: a summand, not a value", advice)
        return plain_parts(name, local_of(tensor))
    if is_lazy(tensor):
        raise LeafError(name, "has no shape yet (a lazy module)", "run one forward pass before capturing")
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        parts: list[tuple[str, torch.Tensor]] = []
        attributes, _ = wrapper.__tensor_flatten__()
        for attribute in attributes:
            if attribute == "_local_tensor" and len(attributes) == 1:  # a DTensor look-alike adds no name
                return plain_parts(name, getattr(wrapper, attribute))
            parts += plain_parts(f"{name}/{attribute}", getattr(wrapper, attribute))
        return parts
    kind = type(tensor)
    raise LeafError(
        name,
        f"is a {kind.__module__}.{kind.__qualname__}, whose memory cannot be told from its type",
        "give the class __tensor_flatten__, or hold its parts as plain tensors",
    )


def local_of(tensor: DTensor) -> torch.Tensor:
    """The live local tensor (``to_local`` would make a new Parameter of it at every call)."""
    local: Any = tensor._local_tensor
    wait = getattr(local, "wait", None)  # an AsyncCollectiveTensor: the local tensor is still on its way
    return wait() if wait is not None else local  # type: ignore[no-any-return]


def describe(name: str, tensor: torch.Tensor) -> TensorRef:
    """What a restore has to know to make this tensor anew."""
    if isinstance(tensor, DTensor):
        return TensorRef("dtensor", tensor.device.type, _part_names(name, tensor))
    if type(tensor) in _PLAIN and tensor.is_quantized:
        return TensorRef(quantised.KIND, tensor.device.type, _part_names(name, tensor))
    if type(tensor) in _PLAIN and tensor.dtype in SHELLS.values():
        kind = str(tensor.dtype).removeprefix("torch.")
        return TensorRef(kind, tensor.device.type, (f"/{kind}",))
    if type(tensor) in _PLAIN:
        return TensorRef("plain", tensor.device.type)
    return TensorRef(type(tensor).__qualname__, tensor.device.type, _part_names(name, tensor), _form(tensor))


def _form(tensor: Any) -> bytes:
    _, context = tensor.__tensor_flatten__()
    try:
        return encode([tuple(tensor.shape), tuple(tensor.stride()), context])
    except LeafError:
        return b""


def _part_names(name: str, tensor: torch.Tensor) -> tuple[str, ...]:
    """Names below ``name``; none for a single part that has the name itself."""
    names = [part.removeprefix(name) for part, _ in plain_parts(name, tensor)]
    return () if names == [""] else tuple(names)


def write_into(live: torch.Tensor, value: torch.Tensor) -> None:
    """``live`` gets the elements of ``value`` (same shape and dtype), whatever its strides; under ``no_grad``.

    Elements that share memory (a stride of 0) are written once.
    """
    assert live.shape == value.shape, (live.shape, value.shape)
    assert live.dtype == value.dtype, (live.dtype, value.dtype)
    if live.numel() == 0 or _same_memory(live, value):
        return
    if 0 in live.stride():
        for dim, (size, stride) in enumerate(zip(live.shape, live.stride(), strict=True)):
            if stride == 0 and size > 1:
                live, value = live.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    if live.is_inference() and not torch.is_inference_mode_enabled():  # such a tensor can be written only there
        with torch.inference_mode():
            live.copy_(value)
    else:
        live.copy_(value)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.stride() == b.stride()
        and a.device == b.device
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise LeafError(name, "is on the meta device", "materialise and fill the model before capturing")
    if tensor.layout is not torch.strided:
        advice = "hold its parts (indices, codes, scales) as plain tensors"
        raise LeafError(name, f"is a {tensor.layout} tensor", advice)
    if not tensor.is_contiguous() and _overlaps(tensor):
        raise LeafError(
            name,
            f"has elements that share memory (shape {list(tensor.shape)}, strides {list(tensor.stride())}), so what is "
            "written into one changes another",
            "keep the tensor that it is a view of instead, and take the view where it is used",
        )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements have one address; those of an expanded dimension (a stride of 0) do not count."""
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if stride)
    reach = 0
    for stride, size in dims:
        if stride <= reach and size > 1:
            break
        reach += stride * (size - 1)
    else:
        return False
    shape = [size for _, size in dims]
    num_elements = math.prod(shape)
    if num_elements > _MAX_COUNTED:
        return True
    offsets = torch.zeros(shape, dtype=torch.int64)
    for index, (stride, size) in enumerate(dims):
        steps = torch.arange(size) * stride
        offsets += steps.view([-1 if index == dim else 1 for dim in range(len(dims))])
    return int(offsets.unique().numel()) < num_elements
