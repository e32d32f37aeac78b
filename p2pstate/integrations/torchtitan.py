"""torchtitan's checkpoint manager, over a Replicator: survivors stay in place in torchtitan's own loop.

In: what ``torchtitan.trainer.Trainer`` gives its checkpoint manager, in a process that p2pstate started. Out: ``load``
and ``save`` as its loop calls them. From one call to the next lies one step of the Replicator: ``load`` and ``save``
begin it, the next ``save`` ends it and, after a fault, returns with everything at an earlier step, torchtitan's counter
included, from where its loop goes on.

Invariants: a step that is discarded runs to its ``save`` on values that count for nothing; iterating over the data
draws no random number, and goes on at the position that was restored.
Limits: a first step that is rehearsed is logged like any other. A validation that a fault interrupts is not done again;
it must not draw random numbers. Loading other checkpoints (``initial_load_path``, ``load_step``) and saving at the end
in other forms (``last_save_in_hf``) are refused: see ``p2pstate export``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.components.checkpointer.base import BaseCheckpointManager

from p2pstate.block import StepBlock
from p2pstate.errors import ConfigError, StepDiscarded
from p2pstate.replicator import Replicator
from p2pstate.state import rng as random_streams
from p2pstate.worker.context import current

__all__ = ["ReplicatedCheckpointManager"]


class ReplicatedCheckpointManager(BaseCheckpointManager):
    """Give ``ReplicatedCheckpointManager.Config(enable=True)`` as ``checkpoint`` of torchtitan's configuration."""

    save_future: ClassVar[None] = None  # nothing that torchtitan would have to wait for

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Of the common settings ``folder``, ``interval`` and ``keep_latest_k`` count where ``on_disk`` is set."""

        on_disk: bool = False
        """Whether checkpoints are also written to disk; needs p2prun"""

        copies: int = 1
        """How many copies of each rank's shard there are besides the own node's"""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        _check(config, states)
        trainer = states["train_state"]
        self._data = trainer.dataloader = _Rewound(dataloader)
        self._turns_left = _Turns()
        self._optimizers, self._stock_step = optimizers, optimizers.step
        self._components = [*model_parts, *optimizers, lr_schedulers, *states.values(), self._data]
        self._settings: dict[str, Any] = {"copies": config.copies}
        if config.on_disk:
            self._settings["checkpoint"] = f"{base_folder}/{config.folder}" if base_folder else config.folder
            self._settings |= {"checkpoint_every": config.interval, "checkpoint_keep": config.keep_latest_k}
        self._turns: Iterator[Any] | None = None
        self._block: StepBlock | None = None
        self._discarded: StepDiscarded | None = None
        self.replicator: Replicator | None = None

    def _load(self, step: int = -1) -> bool:
        """Called once, before the loop: begin the first step. Whether there was something to go on from is known
        later: a process that joins or resumes has everything restored at the end of a step that it rehearses."""
        if step != -1:
            raise ConfigError(f"checkpoint.load_step={step}: a run goes on from the newest step that is whole; give -1")
        self._optimizers.step = self._step
        self.replicator = Replicator(*self._components, data=self._turns_left, **self._settings)
        self._turns = self.replicator.batches()
        self._begin()
        return False

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Called at the end of every step: protect it, or, after a fault, go back. True if the step counts."""
        block = self._end()
        self._turns_left.over = last_step and block.committed
        self._begin()
        return block.committed

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """In place of ``optimizers.step``: a step that is discarded here runs on to its end in torchtitan's loop."""
        try:
            return self._stock_step(*args, **kwargs)
        except StepDiscarded as discarded:
            self._discarded = discarded
            return None

    def _begin(self) -> None:
        assert self.replicator is not None
        assert self._turns is not None
        for _ in self._turns:
            block = self.replicator.step()
            block.runs_to_its_end = True
            self._block = block.__enter__()
            return
        self._turns = None  # training has ended on all ranks

    def _end(self) -> StepBlock:
        block, discarded = self._block, self._discarded
        assert block is not None
        self._block = self._discarded = None
        block.__exit__(None if discarded is None else type(discarded), discarded, None)
        return block

    def _close(self) -> None:
        if self._turns is None:
            return
        if sys.exc_info()[1] is not None:  # torchtitan closes what an exception has left
            current().failing = True
            return
        self._turns_left.over = True  # the data has ended in the middle of a step
        self._end()
        self._begin()
        if self._turns is not None:
            raise ConfigError("other ranks still have data: give all the same number of batches")

    def _maybe_wait_for_staging(self) -> None:
        """A step's state is copied before the next one begins."""

    def _wait_for_saving(self) -> None:
        """Checkpoints on disk are written by a process of their own."""


class _Turns:
    """The Replicator's data: nothing, as often as there are steps. What is trained on is torchtitan's to fetch."""

    over = False

    def __iter__(self) -> Iterator[None]:
        while not self.over:
            yield None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.over = False


class _Rewound:
    """A loader; an iteration over it goes on at a position that is loaded meanwhile."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._num_loads = 0

    def __iter__(self) -> Iterator[Any]:
        at_load = -1
        while True:
            if at_load != self._num_loads:
                at_load = self._num_loads
                with random_streams.kept():  # many loaders draw a seed for workers when an iterator is made
                    iterator = iter(self._loader)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        with random_streams.kept():
            return dict(self._loader.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(dict(state))
        self._num_loads += 1


def _check(config: ReplicatedCheckpointManager.Config, states: Mapping[str, Any]) -> None:
    refused = {
        "initial_load_path": config.initial_load_path,
        "last_save_in_hf": config.last_save_in_hf,
        "load_only": config.load_only,
        "create_seed_checkpoint": config.create_seed_checkpoint,
        "exclude_from_loading": config.exclude_from_loading,
    }
    given = [name for name, value in refused.items() if value]
    if given:
        raise ConfigError(
            f"checkpoint.{given[0]} means nothing here: state comes from the other nodes' memory, and from folders of "
            "PyTorch's distributed checkpoint format with on_disk (weights for other programs: p2pstate export)"
        )
    if not hasattr(states.get("train_state"), "dataloader"):
        raise ConfigError("states['train_state'] is torchtitan's Trainer, whose dataloader is read from now on")
