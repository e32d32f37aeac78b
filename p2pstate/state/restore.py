"""A captured state written back into live objects: everything is checked first, then everything is written.

In: captured tensors by leaf name, captured values, the live objects. Out: the same objects in the captured state.
Invariants: no name may be left over on either side, no shape or dtype may differ; until all of that is known nothing
is written. Parameters, buffers and matching optimizer tensors keep their memory. No optimizer step, no hook, no random
draw; random streams are set last.
Known limit: an object whose own ``load_state_dict`` raises leaves a half restored state; the error passes through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch

from p2pstate.state import quantised, rng
from p2pstate.state.buffers import BufferShapes, ParameterRefit, Refit
from p2pstate.state.collecting import Collector
from p2pstate.state.errors import LeafError
from p2pstate.state.holders import current_world
from p2pstate.state.leaves import Holders, Leaf, write_into
from p2pstate.state.naming import ModelNames
from p2pstate.state.objects import apply_extra, plan_extra, restore_object
from p2pstate.state.optimizers import OptimizerState, PlannedOptimizer
from p2pstate.state.rebuilding import Rebuilder, references
from p2pstate.state.reducers import awaited_backward

__all__ = ["FORMAT", "Live", "names_in", "restore"]

FORMAT = 8
_MAX_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Live:
    """The objects that a state was captured from, or is restored into."""

    models: tuple[ModelNames, ...]
    optimizers: tuple[OptimizerState, ...]
    objects: Mapping[str, Any]
    extra: MutableMapping[str, Any] | None
    rng: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """All that is to be written, checked. ``in_models``: live parameters and buffers; ``rebuilder``: what belongs into
    tensors and generators that stay; one of ``optimizers`` for each optimizer, in their order."""

    in_models: Mapping[str, torch.Tensor]
    rebuilder: Rebuilder
    refits: Sequence[Refit | ParameterRefit]
    optimizers: Sequence[PlannedOptimizer]
    extra: Mapping[str, Any]


def restore(live: Live, shapes: BufferShapes, tensors: Mapping[str, torch.Tensor], saved: Any) -> None:
    """Writes ``tensors`` and the decoded values ``saved`` into ``live``. LeafError if they differ."""
    plan = _plan(live, shapes, tensors, saved)
    _write_tensors(plan, tensors)
    for refit in plan.refits:
        refit.apply()
    shapes.inherit(saved["changed_buffers"])
    for optimizer, its_plan in zip(live.optimizers, plan.optimizers, strict=True):
        optimizer.apply(its_plan)
    _write_modules(live, plan, saved)
    for name, thing in live.objects.items():
        restore_object(plan.rebuilder, name, thing, saved["objects"][name])
    if live.extra is not None:
        apply_extra(live.extra, plan.extra)
    if live.rng:
        rng.restore(saved["rng"])


def _plan(live: Live, shapes: BufferShapes, tensors: Mapping[str, torch.Tensor], saved: Any) -> _Plan:
    """Changes nothing, but that FSDP2's parameters are sharded again. LeafError as :func:`restore` has it."""
    _check_sections(live, saved)
    for model in live.models:
        model.reshard()
    named: dict[int, tuple[str, Holders]] = {}
    in_models: dict[str, torch.Tensor] = {}
    collector = Collector(current_world().own)
    for model in live.models:
        for name, tensor, holders in model.tensors():
            named[id(tensor)] = (name, holders)
            in_models[name] = tensor
            collector.add(name, tensor, holders)
    for optimizer in live.optimizers:
        optimizer.check(saved["optimizers"][optimizer.prefix], named)
    refits = shapes.plan(tensors, saved["changed_buffers"], saved["deleted_buffers"])
    refitted = {refit.name for refit in refits}
    fixed = [leaf for leaf in collector.leaves if leaf.name not in refitted]
    _check_names(fixed, {name: value for name, value in tensors.items() if name not in refitted}, saved)
    rebuilder = Rebuilder(tensors, lambda: _all_live(live, in_models), in_models)
    rebuilder.copies += [(leaf.tensor, tensors[leaf.name]) for leaf in fixed]
    return _Plan(
        in_models,
        rebuilder,
        refits,
        [each.plan(saved["optimizers"][each.prefix], in_models, rebuilder) for each in live.optimizers],
        plan_extra(rebuilder, live.extra, saved["extra"]) if live.extra is not None else {},
    )


def _write_tensors(plan: _Plan, tensors: Mapping[str, torch.Tensor]) -> None:
    """What keeps its memory, and the states of generators."""
    for target, value in plan.rebuilder.copies:
        write_into(target, value)
    quantised_in_models = [(name, tensor) for name, tensor in plan.in_models.items() if tensor.is_quantized]
    for name, tensor in (*plan.rebuilder.quantised, *quantised_in_models):
        quantised.copy_into(tensor, name, tensors)
    for generator, state, name in plan.rebuilder.generators:
        rng.set_generator_state(generator, state, name)


def _write_modules(live: Live, plan: _Plan, saved: Any) -> None:
    """What modules have besides their tensors: extra state, what DDP remembers, what is frozen, training or not."""
    for name, module in (item for model in live.models for item in model.extra_state_modules()):
        module.set_extra_state(plan.rebuilder.tree(saved["extra_state"][name], None, name, None))
    for name, wrapper in (item for model in live.models for item in model.data_parallel_modules()):
        wrapper.require_forward_param_sync = saved["forward_sync"][name]
        awaited_backward(wrapper).restore(wrapper, name in saved["awaiting_backward"])
    frozen, evaluating = set(saved["frozen"]), set(saved["evaluating"])
    for name, tensor in plan.in_models.items():
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad == (name in frozen):
            tensor.requires_grad_(name not in frozen)
    for name, module in (item for model in live.models for item in model.modules()):
        module.training = name not in evaluating


