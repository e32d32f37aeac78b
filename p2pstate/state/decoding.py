"""MessagePack -> the plain values that encoding.py was given.

In: bytes, perhaps damaged. Out: values of exactly the types they had.
Invariants: nothing is ever imported, called or unpickled because the bytes say so; no length in the bytes is believed
before it was compared with the bytes that are there.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import torch

from p2pstate.state.encoding import FACTORIES, MAX_DEPTH, Extension, TensorRef
from p2pstate.state.errors import LeafError
from p2pstate.state.lengths import check_lengths
from p2pstate.state.rng import GeneratorState
from p2pstate.state.standard import from_text

__all__ = ["decode", "torch_dtype", "unsqueezed"]

_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUMm]\d{1,9}(\[\d*[a-zA-Z]+\])?")
_MAX_SQUEEZED_BYTES = 1 << 26  # of what a copy may claim to have been before


def decode(data: bytes, name: str = "values") -> Any:
    """The value that ``encode`` or ``pack`` was given. LeafError for anything that is not its output."""
    try:
        return _decode(data, 0)
    except (
        ValueError,
        TypeError,
        ArithmeticError,
        RuntimeError,
        struct.error,
        msgpack.exceptions.UnpackException,
    ) as error:
        raise LeafError(name, f"cannot be decoded ({error})", "this copy is damaged: use another one") from error


def _decode(data: bytes, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    check_lengths(data)
    return msgpack.unpackb(
        data,
        raw=False,
        strict_map_key=False,
        unicode_errors="surrogatepass",
        ext_hook=lambda code, body: _from_extension(code, body, depth + 1),
    )


def _from_extension(code: int, body: bytes, depth: int) -> Any:
    if code == Extension.BYTEARRAY:
        return bytearray(body)
    if code == Extension.BIG_INT:
        return int.from_bytes(body, "little", signed=True)
    if code == Extension.COMPLEX:
        return complex(*struct.unpack("<dd", body))
    if code == Extension.SQUEEZED:
        return _decode(unsqueezed(body), depth)
    content = _decode(body, depth)
    reader = _READERS.get(code)
    if reader is None:
        raise ValueError(f"unknown extension {code}")
    return reader(content)


def unsqueezed(body: bytes) -> bytes:
    """ValueError for bytes that are damaged, or claim to be more than any state has."""
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(body, _MAX_SQUEEZED_BYTES)
    except zlib.error as error:
        raise ValueError(f"squeezed bytes are damaged: {error}") from error
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("squeezed bytes are cut off, or far too many")
    return raw


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{kind.__name__} expected, {type(value).__name__} found")
    return value


def _read_ordered_dict(content: Any) -> OrderedDict[Any, Any]:
    items, versions = content
    result = OrderedDict(_expect(items, dict))
    if versions is not None:
        result._metadata = versions  # type: ignore[attr-defined]
    return result


def _read_counter(content: Any) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, _expect(content, dict))
    return counter


def _read_default_dict(content: Any) -> defaultdict[Any, Any]:
    name, items = content
    factory = None if name is None else FACTORIES.get(_expect(name, str))
    if name is not None and factory is None:
        raise ValueError(f"a defaultdict of {name!r} is not allowed")
    return defaultdict(factory, _expect(items, dict))


def _read_array(content: Any) -> np.ndarray[Any, Any]:
    text, shape, order, raw = content
    dtype = _numpy_dtype(text)
    shape = _shape(shape)
    if _count(shape) * dtype.itemsize != len(_expect(raw, bytes)):
        raise ValueError("an array's bytes do not match its shape")
    if order not in ("C", "F"):
        raise ValueError("an array's order is neither C nor F")
    return np.ndarray(shape, dtype, raw, order=order).copy(order)


def _read_scalar(content: Any) -> Any:
    text, raw = content
    dtype = _numpy_dtype(text)
    if dtype.itemsize != len(_expect(raw, bytes)):
        raise ValueError("a number's bytes do not match its type")
    return np.ndarray((), dtype, raw).copy()[()]


def _numpy_dtype(text: Any) -> np.dtype[Any]:
    if not _NUMPY_DTYPE.fullmatch(_expect(text, str)):
        raise ValueError(f"numpy type {text!r} is not allowed")
    dtype: np.dtype[Any] = np.dtype(text)
    return dtype


def _read_np_text(content: Any) -> Any:
    return np.str_(content) if type(content) is str else np.bytes_(_expect(content, bytes))


def torch_dtype(name: Any) -> torch.dtype:
    """The dtype called ``name`` ("bfloat16"); ValueError for anything else."""
    dtype = getattr(torch, _expect(name, str), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of this torch")
    return dtype


def _read_device(content: Any) -> torch.device:
    kind, index = content
    return torch.device(_expect(kind, str)) if index is None else torch.device(_expect(kind, str), _expect(index, int))


def _read_tensor(content: Any) -> torch.Tensor:
    name, shape, raw = content
    dtype = torch_dtype(name)
    shape = _shape(shape)
    if _count(shape) * dtype.itemsize != len(_expect(raw, bytes)):
        raise ValueError("a tensor's bytes do not match its shape")
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def _shape(value: Any) -> list[int]:
    if not all(type(size) is int and size >= 0 for size in _expect(value, list)):
        raise ValueError("a shape is not a list of sizes")
    return list(value)


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _read_ref(content: Any) -> TensorRef:
    kind, device, form, *parts = _expect(content, list)
    for text in (kind, device, *parts):
        _expect(text, str)
    return TensorRef(kind, device, tuple(parts), _expect(form, bytes))


def _read_deque(content: Any) -> deque[Any]:
    limit, items = content
    return deque(_expect(items, list), limit)


def _read_standard(content: Any) -> Any:
    kind, text = _expect(content, list)
    return from_text(_expect(kind, str), _expect(text, str))


def _read_generator(content: Any) -> GeneratorState:
    kind, state = _expect(content, list)
    return GeneratorState(_expect(kind, str), state)


_READERS: dict[int, Callable[[Any], Any]] = {
    Extension.TUPLE: lambda content: tuple(_expect(content, list)),
    Extension.SET: lambda content: set(_expect(content, list)),
    Extension.FROZENSET: lambda content: frozenset(_expect(content, list)),
    Extension.ORDERED_DICT: _read_ordered_dict,
    Extension.COUNTER: _read_counter,
    Extension.DEFAULT_DICT: _read_default_dict,
    Extension.ND_ARRAY: _read_array,
    Extension.NP_SCALAR: _read_scalar,
    Extension.NP_TEXT: _read_np_text,
    Extension.SIZE: lambda content: torch.Size(_shape(content)),
    Extension.DTYPE: torch_dtype,
    Extension.DEVICE: _read_device,
    Extension.TENSOR: _read_tensor,
    Extension.REF: _read_ref,
    Extension.DEQUE: _read_deque,
    Extension.STANDARD: _read_standard,
    Extension.GENERATOR: _read_generator,
    Extension.RANGE: lambda content: range(*(_expect(item, int) for item in _expect(content, list))),
}
