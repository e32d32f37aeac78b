"""One optimizer's state and groups: read without touching it, written back entry by entry.

In: a live optimizer and the names of its parameters. Out: leaves "optimizer/<parameter>/<key>", a tree of everything
else; on restore exactly the entries of the captured state, in place where tensors match.
Invariants: ``optimizer.state`` and ``optimizer.param_groups`` are read and written directly: ``state_dict`` helpers
take a real step and ``load_state_dict`` casts state to the parameter's dtype. "No state yet" (no entry) stays distinct
from an empty entry. Groups have to hold the same parameters in the same order as when captured; groups at the end that
were added since then go, and those that are missing here are added. Of a ZeroRedundancyOptimizer each rank has the
state that the optimizer inside it keeps, and nobody else has that. Gradients are state while they accumulate from one
step to the next: where the optimizer was not stepped in the newest step, or carries them (see carried.py). Of others it
is known which parameters have one, and those get zeros (an optimizer steps a parameter on zeros, and leaves one without
a gradient alone).
Known limits: a ZeroRedundancyOptimizer with ``overlap_with_ddp`` is refused; state that is a tensor subclass needs one
live tensor of that class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from p2pstate.state.attributes import OptimizerAttributes
from p2pstate.state.carried import CarriedGradients
from p2pstate.state.collecting import Collector, FlatDicts, is_simple
from p2pstate.state.encoding import squeeze
from p2pstate.state.errors import LeafError
from p2pstate.state.forms import Sharing
from p2pstate.state.growth import expected_state_bytes
from p2pstate.state.leaves import Holders, Leaf
from p2pstate.state.rebuilding import Rebuilder
from p2pstate.state.sameness import SameMemory

__all__ = ["OptimizerState", "PlannedOptimizer", "is_divided"]

# what a live group keeps for itself: its parameters, and the names torch gave them (which depend on wrappers)
_IDENTITY = ("params", "param_names")
_NUMBER = re.compile(r"#-?\d{1,20}")
_GRADIENT = attrgetter("grad")


@dataclass(frozen=True, slots=True)
class PlannedOptimizer:
    """``state``: the new content of ``optimizer.state``; ``groups``: parameters by name and values of each group."""

    state: dict[Any, Any]
    groups: list[tuple[dict[str, Any], dict[str, Any]]]
    gradients: dict[Any, torch.Tensor]
    zeroed: set[torch.Tensor]  # have a gradient, that is put to zero before it is used
    lost: bool  # or has to be, for what it was is not known
    attributes: dict[str, Any]
    captured_attributes: Mapping[str, Any]


@dataclass(slots=True)
class _Found:
    """What has a form that seldom changes: ``names`` in each group (``members``: for the values), and the ``state`` of
    each parameter."""

    names: list[list[str]]
    members: list[Any]
    state: Any
    num_states: int
    leaves: list[Leaf]
    sharing: Sharing


class _Known:
    """A form that was found, as long as all it was read from holds nothing but the same tensors."""

    def __init__(self, found: _Found, own: Holders, named: Mapping[int, Any], groups: Any, live: Any) -> None:
        self.found = found
        self._own = own
        self._named = named
        self._contents = _contents(groups, live)
        tensors = self._contents[-1]
        self._memory = SameMemory(tensors) if all(map(is_simple, tensors)) else None

    def holds(self, own: Holders, named: Mapping[int, Any], groups: Any, live: Any) -> bool:
        if self._memory is None or named is not self._named or own != self._own:
            return False
        now = _contents(groups, live)
        return (
            list(map(len, now)) == list(map(len, self._contents))
            and all(all(map(is_, these, those)) for these, those in zip(now, self._contents, strict=True))
            and self._memory.holds()
        )


def _contents(groups: Any, live: Mapping[Any, Any]) -> list[list[Any]]:
    """The objects that say what an optimizer holds: parameters by group, its entries, what is in them."""
    entries = list(live.values())
    if not all(type(entry) is dict for entry in entries):
        return [[object()]]  # never the same
    keys, values = chain.from_iterable(entries), chain.from_iterable(map(dict.values, entries))
    return [*([*group["params"]] for group in groups), [*live], entries, [*map(len, entries)], [*keys], [*values]]


def is_divided(optimizer: Optimizer) -> bool:
    """Whether it is a ZeroRedundancyOptimizer (importing the class is slow)."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


