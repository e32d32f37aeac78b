"""Rehearsals: whole steps that a newcomer does alone, until its wrappers have come as far as those of the others.

In: the models, the turns and steps that this process does. Out: whether to rehearse once more, and how far every
DistributedDataParallel has come, for the plan of a recovery to compare: one lays its buckets out anew, with a
collective, in the second forward that is trained, and ranks of which only some have done that wait for ever.

Known limit: a model that is trained so rarely that the rehearsals do not reach it differs from those of the survivors;
then all workers start again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from p2pstate.groups.uncompiled import uncompiled
from p2pstate.plan_recovery import WRAPPER_CHANGES

__all__ = ["NUM_STEPS", "Rehearsals"]

NUM_STEPS = 2  # DistributedDataParallel is settled after two; a round before the next step asks for as many
MAX_STEPS = 8  # where some models are not trained in every step
MAX_TURNS = 1000  # for a loop whose rehearsals never come to an optimizer.step()

NEW, CHANGING, SETTLED = 0, WRAPPER_CHANGES, 2


class Rehearsals:
    """``num_steps``: whole steps that this process has done, alone or with the others."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.num_steps = 0
        self._num_turns = 0
        self._modules = [m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)]
        self._trained: set[int] = set()
        for module in self._modules:
            module.register_forward_pre_hook(self._before_forward)

    def begin_loop(self) -> None:
        """What stopped the rehearsals of the loop before may not be there in this one."""
        self._num_turns = 0

    def go_on(self) -> bool:
        """Whether to do one more turn alone; counts it."""
        self._num_turns += 1
        enough = self.num_steps >= NUM_STEPS and set(self.stages()) <= {SETTLED}
        return not enough and self.num_steps < MAX_STEPS and self._num_turns <= MAX_TURNS

    def end(self) -> None:
        """There is nothing more to rehearse with."""
        self._num_turns = MAX_TURNS

    def stages(self) -> bytes:
        """How far each DistributedDataParallel has come: NEW, CHANGING (its layout, soon) or SETTLED."""
        return bytes(map(self._stage, self._modules))

    def _stage(self, module: DistributedDataParallel) -> int:
        stays = module.find_unused_parameters and not module.static_graph
        if stays or module._has_rebuilt_buckets:
            return SETTLED
        return CHANGING if id(module) in self._trained else NEW

    @uncompiled
    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        if torch.is_grad_enabled() and module.require_backward_grad_sync:
            self._trained.add(id(module))
