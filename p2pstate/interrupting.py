"""A step that is discarded anyway ends at its next collective, where the model allows it.

In: a block of the training loop, the process's error flag. Out: ``StepDiscarded`` out of the first collective after an
error, instead of a forward and backward that run to their end on echoes; before the next step, wrappers as they were.
What is saved is the rest of a step on every survivor: most of a recovery where steps are long.

Invariants: only before the first vote of a block; only where FSDP2 is all that keeps a state between forward and
backward, and can be reset (torch 2.13); never while torch gathers several calls into one, or in a thread that neither
trains nor runs a backward pass. Everywhere else (DDP, pipelines, loops of others that cannot be left) the step runs on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import nn

from p2pstate.block import StepBlock
from p2pstate.errors import StepDiscarded
from p2pstate.groups.registry import REGISTRY
from p2pstate.groups.status import STATUS
from p2pstate.user_errors import can_be_reset, reset

__all__ = ["NOT_IN_BACKWARD", "Interruption"]

NOT_IN_BACKWARD = -1  # of torch._C._current_graph_task_id


class Interruption:
    """Of the steps of one Replicator; used by its loop."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._block: StepBlock | None = None
        self._interrupted = False

    def begin(self, block: StepBlock) -> None:
        self._block = block
        STATUS.on_echo = self._leave

    def end(self) -> None:
        self._block = None

    def mend(self) -> None:
        """After an interrupted step: bring the wrappers back to where a step begins. Call it when collectives echo."""
        if self._interrupted:
            reset(self._models)
        self._interrupted = False

    def _leave(self) -> None:
        """A collective echoes, for there is an error. Raises StepDiscarded where nothing is harmed by it."""
        block = self._block
        if block is None or block.runs_to_its_end or block.num_gates:
            return
        in_backward = torch._C._current_graph_task_id() != NOT_IN_BACKWARD  # on a card in a thread of its own
        if not in_backward and threading.current_thread() is not threading.main_thread():
            return
        if any(group.carries_messages for group in REGISTRY.groups) or not can_be_reset(self._models):
            return
        self._interrupted = True
        raise StepDiscarded