def _all_live(live: Live, parameters: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    yield from parameters.values()
    for optimizer in live.optimizers:
        yield from optimizer.local.state.values()
    yield from (live.extra or {}).values()
    yield from (thing.state_dict() for thing in live.objects.values() if not rng.is_generator(thing))


def _check_sections(live: Live, saved: Any) -> None:
    """Both sides must have the same models' extra state, optimizers, objects, extra and random streams."""
    _check_structure(saved)
    names = (name for model in live.models for name, _ in model.extra_state_modules())
    _same("module with extra state", names, saved["extra_state"])
    names = (name for model in live.models for name, _ in model.data_parallel_modules())
    _same("DistributedDataParallel", names, saved["forward_sync"])
    _same("optimizer", (optimizer.prefix for optimizer in live.optimizers), saved["optimizers"])
    _same("object", live.objects, saved["objects"])
    for what, here, there in (("extra", live.extra, saved["extra"]), ("rng", live.rng or None, saved["rng"])):
        if (here is None) != (there is None):
            where = "in the captured state but not here" if here is None else "here but not in the captured state"
            raise LeafError(what, f"is {where}", "give every rank the same arguments")
    if live.rng:
        rng.check(saved["rng"])


def _check_structure(saved: Any) -> None:
    """LeafError unless the decoded values have the form that ``TrainingState.collect`` gives them."""
    sections: dict[str, Any] = {
        "extra_state": dict,
        "forward_sync": dict,
        "awaiting_backward": list,
        "frozen": list,
        "evaluating": list,
        "changed_buffers": list,
        "deleted_buffers": list,
        "optimizers": dict,
        "objects": dict,
        "extra": (list, NoneType),
        "rng": (dict, NoneType),
    }
    right = (
        isinstance(saved, dict)
        and saved.get("format") == FORMAT
        and all(isinstance(saved.get(key, ...), kind) for key, kind in sections.items())
        and all(_is_optimizer(tree) for tree in saved["optimizers"].values())
        and all(isinstance(row, list) and len(row) == 2 for row in saved["extra"] or [])
    )
    if not right:
        raise LeafError("values", "are not in this release's format", "run the same release of p2pstate everywhere")


def _is_optimizer(tree: Any) -> bool:
    sections = {"groups": list, "state": dict, "others": dict, "gradients": dict, "attributes": dict}
    return (
        isinstance(tree, dict)
        and all(isinstance(tree.get(key), kind) for key, kind in sections.items())
        and all(type(key) is str for key in (*tree["state"], *tree["others"], *tree["gradients"]))
        and all(isinstance(row, list) and len(row) == 2 for row in tree["attributes"].values())
        and (tree.get("zeroed") is True or isinstance(tree.get("zeroed"), list))
        and isinstance(tree.get("lost"), bool)
        and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in tree["groups"])
        and all(isinstance(g.get("values"), dict) for g in tree["groups"])
    )


def _same(what: str, here: Iterable[str], there: Iterable[str]) -> None:
    present, captured = set(here), set(there)
    _report(what, sorted(present - captured), sorted(captured - present))


def _report(what: str, only_here: list[str], only_captured: list[str]) -> None:
    parts = [f"only here: {_shown(only_here)}"] if only_here else []
    parts += [f"only in the captured state: {_shown(only_captured)}"] if only_captured else []
    if parts:
        first = (only_here + only_captured)[0]
        raise LeafError(
            first,
            f"{what} without a counterpart ({'; '.join(parts)})",
            "build the same models, optimizers and objects on every rank, and change them (prune, an adapter, a new "
            "module) before the Replicator is made",
        )


def _shown(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def names_in(saved: Any) -> set[str]:
    """Leaf names of all tensors that decoded values refer to: of all but the models' own."""
    wanted: set[str] = set()
    for prefix, optimizer in saved["optimizers"].items():
        for name, tree in optimizer["state"].items():
            wanted.update(references(tree, f"{prefix}/{name}"))
        for key, tree in optimizer["others"].items():
            wanted.update(references(tree, (f"{prefix}/:state", key)))
        for name, tree in optimizer["gradients"].items():
            wanted.update(references(tree, (f"{prefix}/:gradients", name)))
        for index, group in enumerate(optimizer["groups"]):
            wanted.update(references(group["values"], (f"{prefix}/:groups", index)))
        for name, (_, tree) in optimizer["attributes"].items():
            wanted.update(references(tree, (f"{prefix}/:attributes", name)))
    for section in ("extra_state", "objects"):
        for name, tree in saved[section].items():
            wanted.update(references(tree, name))
    for key, tree in saved["extra"] or []:
        wanted.update(references(tree, ("extra", key)))
    return wanted


def _check_names(modules: list[Leaf], tensors: Mapping[str, torch.Tensor], saved: Any) -> None:
    """Every leaf of the models and every tensor that the values refer to must be there, and nothing else."""
    wanted = {leaf.name for leaf in modules} | names_in(saved)
    _report("tensor", sorted(wanted - tensors.keys()), sorted(tensors.keys() - wanted))
    wrong = [leaf.name for leaf in modules if not _alike(leaf.tensor, tensors[leaf.name])]
    if wrong:
        here, there = next((leaf.tensor, tensors[leaf.name]) for leaf in modules if leaf.name == wrong[0])
        what = f"is {_kind(here)} here and {_kind(there)} in the captured state"
        also = f" (so differ also: {_shown(wrong[1:])})" if len(wrong) > 1 else ""
        raise LeafError(wrong[0], what + also, "build the same model on every rank")


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
