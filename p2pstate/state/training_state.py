"""The whole training state of one rank: collected as leaves and one blob of values, restored in place.

In: models, optimizers, objects, a dict of the user's own. Out: ``Collected``, which aliases live memory.
Invariants: ``collect`` copies no tensor data, fires no hook, draws no random number and changes nothing; equal states
of equal objects give equal names and equal ``values``. It looks at the live objects each time; what is known of them is
used again only for tensors that are the same objects over the same memory (see sameness.py).
Known limits: what a program keeps elsewhere (closures, module attributes, gradients of parameters in no optimizer) is
not seen: keep it in ``extra`` or in an object with ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from p2pstate.state import rng as random_streams
from p2pstate.state.buffers import BufferShapes
from p2pstate.state.carried import CarriedGradients
from p2pstate.state.collecting import Collector
from p2pstate.state.comm_hooks import hook_memories
from p2pstate.state.decoding import decode
from p2pstate.state.encoding import pack, squeeze
from p2pstate.state.errors import LeafError
from p2pstate.state.holders import current_world
from p2pstate.state.leaves import Holders, Leaf
from p2pstate.state.naming import Look, ModelNames
from p2pstate.state.objects import check_name, check_object, collect_extra, collect_object
from p2pstate.state.optimizers import OptimizerState
from p2pstate.state.reducers import awaited_backward
from p2pstate.state.restore import FORMAT, Live, restore

__all__ = ["Collected", "TrainingState"]


@dataclass(frozen=True, slots=True)
class Collected:
    """One look at the state. The leaves change with the live objects: copy them before the next step.

    While nothing but their bytes changes, ``leaves`` is the very same list each time.
    """

    leaves: list[Leaf]  # sorted by name
    values: bytes  # MessagePack of all plain values; only this rank's
    tied: Mapping[str, str]  # further names of tensors in models -> the names of their leaves


@dataclass(frozen=True, slots=True)
class _Models:
    """What was found in all models, and is the same as long as ``looks`` are: see ModelNames.look."""

    own: Holders
    looks: list[Look]
    named: dict[int, tuple[str, Holders]]
    trainable: set[str]
    frozen: Any
    changed_buffers: Any
    deleted_buffers: Any
    non_persistent: Any
    leaves: list[Leaf]


class TrainingState:
    """Everything that has to survive. ``objects`` are named (the names become the first part of leaf names)."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        objects: Mapping[str, Any],
        *,
        extra: MutableMapping[str, Any] | None = None,
        rng: bool = True,
    ) -> None:
        """LeafError (with the name, what is wrong and what to do) for anything that cannot be captured."""
        plain: dict[str, Any] = {}
        averages: list[ModelNames] = []
        for name, thing in objects.items():
            _check_name(name, thing)
            if isinstance(thing, nn.Module):
                averages.append(ModelNames(thing, name, trained=False))
            else:
                plain[name] = thing
        names = [ModelNames(m, prefix) for prefix, m in zip(_numbered("model", len(models)), models, strict=True)]
        names += averages
        self._hooks = dict(hook_memories(names))
        memories = [each for each in self._hooks.values() if not any(each is given for given in plain.values())]
        plain |= zip(_numbered("comm_hook", len(memories)), memories, strict=True)
        self._live = Live(
            models=tuple(names),
            optimizers=tuple(
                OptimizerState(optimizer, prefix)
                for prefix, optimizer in zip(_numbered("optimizer", len(optimizers)), optimizers, strict=True)
            ),
            objects=plain,
            extra=extra,
            rng=rng,
        )
        self._shapes = BufferShapes(self._live.models)
        self._models: _Models | None = None
        self._known: list[list[Leaf]] = []
        self._leaves: list[Leaf] | None = None  # all of them in order, if there are no others
        self._names: list[str] = []
        self._order: list[int] = []
        self._tied: dict[str, str] = {}
        self._trained: set[str] = set()
        self.collect()

    def collect(self) -> Collected:
        """The state as it is now. LeafError names what cannot be captured."""
        own = current_world().own
        collector = Collector(own)
        models = self._look_at_models(own)
        collector.known.append(models.leaves)
        extra_state = {
            name: collector.tree(module.get_extra_state(), name)
            for model in self._live.models
            for name, module in model.extra_state_modules()
        }
        wrappers = [item for model in self._live.models for item in model.data_parallel_modules()]
        # whether its next forward broadcasts buffers
        forward_sync = {name: module.require_forward_param_sync for name, module in wrappers}
        awaiting_backward = [name for name, module in wrappers if awaited_backward(module).awaited]
        evaluating = [name for model in self._live.models for name, module in model.modules() if not module.training]
        optimizers = {o.prefix: o.collect(collector, models.named) for o in self._live.optimizers}
        objects = {name: collect_object(collector, name, thing) for name, thing in sorted(self._live.objects.items())}
        extra = None if self._live.extra is None else collect_extra(collector, self._live.extra)
        streams = collector.tree(random_streams.capture(), "rng") if self._live.rng else None
        values = pack(
            {
                "format": FORMAT,
                "extra_state": extra_state,
                "forward_sync": forward_sync,
                "awaiting_backward": awaiting_backward,
                "frozen": models.frozen,
                "evaluating": squeeze(evaluating),
                "changed_buffers": models.changed_buffers,
                "deleted_buffers": models.deleted_buffers,
                "non_persistent": models.non_persistent,  # for whoever exports weights
                "optimizers": optimizers,
                "objects": objects,
                "extra": extra,
                "rng": streams,
            }
        )
        return Collected(self._all_leaves(collector, models.trainable), values, self._tied)

    def _look_at_models(self, own: Holders) -> _Models:
        looks = [model.look() for model in self._live.models]
        known = self._models
        if known is None or known.own != own or not all(map(is_, looks, known.looks)):
            collector = Collector(own)
            named: dict[int, tuple[str, Holders]] = {}
            trainable: set[str] = set()
            frozen: list[str] = []
            for name, tensor, holders in (each for look in looks for each in look.named):
                named[id(tensor)] = (name, holders)
                collector.add(name, tensor, holders)
                if tensor.requires_grad:
                    trainable.add(name)
                elif isinstance(tensor, nn.Parameter):
                    frozen.append(name)
            changed = squeeze(self._shapes.changed())
            deleted = self._shapes.deleted()
            self._check_hooks()
            unsaved = squeeze([name for model in self._live.models for name in model.non_persistent()])
            known = self._models = _Models(
                own, looks, named, trainable, squeeze(frozen), changed, deleted, unsaved, collector.leaves
            )
        return known

    def _check_hooks(self) -> None:
        if dict(hook_memories(self._live.models)).keys() != self._hooks.keys():
            raise LeafError(
                "comm_hook",
                "is a communication hook that was registered after the state was looked at first",
                "register it before",
            )

    def parameter_names(self) -> set[str]:
        """The leaves (or, of tensors made of several, the beginnings of their names) that are parameters."""
        named = (each for model in self._live.models for each in model.tensors())
        return {name for name, tensor, _ in named if isinstance(tensor, nn.Parameter)}

    def is_steady(self, name: str) -> bool:
        """Whether the leaf of this name should change in ``optimizer.step()`` only: a parameter that one of the
        optimizers trains, or what that keeps for it."""
        for optimizer in self._live.optimizers:
            if name.startswith(f"{optimizer.prefix}/"):
                return not name.startswith(f"{optimizer.prefix}/:")
        while name and name not in self._trained:
            name = name.rpartition("/")[0]  # of a tensor made of several its leaves are below its name
        return bool(name)

    def stepped(self, optimizers: Collection[Optimizer]) -> None:
        """These took part in the newest step. Gradients of the others are accumulating and those of some of these are
        carried on, so they are captured."""
        for each in self._live.optimizers:
            took_part = each.optimizer in optimizers
            each.accumulating = each.carried.carried if took_part else True
            if took_part:
                each.carried.end()

    @property
    def carried(self) -> dict[Optimizer, CarriedGradients]:
        """By optimizer, what its gradients do from step to step."""
        return {each.optimizer: each.carried for each in self._live.optimizers}

    def expected_growth(self) -> Iterator[tuple[int, Holders, torch.device]]:
        """(bytes, holders, device) of optimizer state that is yet to be made, as far as it can be foreseen."""
        named = {id(tensor): holders for model in self._live.models for _, tensor, holders in model.tensors()}
        for each in self._live.optimizers:
            yield from each.expected_growth(named, current_world().own)

    def restore(self, tensors: Mapping[str, torch.Tensor], values: bytes) -> None:
        """Puts every live object into the captured state, in place.

        ``tensors`` holds every leaf by name (views into a slot are fine: they are copied), ``values`` the blob.
        Optimizer state is made where it is missing and removed where the captured state has none. LeafError, before
        anything was written, if names, shapes, dtypes or groups differ.
        """
        self.restore_decoded(tensors, decode(values))

    def restore_decoded(self, tensors: Mapping[str, torch.Tensor], values: Any) -> None:
        """:meth:`restore` of values that are decoded already; they are used up."""
        self._models = self._leaves = None
        self._known = []
        for model in self._live.models:
            model.forget()
        for optimizer in self._live.optimizers:
            optimizer.forget()
        with torch.inference_mode(False), torch.no_grad():  # what is made is to be trained
            restore(self._live, self._shapes, tensors, values)

    def model_leaves(self) -> list[Leaf]:
        """The leaves of all models alone, as they are now."""
        collector = Collector(current_world().own)
        for model in self._live.models:
            for name, tensor, holders in model.tensors():
                collector.add(name, tensor, holders)
        return collector.leaves

    def _all_leaves(self, collector: Collector, trainable: set[str]) -> list[Leaf]:
        known = collector.known
        if len(known) != len(self._known) or not all(map(is_, known, self._known)):
            self._known, self._leaves = known, None
            self._trained = trainable.intersection(chain.from_iterable(o.names for o in self._live.optimizers))
        if collector.leaves:
            return self._sorted([*chain.from_iterable(known), *collector.leaves])
        if self._leaves is None:
            self._leaves = self._sorted([*chain.from_iterable(known)])
        return self._leaves

    def _sorted(self, leaves: list[Leaf]) -> list[Leaf]:
        names = [leaf.name for leaf in leaves]
        if names != self._names:
            _check_spelling(names)
            order = sorted(range(len(names)), key=names.__getitem__)
            for before, after in pairwise(order):
                if names[before] == names[after]:
                    raise LeafError(names[after], "is the name of two different leaves", "rename one of them")
            self._names, self._order = names, order
            self._tied = {further: name for model in self._live.models for further, name in model.tied().items()}
        return [leaves[index] for index in self._order]


def _numbered(word: str, count: int) -> list[str]:
    return [word] if count == 1 else [f"{word}{index}" for index in range(count)]


def _check_spelling(names: Sequence[str]) -> None:
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise LeafError(ascii(name), f"is no name in Unicode ({error.reason})", "rename it") from None


def _check_name(name: str, thing: Any) -> None:
    check_name(name)
    if isinstance(thing, Optimizer):
        raise LeafError(name, "is an optimizer", "give it with the optimizers")
    if not isinstance(thing, nn.Module):
        check_object(name, thing)
