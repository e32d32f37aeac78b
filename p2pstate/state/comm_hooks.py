"""What communication hooks of DistributedDataParallel remember from step to step.

In: models. Out: objects with ``state_dict`` and ``load_state_dict``, one for each hook that has something to remember:
PowerSGD's errors and factors, the counters of torch's other hooks, a state of the user's own that has both methods.
Invariant: a state of which nothing is known is refused, for it would be lost without a word.
Known limit: what a hook keeps elsewhere than in the state that it was registered with is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from p2pstate.state.errors import LeafError
from p2pstate.state.naming import ModelNames
from p2pstate.state.rng import generator_state, is_generator, set_generator_state

__all__ = ["hook_memories"]

# class of torch's -> what of it changes in training
_CHANGING: dict[str, tuple[str, ...]] = {
    "PowerSGDState": (
        *("iter", "rng", "error_dict", "p_memory_dict", "q_memory_dict"),
        *("total_numel_before_compression", "total_numel_after_compression", "next_stats_report"),
    ),
    "PostLocalSGDState": ("iter",),
    "_AllreduceUpcastHookState": (),
}
_TORCH = "torch.distributed.algorithms.ddp_comm_hooks."
_METHODS = ("state_dict", "load_state_dict")


class _Memory:
    """The attributes called ``names`` of ``thing``."""

    def __init__(self, thing: Any, names: tuple[str, ...]) -> None:
        self._thing, self._names = thing, names

    def state_dict(self) -> dict[str, Any]:
        found = {name: getattr(self._thing, name) for name in self._names}
        return {name: generator_state(value) if is_generator(value) else value for name, value in found.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._names:
            live = getattr(self._thing, name)
            if is_generator(live):
                set_generator_state(live, state[name], f"comm_hook/{name}")
            else:
                setattr(self._thing, name, state[name])


def hook_memories(models: Iterable[ModelNames]) -> Iterator[tuple[int, Any]]:
    """(id of the state that a hook was registered with, object to capture). LeafError for one of which nothing is
    known."""
    for where, module in (item for model in models for item in model.data_parallel_modules()):
        for _, state in module._comm_hooks:
            if (memory := _memory(state, where)) is not None:
                yield id(state), memory


def _memory(state: Any, where: str) -> Any:
    if state is None or isinstance(state, dist.ProcessGroup | int | float | str):
        return None
    kind = type(state)
    if kind.__module__.startswith(_TORCH) and kind.__name__ in _CHANGING:
        names = _CHANGING[kind.__name__]
        return _Memory(state, names) if names else None
    if all(callable(getattr(state, method, None)) for method in _METHODS):
        return state
    raise LeafError(
        where.rstrip("/"),
        f"has a communication hook with a {kind.__qualname__} as its state, which could not be captured",
        "give that class state_dict() and load_state_dict(), or register the hook with None if it remembers nothing",
    )