class OptimizerState:
    """``named`` is always (name, holders) of the live parameters by id, ``prefix`` "optimizer" or "optimizer0".

    ``accumulating``: its gradients are part of the state.
    """

    def __init__(self, optimizer: Optimizer, prefix: str) -> None:
        self.optimizer = optimizer
        self.prefix = prefix
        self.accumulating = False
        self.carried = CarriedGradients(optimizer, prefix)
        self._num_groups = len(optimizer.param_groups)  # as it was built: more may come and go
        self._divided = is_divided(optimizer)
        if self._divided and getattr(optimizer, "_overlap_with_ddp", False):
            raise LeafError(
                prefix,
                "is a ZeroRedundancyOptimizer that steps in DistributedDataParallel's hooks",
                "build it without overlap_with_ddp=True, or use fully_shard (FSDP2)",
            )
        self._flat = FlatDicts()
        self._called = WeakIdKeyDictionary()  # parameters of its groups -> their names
        self._known: _Known | None = None
        self.attributes = OptimizerAttributes(self.local, prefix)

    @property
    def local(self) -> Any:
        """The optimizer that has the state."""
        return self.optimizer.optim if self._divided else self.optimizer  # type: ignore[attr-defined]

    def collect(self, collector: Collector, named: Mapping[int, tuple[str, Holders]]) -> dict[str, Any]:
        live, groups = self.local.state, self.optimizer.param_groups
        if self._known is None or not self._known.holds(collector.own, named, groups, live):
            self._known = _Known(self._find(collector, named), collector.own, named, groups, live)
        found = self._known.found
        collector.known.append(found.leaves)
        values = []
        for index, group in enumerate(groups):
            own = {key: value for key, value in group.items() if key not in _IDENTITY}
            values.append(collector.tree(own, (f"{self.prefix}/:groups", index)))
        others = {} if found.num_states == len(live) else dict(self._others(live, named))
        collector.sharing = found.sharing
        more = {key: collector.tree(others[key], (f"{self.prefix}/:state", key)) for key in sorted(others)}
        collector.sharing = None
        return {
            "groups": [{"params": names, "values": its} for names, its in zip(found.members, values, strict=True)],
            "state": found.state,
            "others": more,
            "attributes": self.attributes.collect(collector),
            "gradients": dict(self._gradients(collector, named)) if self.accumulating else {},
            "zeroed": [] if self.accumulating else self._with_gradient(found.names),
            "lost": self.carried.lost or not (self.accumulating or self.carried.are_zeros()),
        }

    @property
    def names(self) -> Iterator[str]:
        """Of the parameters in all groups, as collected last."""
        return iter(()) if self._known is None else chain.from_iterable(self._known.found.names)

    def forget(self) -> None:
        """Let go of the memory of the state that was found last: other state may be here by now."""
        self._known = None
        self._flat = FlatDicts()

    def _find(self, models: Collector, named: Mapping[int, tuple[str, Holders]]) -> _Found:
        own = models.own
        collector = Collector(own)
        called = {key: name for key, (name, _) in named.items()}
        collector.sharing = Sharing(chain.from_iterable(models.known[:1]), self.local.state.values(), called)
        members = []
        state: dict[str, Any] = {}
        live = self.local.state
        for index, group in enumerate(self.optimizer.param_groups):
            names = []
            for parameter in group["params"]:
                name, holders = self._name(named, parameter, index)
                names.append(name)
                if parameter in live:
                    path = f"{self.prefix}/{name}"
                    alike = own if self._divided else holders
                    state[name] = self._flat.tree(collector, live[parameter], path, parameter, alike)
                self._called[parameter] = name
            members.append(names)
        packed = list(map(squeeze, members))
        return _Found(members, packed, squeeze(state), len(state), collector.leaves, collector.sharing)

    def _gradients(self, collector: Collector, named: Mapping[int, tuple[str, Holders]]) -> Iterator[tuple[str, Any]]:
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    name, _ = self._name(named, parameter, index)
                    yield name, collector.tree(parameter.grad, (f"{self.prefix}/:gradients", name))

    def _with_gradient(self, names: list[list[str]]) -> Any:
        """The parameters that have a gradient like themselves, by name; True for all of them."""
        parameters = [*chain.from_iterable(group["params"] for group in self.optimizer.param_groups)]
        if all(map(is_, map(_GRADIENT, parameters), repeat(None))):
            return []
        having = [*map(_has_gradient, parameters)]
        return all(having) or squeeze([*compress(chain.from_iterable(names), having)])

    def _name(
        self, named: Mapping[int, tuple[str, Holders]], parameter: torch.Tensor, index: int
    ) -> tuple[str, Holders]:
        found = named.get(id(parameter))
        if found is None:
            known = self._called.get(parameter)
            which = f"a parameter of shape {list(parameter.shape)}" + (f" (it was {known})" if known else "")
            raise LeafError(
                f"{self.prefix} group {index}",
                f"holds {which} that is in none of the given models",
                "give the model it belongs to as well, or an nn.ParameterList of it if it belongs to none; if it was "
                "in one before, tie weights or remove modules before the optimizer and the Replicator are made",
            )
        return found

    def _others(self, live: Mapping[Any, Any], named: Mapping[int, tuple[str, Holders]]) -> Iterator[tuple[str, Any]]:
        """Entries of parameters that no group holds (any more) and entries with keys of their own."""
        grouped = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        for key, value in live.items():
            if isinstance(key, torch.Tensor):
                if id(key) in grouped:
                    continue
                if id(key) not in named:
                    known = self._called.get(key, "without a name")
                    raise LeafError(
                        f"{self.prefix}/:state",
                        f"has an entry of a parameter of shape {list(key.shape)} ({known}) that is in none of its "
                        "groups and in none of the given models",
                        "remove it (optimizer.state.pop(parameter)) when another parameter takes the place of this one",
                    )
                yield named[id(key)][0], value
            elif type(key) is str:
                yield f":{key}", value
            elif type(key) is int:
                yield f"#{key}", value
            else:
                advice = "use parameters, strings or whole numbers as keys"
                raise LeafError(f"{self.prefix}/:state", f"has an entry with the key {key!r}", advice)

    def expected_growth(
        self, holders_of: Mapping[int, Holders], own: Holders
    ) -> Iterator[tuple[int, Holders, torch.device]]:
        """(bytes, holders, device) of the state of parameters that have none yet; ``holders_of`` by id."""
        for group in self.local.param_groups:
            for parameter in group["params"]:
                num_bytes = expected_state_bytes(self.local, group, parameter)
                if num_bytes and parameter not in self.local.state:
                    holders = own if self._divided else holders_of.get(id(parameter), own)
                    yield num_bytes, holders, parameter.device

    def check(self, saved: Any, named: Mapping[int, tuple[str, Holders]]) -> None:
        """LeafError if the live groups are not the captured ones, but for some at the end that were added or are to be
        added."""
        live = [[self._name(named, p, i)[0] for p in g["params"]] for i, g in enumerate(self.optimizer.param_groups)]
        names = {name for name, _ in named.values()}
        for index in range(max(self._num_groups, len(saved["groups"]))):
            captured = saved["groups"][index]["params"] if index < len(saved["groups"]) else None
            present = live[index] if index < len(live) else [name for name in captured or () if name in names]
            if captured == present:
                continue
            raise LeafError(
                f"{self.prefix} group {index}",
                _difference(captured, present),
                "build the same models, and the optimizer with the same groups, before restoring, and change them "
                "(prune, an adapter) before the Replicator is made",
            )
        for index, (here, there) in enumerate(zip(self.optimizer.param_groups, saved["groups"], strict=False)):
            missing = [key for key in self._settings(here) if key not in there["values"]]
            unknown = [key for key in there["values"] if key not in here]
            if missing and unknown:
                raise LeafError(
                    f"{self.prefix} group {index}",
                    f"of this {type(self.optimizer).__name__} has {', '.join(missing)}; captured was another kind of "
                    f"optimizer, with {', '.join(unknown)}",
                    "build the same kind of optimizer, or begin a new run with the weights alone",
                )

    def plan(self, saved: Any, parameters: Mapping[str, Any], rebuilder: Rebuilder) -> PlannedOptimizer:
        """What :meth:`apply` is to do after all copies were checked; writes nothing yet."""
        live = self.local.state
        content: dict[Any, Any] = {}
        for name, tree in saved["state"].items():
            parameter = self._owner(parameters, name)
            content[parameter] = rebuilder.tree(tree, live.get(parameter), f"{self.prefix}/{name}", parameter)
        for key, tree in saved["others"].items():
            owner = self._owner_of_other(parameters, key)
            like = owner if isinstance(owner, torch.Tensor) else None
            content[owner] = rebuilder.tree(tree, live.get(owner), (f"{self.prefix}/:state", key), like)
        groups = []
        for index, group in enumerate(saved["groups"]):
            here = self.optimizer.param_groups[index] if index < len(self.optimizer.param_groups) else {}
            own = {key: value for key, value in here.items() if key not in _IDENTITY}
            values = rebuilder.tree(group["values"], own, (f"{self.prefix}/:groups", index), None)
            values = {key: own[key] for key in self._settings(own) if key not in values} | values
            groups.append(({name: parameters[name] for name in group["params"]}, values))
        gradients = {}
        for name, tree in saved["gradients"].items():
            parameter = self._owner(parameters, name)
            path = (f"{self.prefix}/:gradients", name)
            gradients[parameter] = rebuilder.tree(tree, parameter.grad, path, parameter)
        everyone = (name for group in saved["groups"] for name in group["params"])
        names = everyone if saved["zeroed"] is True else saved["zeroed"]
        zeroed = {self._owner(parameters, name) for name in names}
        attributes = self.attributes.plan(saved["attributes"], rebuilder)
        return PlannedOptimizer(content, groups, gradients, zeroed, saved["lost"], attributes, saved["attributes"])

    def apply(self, planned: PlannedOptimizer) -> None:
        """Make the live optimizer hold exactly what was planned; groups at the end come and go."""
        optimizer, local = self.optimizer, self.local
        live = optimizer.param_groups
        del live[len(planned.groups) :]
        if self._divided:
            del local.param_groups[len(live) :]
            optimizer._clear_cache()  # type: ignore[attr-defined]
        for members, values in planned.groups[len(live) :]:
            named = live and "param_names" in live[0]
            optimizer.add_param_group({"params": [*(members.items() if named else members.values())], **values})
        for index, (_, values) in enumerate(planned.groups):
            for group in [live[index], local.param_groups[index]] if self._divided else [live[index]]:
                kept = {key: group[key] for key in _IDENTITY if key in group}
                group.clear()
                group.update(kept | values)
        local.state.clear()
        local.state.update(planned.state)
        self.attributes.apply(planned.attributes, planned.captured_attributes)
        for parameter in chain.from_iterable(group["params"] for group in live):
            if parameter not in planned.zeroed:
                parameter.grad = planned.gradients.get(parameter)
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.accumulating = bool(planned.gradients)
        self.carried.restored(zeros=not self.accumulating, lost=planned.lost)

    def _settings(self, group: Mapping[str, Any]) -> list[str]:
        """What this kind of optimizer needs in a group. A newer torch may have more of them than the captured state."""
        return [key for key in getattr(self.local, "defaults", {}) if key in group]

    def _owner_of_other(self, parameters: Mapping[str, Any], key: str) -> Any:
        if key.startswith(":"):
            return key[1:]
        if not key.startswith("#"):
            return self._owner(parameters, key)
        if not _NUMBER.fullmatch(key):
            raise LeafError(f"{self.prefix}/:state", f"has the entry {key!r}", "this copy is damaged: use another one")
        return int(key[1:])

    def _owner(self, parameters: Mapping[str, Any], name: str) -> Any:
        if name not in parameters:
            advice = "build the same models on every rank"
            raise LeafError(f"{self.prefix}/{name}", "is the state of a parameter that does not exist here", advice)
        return parameters[name]


def _has_gradient(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    return gradient is not None and gradient.layout == parameter.layout and gradient.dtype == parameter.dtype


def _difference(captured: list[str] | None, present: list[str]) -> str:
    if captured is None:
        return f"was not there when captured, and holds {_shown(present)} now"
    gone, new = sorted({*captured} - {*present}), sorted({*present} - {*captured})
    if not gone and not new:
        return f"held its {len(present)} parameters in another order when captured"
    parts = [f"held {_shown(gone)} when captured and does not now"] if gone else []
    return "; ".join(parts + ([f"holds {_shown(new)} now and did not when captured"] if new else []))


def _shown(names: list[str]) -> str:
    return (", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")) or "no parameters"
