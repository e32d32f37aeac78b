"""Gradients that outlive their step: nothing resets them before the next backward adds to them.

In: one optimizer, when a window of blocks begins (after its step, or after a restore), when it is about to step, and
calls of its ``zero_grad`` and of modules'. Out: whether it steps on gradients that were there when the window began, so
that they are part of the state; whether those that are there now are zeros.

Invariants: gradients count as reset where ``zero_grad`` of the optimizer, or of a module that has all its parameters,
was called in the window, or where none of them is the tensor that it was, and as carried everywhere else: of a loop
that puts them to zero by hand that says too much, never too little. Nothing is read from a card.
Known limit: a loop that puts a new tensor into ``.grad``, computed from the old one, before the next step is taken for
one that resets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import chain
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from p2pstate.groups.uncompiled import uncompiled

__all__ = ["CarriedGradients"]


class CarriedGradients:
    """Of one optimizer. ``carried``: it made its newest step on gradients that were there when the window began;
    ``lost``: there were gradients in the state that was restored for this window, and they were no part of it."""

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        self.name = name
        self.carried = False
        self.lost = False
        self._optimizer = optimizer
        self._found: list[tuple[torch.Tensor, ref[torch.Tensor] | None]] | None = None  # None: no window is open
        self._was_reset = False  # zero_grad was called in this window
        self._is_called = False  # as it was in the one before: no need to look
        self._has_looked = False
        self._zeros: list[tuple[int, int]] = []  # the gradients' versions, after zero_grad or a restore left zeros

    def watch(self) -> None:
        """See each call of ``zero_grad`` from now on."""
        stock = self._optimizer.zero_grad

        @uncompiled
        @functools.wraps(stock)  # trainers look at its parameters
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            stock(*args, **kwargs)
            self._reset(kwargs.get("set_to_none", args[0] if args else True))

        self._optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        _watch_modules()
        _watched.add(self)

    def reset_by(self, module: nn.Module, set_to_none: bool) -> None:
        """``module.zero_grad`` was called."""
        theirs = set(map(id, module.parameters()))
        if all(id(each) in theirs for group in self._optimizer.param_groups for each in group["params"]):
            self._reset(set_to_none)

    def begin(self) -> None:
        """A block begins: the first one of a window, unless one is open."""
        if self._found is not None:
            return
        self._was_reset = self._has_looked = False
        if self.are_zeros():
            self._found = []
        elif self._is_called:
            self._found = [(next(self._with_gradient()), None)]
        else:
            self._found = [(each, _mark(each.grad)) for each in self._with_gradient()]

    def at_step(self) -> None:
        """The optimizer is about to step for the first time in its window: on what?"""
        if self._found is None or self._has_looked:
            return
        self._has_looked = True
        self.carried = not self._was_reset and any(_is_same(each.grad, mark) for each, mark in self._found)
        self._is_called = self._was_reset

    def end(self) -> None:
        """The step is committed, or all gradients were thrown away: the next block begins a window."""
        self._found = None
        self.lost = False

    def restored(self, *, zeros: bool, lost: bool) -> None:
        """A captured state is here. ``zeros``: all gradients that are here are zeros; ``lost``: some were no zeros
        when it was captured."""
        self.end()
        self.lost = lost
        self._zeros = self._versions() if zeros and not lost else []

    def _reset(self, set_to_none: bool) -> None:
        self._was_reset = True
        self._zeros = [] if set_to_none else self._versions()

    def are_zeros(self) -> bool:
        """Whether all gradients that are there are known to be zeros."""
        if next(self._with_gradient(), None) is None:
            return True
        return bool(self._zeros) and self._versions() == self._zeros

    def _with_gradient(self) -> Iterator[torch.Tensor]:
        parameters = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        return (each for each in parameters if each.grad is not None)

    def _versions(self) -> list[tuple[int, int]]:
        gradients: list[Any] = [each.grad for each in self._with_gradient()]
        # what is added to a DTensor in place counts in one of the two
        return [(g._version, g._local_tensor._version if type(g) is DTensor else 0) for g in gradients]


_watched: WeakSet[CarriedGradients] = WeakSet()


@functools.cache  # once
def _watch_modules() -> None:
    """By their class: a copy of a module that had a method of its own would reset the original's gradients."""
    stock = nn.Module.zero_grad

    @uncompiled
    @functools.wraps(stock)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        stock(self, set_to_none)
        for each in list(_watched):
            each.reset_by(self, set_to_none)

    nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]


def _mark(gradient: torch.Tensor | None) -> ref[torch.Tensor] | None:
    """To know it again by. None: cannot be told from what takes its place (a view of a bucket of DDP)."""
    return None if gradient is None or gradient._is_view() else ref(gradient)


def _is_same(gradient: torch.Tensor | None, mark: ref[torch.Tensor] | None) -> bool:
    return gradient is not None and (mark is None or mark() is gradient)
