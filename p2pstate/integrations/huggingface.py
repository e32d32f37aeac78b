"""Hugging Face's Trainer with its steps in a Replicator: survivors stay in place, replaced ranks join in mid-epoch.

In: what ``transformers.Trainer`` takes, in a process that p2pstate started. Out: the same training, bit for bit,
whatever process or node dies. Call ``p2pstate.init_process_group()`` before ``TrainingArguments(...)``.

The Trainer keeps model, optimizer, scheduler, gradient accumulation, clipping, logging and callbacks. Batches come from
a p2pstate loader over ``train_dataset``, because their position has to be part of the state.

Limits: transformers 5, map-style data sets, ``save_strategy="no"`` (keep checkpoints with ``replicator={"checkpoint":
DIR}``), no DeepSpeed, no loss averaging over ranks: each rank logs its own loss. An evaluation that a fault interrupts,
or takes back, is done again on all ranks. What callbacks remember is not part of the state: a replaced rank's callbacks
begin anew, and its ``log_history`` with the step it joined at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers

from p2pstate.data import Loader, Sampler, Shuffled
from p2pstate.errors import ConfigError
from p2pstate.integrations.accelerate import check, replicate
from p2pstate.replicator import Replicator

__all__ = ["ReplicatedTrainer"]


class _Groups:
    """Micro-batches of one optimizer step together, epoch after epoch; an epoch's last group may be smaller."""

    def __init__(self, loader: Loader, group_size: int) -> None:
        self._loader = loader
        self._group_size = group_size
        self._num_per_epoch = len(loader)
        self._num_delivered = 0

    def __iter__(self) -> Iterator[list[Any]]:
        while True:
            group: list[Any] = []
            for batch in self._loader:  # the rest of an epoch
                group.append(batch)
                self._num_delivered += 1
                in_epoch = self._num_delivered % self._num_per_epoch
                if in_epoch % self._group_size == 0:
                    yield group
                    group = []

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict(), "num_delivered": self._num_delivered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state["loader"])
        self._num_delivered = state["num_delivered"]


class ReplicatedTrainer(transformers.Trainer):
    """Takes the arguments of ``transformers.Trainer``, and in ``replicator`` those of ``p2pstate.Replicator`` by name.

    ``trainer.replicator`` is the Replicator once training has begun. Raises ConfigError for settings that cannot be
    protected, naming them.
    """

    def __init__(self, *args: Any, replicator: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(transformers.Trainer, "_run_epoch"):
            raise ConfigError(f"transformers {transformers.__version__} is too old: version 5 or newer is needed")
        if self.args.save_strategy != "no" or self.args.eval_on_start:
            raise ConfigError(
                "a rank that joins later cannot take part in what save_strategy and eval_on_start make all ranks do "
                'together. Give save_strategy="no" and eval_on_start=False; keep checkpoints with '
                'replicator={"checkpoint": DIR}'
            )
        check(self.accelerator)
        if isinstance(self.train_dataset, torch.utils.data.IterableDataset):
            raise ConfigError("train_dataset is an IterableDataset: give a data set with a length and indices")
        self.replicator: Replicator | None = None
        self._settings = dict(replicator or {})
        self._steps: Iterator[tuple[int, tuple[torch.Tensor, Any, float]]] = iter(())
        self._unlogged: list[torch.Tensor] = []  # losses of steps since the last log

    def get_train_dataloader(self) -> Loader:
        """Every sample once per epoch, the order a function of the seed; the last batches are filled up."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        sampler = Sampler(
            Shuffled(len(self.train_dataset), seed=seed),
            batch_size=self._train_batch_size,
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            tail="drop" if self.args.dataloader_drop_last else "pad",
        )
        return Loader(
            self.train_dataset,
            batch_sampler=sampler,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
            num_workers=self.args.dataloader_num_workers,
            seed=seed,
        )

    def _run_epoch(
        self,
        model: Any,
        epoch: int,
        train_dataloader: Loader,
        num_update_steps_per_epoch: int,
        start_time: float,
        **others: Any,
    ) -> None:
        """Committed steps up to the end of an epoch: of this one, or, in a rank that joined later, of the run's."""
        if self.replicator is None:
            self._protect(model, train_dataloader, num_update_steps_per_epoch)
        assert self.replicator is not None
        for step, (loss, grad_norm, learning_rate) in self._steps:
            if not self.replicator.replaying:
                self._tr_loss += loss
                self._unlogged.append(loss)
            self.state.global_step = step
            self.state.epoch = step / num_update_steps_per_epoch
            self.control: Any = self.callback_handler.on_step_end(self.args, self.state, self.control)
            if self.control.should_log and self._unlogged:
                logs = {"loss": torch.stack(self._unlogged).mean().item(), "learning_rate": learning_rate}
                if grad_norm is not None:
                    logs["grad_norm"] = float(grad_norm)
                self._unlogged.clear()
                self.log(logs, start_time)
            if self.control.should_training_stop and step < self.state.max_steps:
                self._steps.close()  # type: ignore[attr-defined]
                break
            if step % num_update_steps_per_epoch == 0 and step < self.state.max_steps:
                break
        else:
            self.control.should_training_stop = True
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)

    def _protect(self, model: torch.nn.Module, loader: Loader, num_steps_per_epoch: int) -> None:
        data = _Groups(loader, self.args.gradient_accumulation_steps)
        components = [model, self.optimizer, self.lr_scheduler]
        self.replicator = replicate(self.accelerator, *components, data=data, **self._settings)
        if self.args.eval_strategy != "no":
            by_steps = self.args.eval_strategy == "steps"
            self.replicator.every(int(self.state.eval_steps) if by_steps else num_steps_per_epoch, self._evaluate_at)
        self._steps = self.replicator.run(self._step_on, steps=self.state.max_steps)

    def _evaluate_at(self, step: int) -> None:
        """Between two steps, on all ranks."""
        self.state.global_step = step
        self.evaluate()
        self.model_wrapped.train()

    def _step_on(self, batches: list[Any]) -> tuple[torch.Tensor, Any, float]:
        """One optimizer step on its micro-batches. Returns loss, norm of the gradients and learning rate."""
        model = self.model_wrapped
        num_items = self._get_num_items_in_batch(batches, self.args.device)
        self.current_gradient_accumulation_steps = len(batches)
        loss = torch.zeros_like(self._tr_loss)
        for index, inputs in enumerate(batches):
            last = index == len(batches) - 1
            self.accelerator.gradient_state._set_sync_gradients(last)
            sync: Callable[[], Any] = contextlib.nullcontext if last else lambda: self.accelerator.no_sync(model=model)
            with sync():
                loss += self.training_step(model, inputs, num_items)
        grad_norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        self.optimizer.step()
        learning_rate = self._get_learning_rate()
        if not self.accelerator.optimizer_step_was_skipped:
            self.lr_scheduler.step()
        model.zero_grad()
        return loss, grad_norm, learning_rate
