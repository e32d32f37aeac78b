"""Python objects in anonymous shared memory, so that a batch changes process without being copied.

In: any object that a DataLoader's worker could send. Out: a file descriptor; from it the same object again, as often as
wanted. Tensors and arrays lie in the memory as they are and are mapped privately: what somebody does to them in place
is seen by nobody else, and not by who unpacks the same descriptor again.

Invariants: sizes in the memory come from ``pack``; a descriptor is closed by whoever holds it, and the memory lives
until the last mapping of it is gone.
Known limit: the object around the tensors is pickled, as in every DataLoader (by multiprocessing's own pickler); what
is unpacked must come from this process or its children, never from a network.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["from_bytes", "pack", "size_of", "to_bytes", "unpack"]

_ALIGNMENT = 64
_PROTOCOL = 5  # the first with buffers beside the pickled part
_HEADER = struct.Struct("<QQ")  # bytes of the pickled part, number of buffers
_ENTRY = struct.Struct("<QQ")  # where a buffer begins, its bytes
_MIN_BUFFER_BYTES = 256  # smaller tensors are cheaper within the pickled part


class _Pickler(ForkingPickler):
    """By value. What torch has registered for other processes gives the memory away once, and only while its first
    owner lives."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_nested:
                return value.__reduce_ex__(_PROTOCOL)
            if value.device.type == "cpu":
                return _by_value(value.detach().resolve_conj().resolve_neg(), value.requires_grad)
            return value.__reduce_ex__(_PROTOCOL)
        if isinstance(value, torch.TypedStorage):
            return value.__reduce__()
        if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
            return _storage, (torch.empty(0, dtype=torch.uint8).set_(value),)
        return NotImplemented


def _by_value(plain: torch.Tensor, requires_grad: bool) -> Any:
    """The strides of a tensor without gaps stay as they are: a batch in channels_last is one when it arrives."""
    shape, strides = tuple(plain.shape), None
    if not plain.is_contiguous():
        for dim, stride in enumerate(plain.stride()):
            if stride == 0:  # expanded: one of its equal parts is enough
                plain = plain.narrow(dim, 0, 1)
        dims = range(plain.dim())
        order = sorted(dims, key=plain.stride, reverse=True)
        plain = plain.permute(order).contiguous()
        there = [order.index(dim) for dim in dims]
        strides = tuple(plain.stride(there[dim]) if plain.shape[there[dim]] == shape[dim] else 0 for dim in dims)
    raw = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()  # flat, whatever its strides say
    return _tensor, (raw, plain.dtype, shape, strides, requires_grad)


def _tensor(
    raw: NDArray[np.uint8],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    requires_grad: bool,
) -> torch.Tensor:
    if not raw.flags.writeable:
        raw = raw.copy()
    flat = torch.from_numpy(raw).view(dtype)
    return (flat.view(shape) if strides is None else flat.as_strided(shape, strides)).requires_grad_(requires_grad)


def _storage(flat: torch.Tensor) -> torch.UntypedStorage:
    return flat.untyped_storage()


def pack(value: Any) -> int:
    """A descriptor of memory that holds ``value``. Raises what pickling raises for objects that cannot be sent."""
    buffers: list[memoryview] = []

    def take(buffer: Any) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _MIN_BUFFER_BYTES:
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    _Pickler(stream, _PROTOCOL, True, take).dump(value)
    pickled = stream.getbuffer()
    at = _HEADER.size + _ENTRY.size * len(buffers) + len(pickled)
    places = []
    for buffer in buffers:
        at += -at % _ALIGNMENT
        places.append((at, buffer.nbytes))
        at += buffer.nbytes
    head = _HEADER.pack(len(pickled), len(buffers)) + b"".join(_ENTRY.pack(*place) for place in places)
    descriptor = os.memfd_create("p2pstate-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, at)
        _write(descriptor, memoryview(head), 0)
        _write(descriptor, pickled, len(head))
        for buffer, (start, _) in zip(buffers, places, strict=True):
            _write(descriptor, buffer, start)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def unpack(descriptor: int) -> Any:
    """The object that was packed, in memory of its own. The descriptor stays open."""
    view = memoryview(mmap.mmap(descriptor, size_of(descriptor), flags=mmap.MAP_PRIVATE))
    num_pickled, num_buffers = _HEADER.unpack_from(view)
    entries = view[_HEADER.size : _HEADER.size + _ENTRY.size * num_buffers]
    buffers = [view[start : start + length] for start, length in _ENTRY.iter_unpack(entries)]
    begin = _HEADER.size + len(entries)
    return ForkingPickler.loads(view[begin : begin + num_pickled], buffers=buffers)


def to_bytes(value: Any) -> bytes:
    """A small object on its own, without memory for it."""
    stream = io.BytesIO()
    _Pickler(stream, _PROTOCOL).dump(value)
    return stream.getvalue()


def from_bytes(data: bytes) -> Any:
    """What ``to_bytes`` made."""
    return ForkingPickler.loads(data)


def size_of(descriptor: int) -> int:
    """Bytes of memory behind a packed object."""
    return os.fstat(descriptor).st_size


def _write(descriptor: int, data: memoryview, at: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written
