"""A loop with Hugging Face's Accelerate in a Replicator.

In: what ``accelerator.prepare`` has returned, in a process that p2pstate started. Out: a Replicator of what is behind
it. Call ``p2pstate.init_process_group()`` before ``Accelerator(...)``.

Limits: the loader is not prepared, because its position has to be part of the state: give a ``p2pstate.data.Loader`` as
``data``, with ``device=accelerator.device``. So ``accelerator.accumulate`` does not know where an epoch ends, and goes
on accumulating beyond. No DeepSpeed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType

from p2pstate.errors import ConfigError
from p2pstate.replicator import Replicator

__all__ = ["check", "replicate"]

# Accelerate refuses to begin on CPUs without it, also when the process group is there. Nobody connects to it.
os.environ.setdefault("MASTER_ADDR", "not-used-with-p2pstate")


def check(accelerator: Accelerator) -> None:
    """ConfigError for what cannot be protected."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ConfigError("DeepSpeed keeps training state of its own, which cannot be captured: use DDP or FSDP")
    taken_for = (accelerator.process_index, accelerator.num_processes)
    if dist.is_initialized() and taken_for != (dist.get_rank(), dist.get_world_size()):
        rank = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        raise ConfigError(
            f"Accelerate takes this process for rank {taken_for[0]} of {taken_for[1]}, but it is {rank}: each would "
            "train a model of its own. On CPUs give TrainingArguments(use_cpu=True), or Accelerator(cpu=True); call "
            "p2pstate.init_process_group() before"
        )


def replicate(accelerator: Accelerator, *components: Any, **settings: Any) -> Replicator:
    """A Replicator of prepared and other components; ``settings``: its keyword arguments, ``data`` among them.

    Gradient scaler and accumulation of the accelerator belong to it. Raises ConfigError for DeepSpeed.
    """
    check(accelerator)
    inner = [_without_wrapper(component) for component in components]
    if accelerator.scaler is not None:
        inner.append(accelerator.scaler)
    return Replicator(*inner, _Accumulation(accelerator), **settings)


def _without_wrapper(component: Any) -> Any:
    """Accelerate's wrappers of optimizers and schedulers have no state of their own."""
    if isinstance(component, AcceleratedOptimizer):
        return component.optimizer
    if isinstance(component, AcceleratedScheduler):
        return component.scheduler
    return component


class _Accumulation:
    """How many batches ``accelerator.accumulate`` has counted: it decides by that when the optimizer steps."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._iterated = accelerator.gradient_state.dataloader_references

    def state_dict(self) -> dict[str, int]:
        self._iterated = self._accelerator.gradient_state.dataloader_references
        return {"num_batches": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._accelerator.step = state["num_batches"]
        # An evaluation that a fault has interrupted leaves its loader there, and its end would end accumulation.
        self._accelerator.gradient_state.dataloader_references = self._iterated
