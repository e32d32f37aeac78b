"""Optimizers inside of other optimizers (SAM, Lookahead, wrappers of launchers), which have state of their own.

In: the optimizers that were given. Out: these and all that they hold, each once; of a wrapper that only passes on the
state of the one inside, that one.
Known limit: an inner optimizer is found as an attribute, or in a list, tuple or dict that is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import Optimizer

from p2pstate.state.errors import LeafError
from p2pstate.state.optimizers import is_divided

__all__ = ["with_inner"]


def with_inner(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """LeafError for a wrapper that keeps more than the state of the optimizer inside."""
    found: list[Optimizer] = []
    seen: set[int] = set()
    todo = list(optimizers)
    while todo:
        each = todo.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        inner = [] if is_divided(each) else list(_held_by(each))
        if any(one.state is each.state for one in inner):
            _check_wrapper(each)
        else:
            found.append(each)
        todo = inner + todo
    return found


def _held_by(optimizer: Optimizer) -> Iterator[Optimizer]:
    for value in vars(optimizer).values():
        values: Iterable[Any] = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        )
        yield from (one for one in values if isinstance(one, Optimizer))


def _check_wrapper(optimizer: Optimizer) -> None:
    more = sorted(optimizer.state_dict().keys() - {"state", "param_groups"})
    if more:
        raise LeafError(
            f"a {type(optimizer).__qualname__}",
            f"keeps {', '.join(more)} besides the state of the optimizer inside of it",
            "give that optimizer instead, and what is left as an object with state_dict() and load_state_dict()",
        )
