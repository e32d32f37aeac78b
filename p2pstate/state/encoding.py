"""Plain values -> MessagePack, with their exact Python types (decoding.py reads them).

In: nested Python values. Out: bytes that depend only on the value (equal bytes mean equal state: dicts keep their
order, which is part of the state, sets are written in the order of their encoded elements).
MessagePack's own types carry None, bool, 64-bit int, float, str, bytes, list and dict; everything else that Python or
torch state commonly holds is an extension type. Tensors become references when the caller gives ``on_tensor``
(their bytes travel as leaves), otherwise small ones are written in place. Random generators are written, by their
states, only where tensors become references.
Known limits: nesting is at most ``MAX_DEPTH``; subclasses (named tuples, enums, numpy masked arrays) are refused,
because rebuilding them would need their class.
"""

from __future__ import annotations

import enum
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
from p2pstate.state.rng import generator_kind, generator_state, is_generator
from p2pstate.state.standard import to_text

__all__ = [
    "FACTORIES",
    "MAX_DEPTH",
    "Extension",
    "Path",
    "TensorRef",
    "encode",
    "lower",
    "pack",
    "path_text",
    "squeeze",
]

MAX_DEPTH = 64
MAX_INLINE_TENSOR_BYTES = 1 << 20

# (path of the container, key in it); the root is a string. Kept as links: text is made only for errors and leaf names.
Path = str | tuple[Any, Any]
OnTensor = Callable[[Path, torch.Tensor], Any]

_SCALARS = frozenset({NoneType, bool, int, float, str, bytes})
_NUMPY_KINDS = frozenset("biufcSUMm")
FACTORIES: dict[str, Callable[[], Any]] = {"int": int, "float": float, "list": list, "dict": dict, "set": set}

_MIN_SQUEEZED_BYTES = 512


