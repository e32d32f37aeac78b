"""Objects that are not models or optimizers: schedulers, loaders, scalers, generators, and a dict of the user's own.

In: anything with ``state_dict``/``load_state_dict``, random generator objects, a mutable mapping. Out: trees.
Invariants: capture calls ``state_dict`` and nothing else. Restore gives ``load_state_dict`` a tree of its own copies,
so that an object which keeps what it is given never points into a slot.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, MutableMapping
from itertools import count
from typing import Any

from p2pstate.state.collecting import Collector
from p2pstate.state.errors import LeafError
from p2pstate.state.rebuilding import Rebuilder
from p2pstate.state.rng import generator_state, is_generator, set_generator_state

__all__ = [
    "apply_extra",
    "check_name",
    "check_object",
    "collect_extra",
    "collect_object",
    "free_name",
    "plan_extra",
    "restore_object",
]

_RESERVED = re.compile(r"(model|optimizer|comm_hook)\d*|extra|rng")


def free_name(thing: Any, taken: Container[str]) -> str:
    """A name for an object that was given without one: its class and a number."""
    kind = type(thing).__name__.lower()
    if _RESERVED.fullmatch(f"{kind}0"):
        kind += "_"
    return next(name for name in (f"{kind}{number}" for number in count()) if name not in taken)


def check_name(name: str) -> None:
    """LeafError unless an object may have this name."""
    if _RESERVED.fullmatch(name) or "/" in name or not name:
        raise LeafError(name or "''", "cannot be the name of an object", "choose a name without '/' that is not taken")


def check_object(name: str, thing: Any) -> None:
    """LeafError unless ``thing`` can be captured and restored."""
    if is_generator(thing):
        return
    if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
        raise LeafError(
            name,
            f"a {type(thing).__qualname__} has no state_dict and load_state_dict",
            "add both methods, or keep its values in extra",
        )


def collect_object(collector: Collector, name: str, thing: Any) -> Any:
    state = generator_state(thing) if is_generator(thing) else thing.state_dict()
    return collector.tree(state, name)


def restore_object(rebuilder: Rebuilder, name: str, thing: Any, tree: Any) -> None:
    state = rebuilder.tree(tree, None, name, None)
    if is_generator(thing):
        set_generator_state(thing, state, name)
    else:
        thing.load_state_dict(state)


def collect_extra(collector: Collector, extra: MutableMapping[str, Any]) -> list[Any]:
    """Rows [key, tree], in the mapping's order."""
    return [[key, collector.tree(value, ("extra", key))] for key, value in extra.items()]


def plan_extra(rebuilder: Rebuilder, extra: MutableMapping[str, Any], rows: list[Any]) -> dict[str, Any]:
    """What ``extra`` is to hold; live tensors and generators that match stay. Writes nothing."""
    return {key: rebuilder.tree(tree, extra.get(key), ("extra", key), None) for key, tree in rows}


def apply_extra(extra: MutableMapping[str, Any], planned: Mapping[str, Any]) -> None:
    """Makes ``extra`` hold exactly what was planned, in its order."""
    extra.clear()
    extra.update(planned)
