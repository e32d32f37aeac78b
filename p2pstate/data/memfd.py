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
_HEADER = struct.Struct("<QQ")  # bytes of the pickled part, number of buffers
_ENTRY = struct.Struct("<QQ")  # where a buffer begins, its bytes
_MIN_BUFFER_BYTES = 256  # smaller tensors are cheaper within the pickled part


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided:
            plain = value.detach().resolve_conj().resolve_neg()
            raw = plain.contiguous().flatten().view(torch.uint8).numpy()
            return _tensor, (raw, value.dtype, tuple(value.shape), value.requires_grad)
        return NotImplemented


def _tensor(raw: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    if not raw.flags.writeable:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype).view(shape).requires_grad_(requires_grad)


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
    _Pickler(stream, 5, True, take).dump(value)
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
    _Pickler(stream, 5).dump(value)
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
