"""Trees of state on their way back: references become tensors again, live ones where they match.

In: decoded trees, the captured tensors by leaf name, and what is live at the same place. Out: new trees, and a list of
copies into live tensors that the caller carries out once everything was checked.
Invariants: planning writes nothing; every captured tensor is used at most once per name; a tensor that is live with
the same kind, shape, dtype and device type stays the same object, and so does a random generator.
Known limit: of a generator that stood in several places and has to be made, each place gets one of its own.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from p2pstate.state import quantised
from p2pstate.state.decoding import decode
from p2pstate.state.encoding import Path, TensorRef, path_text
from p2pstate.state.errors import LeafError
from p2pstate.state.forms import MAKEABLE, Maker, spread_in
from p2pstate.state.leaves import SHELLS, describe, is_plain, local_of, plain_parts
from p2pstate.state.rng import GeneratorState, generator_kind, is_generator, make_generator, set_generator_state
from p2pstate.state.spreads import spread

__all__ = ["Rebuilder", "references"]


def references(tree: Any, path: Path) -> list[str]:
    """Leaf names of all tensors that a decoded tree refers to."""
    if type(tree) is TensorRef:
        name = path_text(path)
        return [name + part for part in tree.parts] if tree.parts else [name]
    if isinstance(tree, dict):
        return [name for key, item in tree.items() for name in references(item, (path, key))]
    if isinstance(tree, list | tuple | deque):
        return [name for index, item in enumerate(tree) for name in references(item, (path, index))]
    return []


class Rebuilder:
    """Plans one restore. ``copies`` holds (live tensor, captured value) pairs, ``quantised`` live tensors by name that
    besides are to be quantised as captured, ``generators`` (live generator, captured state, name)."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        live: Callable[[], Iterable[Any]] = tuple,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """``live``: values among which a tensor of a subclass is looked for that has to be made; ``parameters``: live
        tensors of models by name, whose memory others may share."""
        self._maker = Maker(parameters or {})
        self._tensors = tensors
        self._live = live
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.quantised: list[tuple[str, torch.Tensor]] = []
        self.generators: list[tuple[Any, Any, str]] = []

    def tree(self, tree: Any, live: Any, path: Path, parameter: torch.Tensor | None) -> Any:
        """``tree`` (which is used up) with tensors in it.

        ``live`` is what stands at this place now (None if nothing does), ``parameter`` the parameter whose state this
        is: it lends mesh, placements and device to what has to be made.
        """
        kind = type(tree)
        if kind is TensorRef:
            return self._tensor(tree, live, path_text(path), parameter)
        if kind is GeneratorState:
            return self._generator(tree, live, path_text(path))
        if kind in (dict, OrderedDict, Counter, defaultdict):
            for key in tree:
                tree[key] = self.tree(tree[key], _at(live, key), (path, key), parameter)
            return tree
        if kind in (list, tuple, deque):
            items = (self.tree(item, _at(live, i), (path, i), parameter) for i, item in enumerate(tree))
            return deque(items, tree.maxlen) if kind is deque else kind(items)
        return tree

    def _generator(self, captured: GeneratorState, live: Any, name: str) -> Any:
        if is_generator(live) and generator_kind(live) == captured.kind:
            self.generators.append((live, captured.state, name))
            return live
        made = make_generator(captured.kind, name)
        set_generator_state(made, captured.state, name)
        return made

    def _tensor(self, ref: TensorRef, live: Any, name: str, parameter: torch.Tensor | None) -> torch.Tensor:
        if isinstance(live, torch.Tensor) and self._copy_into(ref, live, name):
            if ref.kind in MAKEABLE:
                self._maker.keep(name, ref.form, live)
            return live
        if ref.kind == quantised.KIND:
            keys = tuple(part.removeprefix("/") for part in ref.parts)
            return quantised.make(name, keys, self._tensors, _device(ref, parameter))
        if ref.kind in SHELLS and ref.parts == (f"/{ref.kind}",):
            codes, _ = self._maker.make(name, b"", self._tensors[name + ref.parts[0]], _device(ref, parameter))
            return codes.view(SHELLS[ref.kind])
        if ref.kind not in MAKEABLE or any(ref.parts):
            made = self._subclass(ref, name, parameter)
            if made is not None:
                return made
            raise LeafError(
                name,
                f"is a {ref.kind}, and nothing of its kind and size is here to be written into",
                "let the optimizer make its state (one step) before restoring",
            )
        value = self._tensors[name]
        fresh, is_empty = self._maker.make(name, ref.form, value, _device(ref, parameter))
        if is_empty:
            self.copies.append((fresh.detach(), value))
        if ref.kind == "plain":
            return fresh
        row = spread_in(ref.form, name)
        if row:
            return spread(fresh, row, (each for each in _tensors_in(self._live()) if isinstance(each, DTensor)), name)
        return _sharded_like(fresh, parameter, name)

    def _subclass(self, ref: TensorRef, name: str, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """A new tensor of the class that has this name; None if there is none or it cannot be made."""
        keys = [part.removeprefix("/") for part in ref.parts]
        kind: Any = next((type(each) for each in _tensors_in(self._live()) if _is_like(each, ref.kind, keys)), None)
        kind = kind or _only_class(ref.kind)
        if kind is None or not ref.form:
            return None
        shape, stride, context = decode(ref.form, name)
        device = _device(ref, parameter)
        inner = {
            key: self._tensors[name + part].to(device, copy=True) for key, part in zip(keys, ref.parts, strict=True)
        }
        made: torch.Tensor = kind.__tensor_unflatten__(inner, context, torch.Size(shape), stride)
        return made

    def _copy_into(self, ref: TensorRef, live: torch.Tensor, name: str) -> bool:
        """Plans the copies into ``live`` if it is what ``ref`` describes, with the captured shapes and dtypes."""
        here = describe(name, live)
        if replace(here, form=ref.form) != ref or (ref.kind not in MAKEABLE and here.form != ref.form):
            return False
        parts = [(plain, self._tensors[part]) for part, plain in plain_parts(name, live)]
        if any(plain.shape != value.shape or plain.dtype != value.dtype for plain, value in parts):
            return False
        self.copies += parts
        if ref.kind == quantised.KIND:
            self.quantised.append((name, live))
        return True


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors_in(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _is_like(tensor: Any, kind: str, keys: list[str]) -> bool:
    return type(tensor).__qualname__ == kind and not is_plain(tensor) and tensor.__tensor_flatten__()[0] == keys


def _only_class(name: str) -> Any:
    """The class of wrapper tensors of this name that the program has loaded; None if there is none, or several."""
    todo: list[Any] = [torch.Tensor]
    found: list[Any] = []
    while todo:
        todo += (kinds := todo.pop().__subclasses__())
        found += (each for each in kinds if each.__qualname__ == name and hasattr(each, "__tensor_unflatten__"))
    return found[0] if len(set(found)) == 1 else None


def _at(live: Any, key: Any) -> Any:
    if isinstance(live, Mapping):
        return live.get(key)
    if isinstance(live, list | tuple | deque) and key < len(live):
        return live[key]
    return None


def _device(ref: TensorRef, parameter: torch.Tensor | None) -> torch.device:
    if parameter is not None and parameter.device.type == ref.device:
        return parameter.device
    if ref.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(ref.device)


def _sharded_like(local: torch.Tensor, parameter: torch.Tensor | None, name: str) -> torch.Tensor:
    """A DTensor with the parameter's mesh and placements. LeafError if its local shape is another."""
    if not isinstance(parameter, DTensor) or local_of(parameter).shape != local.shape:
        raise LeafError(
            name,
            f"is a shard of shape {list(local.shape)} that is not split like its parameter",
            "let the optimizer make its state (one step) before restoring",
        )
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
