"""Plain values <-> MessagePack, with their exact Python types.

In: nested Python values. Out: bytes that depend only on the value (equal bytes mean equal state: dicts keep their
order, which is part of the state, sets are written in the order of their encoded elements), and the same values back.
MessagePack's own types carry None, bool, 64-bit int, float, str, bytes, list and dict; everything else that Python or
torch state commonly holds is an extension type. Tensors become references when the caller gives ``on_tensor``
(their bytes travel as leaves), otherwise small ones are written in place.
Invariants: nothing is ever imported, called or unpickled because the bytes say so; no length in the bytes is believed
before it was compared with the bytes that are there.
Known limits: nesting is at most ``MAX_DEPTH``; subclasses (named tuples, enums, numpy masked arrays) are refused,
because rebuilding them would need their class.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal

import msgpack
import numpy as np
import torch

from p2pstate.state.errors import LeafError
from p2pstate.state.rng import is_generator

__all__ = ["MAX_DEPTH", "Path", "TensorRef", "decode", "encode", "lower", "pack", "path_text", "squeeze", "unsqueezed"]

MAX_DEPTH = 64
MAX_INLINE_TENSOR_BYTES = 1 << 20

# (path of the container, key in it); the root is a string. Kept as links: text is made only for errors and leaf names.
Path = str | tuple[Any, Any]
OnTensor = Callable[[Path, torch.Tensor], Any]

_SCALARS = frozenset({NoneType, bool, int, float, str, bytes})
_NUMPY_KINDS = frozenset("biufcSUMm")
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUMm]\d{1,9}(\[\d*[a-zA-Z]+\])?")
_FACTORIES: dict[str, Callable[[], Any]] = {"int": int, "float": float, "list": list, "dict": dict, "set": set}

# Extension codes are the format: append, never renumber.
(
    _TUPLE,
    _SET,
    _FROZENSET,
    _BYTEARRAY,
    _BIG_INT,
    _COMPLEX,
    _ORDERED_DICT,
    _COUNTER,
    _DEFAULT_DICT,
    _ND_ARRAY,
    _NP_SCALAR,
    _NP_TEXT,
    _SIZE,
    _DTYPE,
    _DEVICE,
    _TENSOR,
    _REF,
    _DEQUE,
    _RANGE,
    _SQUEEZED,
) = range(1, 21)
_MIN_SQUEEZED_BYTES = 512
_MAX_SQUEEZED_BYTES = 1 << 26  # of what a copy may claim to have been before


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands in a tree where a tensor was.

    kind: "plain", "dtensor", the subclass's name, or that of a dtype that torch has no kernels for.
    device: device *type* on the owner ("cpu", "cuda").
    parts: of what is several leaves, their paths below the leaf's name, else empty.
    form: for subclasses the encoded (shape, strides, context of ``__tensor_flatten__``); empty where the context is no
    plain value.
    """

    kind: str
    device: str
    parts: tuple[str, ...] = ()
    form: bytes = b""

    def lowered(self) -> Any:
        return msgpack.ExtType(_REF, pack([self.kind, self.device, self.form, *self.parts]))


def encode(value: Any, name: str = "value") -> bytes:
    """Bytes of a plain value. LeafError names the path (below ``name``) of anything that is not plain."""
    return pack(lower(value, name))


def decode(data: bytes, name: str = "values") -> Any:
    """The value that ``encode`` or ``pack`` was given. LeafError for anything that is not its output."""
    try:
        return _decode(data, 0)
    except (
        ValueError,
        TypeError,
        OverflowError,
        RuntimeError,
        struct.error,
        msgpack.exceptions.UnpackException,
    ) as error:
        raise LeafError(name, f"cannot be decoded ({error})", "this copy is damaged: use another one") from error


# --- to bytes ---------------------------------------------------------------------------------------------------------


def segment(key: Any) -> str:
    """One step of a path as text, without the separator '/'. An int 0 and a str "0" stay distinct."""
    if type(key) is str:
        key = key.replace("~", "~0").replace("/", "~1")
        return f"'{key}'" if key.isdigit() else key
    return str(key) if type(key) is int else repr(key).replace("~", "~0").replace("/", "~1")


def path_text(path: Path) -> str:
    steps: list[str] = []
    while not isinstance(path, str):
        path, key = path
        steps.append(segment(key))
    return "/".join([path, *reversed(steps)])


def pack(lowered: Any) -> bytes:
    """MessagePack of a tree that ``lower`` made."""
    data: bytes = msgpack.packb(lowered, default=_big_int, strict_types=True, unicode_errors="surrogatepass")
    return data


def squeeze(lowered: Any) -> Any:
    """The same to every reader, in a fraction of the space: for names and for what repeats."""
    raw = pack(lowered)
    return lowered if len(raw) < _MIN_SQUEEZED_BYTES else msgpack.ExtType(_SQUEEZED, zlib.compress(raw, 1))


