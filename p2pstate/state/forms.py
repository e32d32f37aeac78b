"""How a plain tensor lies in memory, so that one that is made anew lies the same way.

In: tensors of a tree, their names. Out: for each a few bytes: strides, whether it is a parameter or is trained, and
with which other leaf it shares its memory; on restore tensors over new memory, or over that of the leaf it was shared
with.
Invariants: nothing is written for a contiguous tensor with memory of its own, so most have no form. Memory is shared
with what is live where that is kept, and what would not fit into it gets memory of its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from p2pstate.state.decoding import decode
from p2pstate.state.encoding import encode
from p2pstate.state.errors import LeafError
from p2pstate.state.leaves import Leaf, is_plain, write_into

__all__ = ["MAKEABLE", "Maker", "Sharing", "form_of", "spread_in"]

MAKEABLE = ("plain", "dtensor")  # kinds of references whose only part may have a form


class Sharing:
    """Memory that more than one tensor of ``values``, or of them and the models' ``leaves``, lies in.

    ``names``: what tensors of the models are called, by id.
    """

    def __init__(self, leaves: Iterable[Leaf], values: Iterable[Any], names: Mapping[int, str]) -> None:
        tensors = [tensor for value in values for tensor in _tensors_in(value)]
        counts = Counter(_address(tensor) for tensor in {id(each): each for each in tensors}.values())
        repeated = Counter(map(id, tensors))
        several = {_address(t) for t in tensors if repeated[id(t)] > 1} | {a for a, n in counts.items() if n > 1}
        self._first: dict[int, tuple[str, torch.Tensor]] = {}
        for leaf in leaves:
            address = _address(leaf.tensor)
            if address in counts:
                self._first.setdefault(address, (leaf.name, leaf.tensor))
        self._shared = (several | self._first.keys()) - {0}
        self._names = dict(names) if self._shared else {}

    def __bool__(self) -> bool:
        return bool(self._shared)

    def of(self, name: str, tensor: torch.Tensor) -> list[Any]:
        """[leaf whose memory it is, that one's offset, this one's offset, bytes of the memory, the same object as the
        leaf of this name]; empty for memory of its own. Offsets and sizes in bytes."""
        if not self._shared or not is_plain(tensor):
            return []
        address = _address(tensor)
        if address not in self._shared:
            return []
        base, first = self._first.setdefault(address, (name, tensor))
        same = self._names.setdefault(id(tensor), name)
        size = tensor.untyped_storage().nbytes()
        return [base, _offset(first), _offset(tensor), size, "" if same == name else same]


def form_of(tensor: torch.Tensor, shared: Sequence[Any] = (), spread: Sequence[Any] = ()) -> bytes:
    """What :class:`Maker` needs besides shape and dtype; nothing for a contiguous tensor with memory of its own.

    ``spread``: see spreads.py, of a DTensor of which ``tensor`` is the local part.
    """
    strides = tensor.stride()
    odd = [] if strides == _contiguous(tensor.shape) else list(strides)
    trained = tensor.requires_grad and tensor.is_leaf
    if not odd and not trained and not shared and not spread and not isinstance(tensor, nn.Parameter):
        return b""
    return encode([odd, trained, isinstance(tensor, nn.Parameter), list(shared), list(spread)])


def spread_in(form: bytes, name: str) -> list[Any]:
    """The ``spread`` that :func:`form_of` was given."""
    return _read(form, name)[4] if form else []


@dataclass(frozen=True, slots=True)
class _Memory:
    storage: torch.UntypedStorage
    shift: int  # bytes that every offset has moved since the capture


class Maker:
    """Makes tensors of one restore. ``live``: tensors that are kept, by name."""

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        self._live = live
        self._memory: dict[str, _Memory] = {}
        self._made: dict[str, torch.Tensor] = {}

    def keep(self, name: str, form: bytes, tensor: torch.Tensor) -> None:
        """``tensor`` is live and stays: what shared its memory is to share it again."""
        self._made[name] = tensor
        if form and is_plain(tensor):
            *_, shared, _ = _read(form, name)
            if shared:
                moved = _Memory(tensor.untyped_storage(), _offset(tensor) - shared[2])
                self._memory.setdefault(shared[0], moved)

    def make(self, name: str, form: bytes, value: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, bool]:
        """A tensor like the captured one, and whether ``value`` has still to be copied into it."""
        if not form:
            return value.detach().to(device, copy=True, memory_format=torch.contiguous_format), False
        odd, trained, is_parameter, shared, _ = _read(form, name)
        strides = tuple(odd) if odd and _is_apart(value.shape, odd) else _contiguous(value.shape)
        same = self._made.get(shared[4], self._live.get(shared[4])) if shared and shared[4] else None
        if same is not None and same.shape == value.shape and same.dtype == value.dtype:
            return same, False
        made = self._over_shared(shared, value, strides, device) if shared else None
        is_shared = made is not None
        if made is None:
            made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=device)
            write_into(made, value)
        if is_parameter:
            made = nn.Parameter(made, requires_grad=trained)
        elif trained:
            made.requires_grad_()
        self._made[name] = made
        return made, is_shared

    def _over_shared(
        self, shared: Sequence[Any], value: torch.Tensor, strides: Sequence[int], device: torch.device
    ) -> torch.Tensor | None:
        base, base_offset, offset, size, _ = shared
        memory = self._memory.get(base)
        if memory is None:
            live = self._live.get(base)
            if live is not None and is_plain(live):
                memory = _Memory(live.untyped_storage(), _offset(live) - base_offset)
            else:
                memory = _Memory(torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage(), 0)
            self._memory[base] = memory
        start = offset + memory.shift
        span = sum((length - 1) * stride for length, stride in zip(value.shape, strides, strict=True)) + 1
        end = start + span * value.element_size()
        fits = start >= 0 and start % value.element_size() == 0 and end <= memory.storage.nbytes()
        if not fits or memory.storage.device.type != device.type:
            return None
        made = torch.empty(0, dtype=value.dtype, device=memory.storage.device)
        made.set_(memory.storage, start // value.element_size(), value.shape, tuple(strides))
        return made


def _read(form: bytes, name: str) -> tuple[list[int], bool, bool, list[Any], list[Any]]:
    content = decode(form, name)
    right = (
        type(content) is list
        and list(map(type, content)) == [list, bool, bool, list, list]
        and all(type(stride) is int and stride >= 0 for stride in content[0])
        and list(map(type, content[3])) in ([], [str, int, int, int, str])
        and all(number >= 0 for number in content[3][1:4])
    )
    if not right:
        raise LeafError(name, "is described in a way that makes no sense", "this copy is damaged: use another one")
    odd, trained, is_parameter, shared, spread = content
    return odd, trained, is_parameter, shared, spread


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if is_plain(value) and value.layout is torch.strided and not value.is_nested:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple | deque):
        for item in value:
            yield from _tensors_in(item)


def _address(tensor: torch.Tensor) -> int:
    """0 for tensors without elements, which share nothing."""
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _is_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements have one address, but for those of an expanded dimension."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=False) if stride):
        if stride <= reach and size > 1:
            return False
        reach += stride * (size - 1)
    return len(strides) == len(shape)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