class Extension(enum.IntEnum):
    """MessagePack's extension types that are ours. They are the format: append, never renumber."""

    TUPLE = 1
    SET = 2
    FROZENSET = 3
    BYTEARRAY = 4
    BIG_INT = 5
    COMPLEX = 6
    ORDERED_DICT = 7
    COUNTER = 8
    DEFAULT_DICT = 9
    ND_ARRAY = 10
    NP_SCALAR = 11
    NP_TEXT = 12
    SIZE = 13
    DTYPE = 14
    DEVICE = 15
    TENSOR = 16
    REF = 17
    DEQUE = 18
    RANGE = 19
    SQUEEZED = 20
    STANDARD = 21
    GENERATOR = 22


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands in a tree where a tensor was.

    kind: "plain", "dtensor", the subclass's name, or that of a dtype that torch has no kernels for.
    device: device *type* on the owner ("cpu", "cuda").
    parts: of what is several leaves, their paths below the leaf's name, else empty.
    form: for subclasses the encoded (shape, strides, context of ``__tensor_flatten__``); empty where the context is no
    plain value. For plain tensors what forms.py makes.
    """

    kind: str
    device: str
    parts: tuple[str, ...] = ()
    form: bytes = b""

    def lowered(self) -> Any:
        return msgpack.ExtType(Extension.REF, pack([self.kind, self.device, self.form, *self.parts]))


def encode(value: Any, name: str = "value") -> bytes:
    """Bytes of a plain value. LeafError names the path (below ``name``) of anything that is not plain."""
    return pack(lower(value, name))


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
    return lowered if len(raw) < _MIN_SQUEEZED_BYTES else msgpack.ExtType(Extension.SQUEEZED, zlib.compress(raw, 1))


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
        return msgpack.ExtType(Extension.COUNTER, pack(_lower_dict(value, path, on_tensor, depth)))
    if kind is OrderedDict:  # a module's state_dict is one, with the versions of its parts as an attribute
        versions = lower(vars(value).get("_metadata"), (path, "_metadata"), None, depth + 1)
        return msgpack.ExtType(Extension.ORDERED_DICT, pack([_lower_dict(value, path, on_tensor, depth), versions]))
    if kind is defaultdict:
        factory = _factory_name(value.default_factory, path)
        return msgpack.ExtType(Extension.DEFAULT_DICT, pack([factory, _lower_dict(value, path, on_tensor, depth)]))
    if kind is deque:
        items = _lower_items(list(value), path, on_tensor, depth)
        return msgpack.ExtType(Extension.DEQUE, pack([value.maxlen, items]))
    if on_tensor is not None and is_generator(value):
        state = lower(generator_state(value), path, None, depth + 1)
        return msgpack.ExtType(Extension.GENERATOR, pack([generator_kind(value), state]))
    return _lower_atom(value, path)


_SEQUENCES: dict[type, int] = {tuple: Extension.TUPLE, torch.Size: Extension.SIZE}
_SETS: dict[type, int] = {set: Extension.SET, frozenset: Extension.FROZENSET}


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
        return msgpack.ExtType(Extension.BYTEARRAY, bytes(value))
    if kind is complex:
        return msgpack.ExtType(Extension.COMPLEX, struct.pack("<dd", value.real, value.imag))
    if kind is range:
        return msgpack.ExtType(Extension.RANGE, pack([value.start, value.stop, value.step]))
    if kind is torch.dtype:
        return msgpack.ExtType(Extension.DTYPE, pack(str(value).removeprefix("torch.")))
    if kind is torch.device:
        return msgpack.ExtType(Extension.DEVICE, pack([value.type, value.index]))
    if kind is np.str_ or kind is np.bytes_:  # item() would drop trailing zeros
        text = str.__add__(value, "") if kind is np.str_ else bytes.__add__(value, b"")
        return msgpack.ExtType(Extension.NP_TEXT, pack(text))
    if kind is np.ndarray or isinstance(value, np.generic):
        return _lower_numpy(value, path)
    if (said := to_text(value)) is not None:
        return msgpack.ExtType(Extension.STANDARD, pack([*said]))
    raise _refusal(path, f"a {kind.__module__}.{kind.__qualname__} is not a plain value")


def _lower_numpy(value: Any, path: Path) -> Any:
    array = np.asarray(value)
    if array.dtype.kind not in _NUMPY_KINDS or array.dtype.fields is not None:
        raise _refusal(path, f"numpy data of type {array.dtype} is not a plain value")
    if isinstance(value, np.generic):
        return msgpack.ExtType(Extension.NP_SCALAR, pack([array.dtype.str, array.tobytes()]))
    order: Literal["F", "C"] = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    return msgpack.ExtType(Extension.ND_ARRAY, pack([array.dtype.str, list(array.shape), order, array.tobytes(order)]))


def _inline_tensor(tensor: torch.Tensor, path: Path) -> Any:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise _refusal(path, f"a {type(tensor).__qualname__} on {tensor.device} is not a plain value")
    if tensor.numel() * tensor.element_size() > MAX_INLINE_TENSOR_BYTES:
        raise _refusal(path, f"a tensor of more than {MAX_INLINE_TENSOR_BYTES} bytes is not a plain value")
    # a clone, because contiguous() leaves the odd stride of a single element, which view() refuses
    dense = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    raw = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    return msgpack.ExtType(Extension.TENSOR, pack([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw]))


def _factory_name(factory: Any, path: Path) -> str | None:
    if factory is None:
        return None
    for name, known in FACTORIES.items():
        if factory is known:
            return name
    raise _refusal(path, f"a defaultdict that makes its values with {factory!r} is not a plain value")


def _big_int(value: Any) -> Any:
    if type(value) is not int:  # pragma: no cover
        raise TypeError(f"{type(value)} was not lowered")
    return msgpack.ExtType(Extension.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _refusal(path: Path, what: str) -> LeafError:
    return LeafError(
        path_text(path), what, "keep numbers, text, bytes, tensors, numpy arrays, lists, tuples, sets and dicts of them"
    )