def lower(value: Any, path: Path, on_tensor: OnTensor | None = None, depth: int = 0) -> Any:
    """``value`` as a tree of MessagePack types. Lists of scalars are not copied: pack before the value changes."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if depth >= MAX_DEPTH:
        raise _refusal(path, f"nested deeper than {MAX_DEPTH} levels, or contains itself")
    if kind is dict:
        return _lower_dict(value, path, on_tensor, depth)
    if kind is list:
        return _lower_items(value, path, on_tensor, depth)
    if isinstance(value, torch.Tensor):
        return _inline_tensor(value, path) if on_tensor is None else on_tensor(path, value)
    if (make := _SEQUENCES.get(kind)) is not None:
        return msgpack.ExtType(make, pack(_lower_items(list(value), path, on_tensor, depth)))
    if (make := _SETS.get(kind)) is not None:
        items = sorted((lower(item, (path, item), None, depth + 1) for item in value), key=pack)
        return msgpack.ExtType(make, pack(items))
    if kind is Counter:
        return msgpack.ExtType(_COUNTER, pack(_lower_dict(value, path, on_tensor, depth)))
    if kind is OrderedDict:  # a module's state_dict is one, with the versions of its parts as an attribute
        versions = lower(vars(value).get("_metadata"), (path, "_metadata"), None, depth + 1)
        return msgpack.ExtType(_ORDERED_DICT, pack([_lower_dict(value, path, on_tensor, depth), versions]))
    if kind is defaultdict:
        factory = _factory_name(value.default_factory, path)
        return msgpack.ExtType(_DEFAULT_DICT, pack([factory, _lower_dict(value, path, on_tensor, depth)]))
    if kind is deque:
        items = _lower_items(list(value), path, on_tensor, depth)
        return msgpack.ExtType(_DEQUE, pack([value.maxlen, items]))
    return _lower_atom(value, path)


_SEQUENCES: dict[type, int] = {tuple: _TUPLE, torch.Size: _SIZE}
_SETS: dict[type, int] = {set: _SET, frozenset: _FROZENSET}


def _lower_items(items: list[Any], path: Path, on_tensor: OnTensor | None, depth: int) -> list[Any]:
    if set(map(type, items)) <= _SCALARS:
        return items
    return [lower(item, (path, index), on_tensor, depth + 1) for index, item in enumerate(items)]


def _lower_dict(value: dict[Any, Any], path: Path, on_tensor: OnTensor | None, depth: int) -> dict[Any, Any]:
    result = {}
    for key, item in value.items():
        kept = key if type(key) in _SCALARS else lower(key, (path, key), None, depth + 1)
        result[kept] = item if type(item) in _SCALARS else lower(item, (path, key), on_tensor, depth + 1)
    return result


def _lower_atom(value: Any, path: Path) -> Any:
    kind = type(value)
    if kind is bytearray:
        return msgpack.ExtType(_BYTEARRAY, bytes(value))
    if kind is complex:
        return msgpack.ExtType(_COMPLEX, struct.pack("<dd", value.real, value.imag))
    if kind is range:
        return msgpack.ExtType(_RANGE, pack([value.start, value.stop, value.step]))
    if kind is torch.dtype:
        return msgpack.ExtType(_DTYPE, pack(str(value).removeprefix("torch.")))
    if kind is torch.device:
        return msgpack.ExtType(_DEVICE, pack([value.type, value.index]))
    if kind is np.str_ or kind is np.bytes_:  # item() would drop trailing zeros
        text = str.__add__(value, "") if kind is np.str_ else bytes.__add__(value, b"")
        return msgpack.ExtType(_NP_TEXT, pack(text))
    if kind is np.ndarray or isinstance(value, np.generic):
        return _lower_numpy(value, path)
    if is_generator(value):
        advice = "give it to Replicator(...) as an argument, or as a value of its own in extra="
        raise LeafError(path_text(path), f"a random generator ({kind.__qualname__}) inside of something else", advice)
    raise _refusal(path, f"a {kind.__module__}.{kind.__qualname__} is not a plain value")


def _lower_numpy(value: Any, path: Path) -> Any:
    array = np.asarray(value)
    if array.dtype.kind not in _NUMPY_KINDS or array.dtype.fields is not None:
        raise _refusal(path, f"numpy data of type {array.dtype} is not a plain value")
    if isinstance(value, np.generic):
        return msgpack.ExtType(_NP_SCALAR, pack([array.dtype.str, array.tobytes()]))
    order: Literal["F", "C"] = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    return msgpack.ExtType(_ND_ARRAY, pack([array.dtype.str, list(array.shape), order, array.tobytes(order)]))


def _inline_tensor(tensor: torch.Tensor, path: Path) -> Any:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise _refusal(path, f"a {type(tensor).__qualname__} on {tensor.device} is not a plain value")
    if tensor.numel() * tensor.element_size() > MAX_INLINE_TENSOR_BYTES:
        raise _refusal(path, f"a tensor of more than {MAX_INLINE_TENSOR_BYTES} bytes is not a plain value")
    # a clone, because contiguous() leaves the odd stride of a single element, which view() refuses
    dense = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    raw = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    return msgpack.ExtType(_TENSOR, pack([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw]))


def _factory_name(factory: Any, path: Path) -> str | None:
    if factory is None:
        return None
    for name, known in _FACTORIES.items():
        if factory is known:
            return name
    raise _refusal(path, f"a defaultdict that makes its values with {factory!r} is not a plain value")


def _big_int(value: Any) -> Any:
    if type(value) is not int:  # pragma: no cover
        raise TypeError(f"{type(value)} was not lowered")
    return msgpack.ExtType(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _refusal(path: Path, what: str) -> LeafError:
    return LeafError(
        path_text(path), what, "keep numbers, text, bytes, tensors, numpy arrays, lists, tuples, sets and dicts of them"
    )


# --- from bytes -------------------------------------------------------------------------------------------------------


def _decode(data: bytes, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    _check_lengths(data)
    return msgpack.unpackb(
        data,
        raw=False,
        strict_map_key=False,
        unicode_errors="surrogatepass",
        ext_hook=lambda code, body: _from_extension(code, body, depth + 1),
    )


# first byte -> (bytes of the length field, bytes per unit of length, fixed bytes, elements per unit of length)
_HEADS: dict[int, tuple[int, int, int, int]] = {
    **{0xC4 + i: (1 << i, 1, 0, 0) for i in range(3)},  # bin
    **{0xC7 + i: (1 << i, 1, 1, 0) for i in range(3)},  # ext
    0xCA: (0, 0, 4, 0),
    0xCB: (0, 0, 8, 0),
    **{0xCC + i: (0, 0, 1 << i, 0) for i in range(4)},  # uint
    **{0xD0 + i: (0, 0, 1 << i, 0) for i in range(4)},  # int
    **{0xD4 + i: (0, 0, (1 << i) + 1, 0) for i in range(5)},  # fixext
    **{0xD9 + i: (1 << i, 1, 0, 0) for i in range(3)},  # str
    **{0xDC + i: (2 << i, 0, 0, 1) for i in range(2)},  # array
    **{0xDE + i: (2 << i, 0, 0, 2) for i in range(2)},  # map
}


_EXTENSION_HEADS = frozenset([*range(0xC7, 0xCA), *range(0xD4, 0xD9)])


def _check_lengths(data: bytes) -> None:
    """ValueError unless ``data`` is exactly one MessagePack object whose every length fits into it.

    The C decoder allocates what an array header claims before it has seen the elements, at every level of nesting;
    after this check the elements of all headers together are at most ``len(data)``.
    """
    at, owed, end = 0, 1, len(data)
    while owed:
        if owed > end - at:
            raise ValueError("truncated, or a length larger than the data")
        head = data[at]
        at += 1
        owed -= 1
        if head <= 0x7F or head >= 0xE0 or head in (0xC0, 0xC2, 0xC3):
            continue
        if head <= 0x8F:
            owed += 2 * (head & 0x0F)
        elif head <= 0x9F:
            owed += head & 0x0F
        elif head <= 0xBF:
            at += head & 0x1F
        elif head in _HEADS:
            num_length_bytes, per_unit, fixed, elements = _HEADS[head]
            length = int.from_bytes(data[at : at + num_length_bytes], "big")
            if head in _EXTENSION_HEADS and data[at + num_length_bytes : at + num_length_bytes + 1] == b"\xff":
                raise ValueError("a timestamp is not allowed")
            at += num_length_bytes + per_unit * length + fixed
            owed += elements * length
        else:
            raise ValueError(f"byte {head:#x} starts no value")
    if at != end:
        raise ValueError("truncated" if at > end else "data after the value")


def _from_extension(code: int, body: bytes, depth: int) -> Any:
    if code == _BYTEARRAY:
        return bytearray(body)
    if code == _BIG_INT:
        return int.from_bytes(body, "little", signed=True)
    if code == _COMPLEX:
        return complex(*struct.unpack("<dd", body))
    if code == _SQUEEZED:
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
    factory = None if name is None else _FACTORIES.get(_expect(name, str))
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


_READERS: dict[int, Callable[[Any], Any]] = {
    _TUPLE: lambda content: tuple(_expect(content, list)),
    _SET: lambda content: set(_expect(content, list)),
    _FROZENSET: lambda content: frozenset(_expect(content, list)),
    _ORDERED_DICT: _read_ordered_dict,
    _COUNTER: _read_counter,
    _DEFAULT_DICT: _read_default_dict,
    _ND_ARRAY: _read_array,
    _NP_SCALAR: _read_scalar,
    _NP_TEXT: _read_np_text,
    _SIZE: lambda content: torch.Size(_shape(content)),
    _DTYPE: torch_dtype,
    _DEVICE: _read_device,
    _TENSOR: _read_tensor,
    _REF: _read_ref,
    _DEQUE: _read_deque,
    _RANGE: lambda content: range(*(_expect(item, int) for item in _expect(content, list))),
}
