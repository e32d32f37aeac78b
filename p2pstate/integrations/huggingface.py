"""Hugging Face's Trainer with its steps in a Replicator: survivors stay in place, replaced ranks join in mid-epoch.

In: what ``transformers.Trainer`` takes, in a process that p2pstate started. Out: the same training, bit for bit,
whatever process or node dies. Call ``p2pstate.init_process_group()`` before ``TrainingArguments(...)``.

The Trainer keeps model, optimizer, scheduler, gradient accumulation, clipping and callbacks. Batches come from a
p2pstate loader over ``train_dataset``, because their position has to be part of the state. What the Trainer does
between two steps (logs, evaluation, saves, the ends of epochs) is a hook of the Replicator: after a fault all ranks,
newcomers included, do it again from the version that they resume. Part of the state are also losses that are not logged
yet, the best metric and checkpoint so far, what control says, and what callbacks export (``ExportableState``).

Limits: transformers 5, map-style data sets, shuffled or in order, all batches of an epoch, no DeepSpeed; neither
``eval_on_start`` nor ``resume_from_checkpoint``. What callbacks remember and do not export begins anew in a replaced
rank, and its ``log_history`` with the step it joined at. The Trainer's own checkpoints are for other programs: a run
that is started again goes on from ``replicator={"checkpoint": DIR}``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.trainer_callback import ExportableState

from p2pstate.data import Loader, Sampler, Shuffled
from p2pstate.errors import ConfigError
from p2pstate.integrations.accelerate import check, replicate
from p2pstate.replicator import Replicator

__all__ = ["ReplicatedTrainer"]

COUNTED = ("epoch", "global_step", "num_input_tokens_seen", "total_flos")
BY_METRIC = (  # schedulers that the Trainer steps after an evaluation
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    getattr(transformers.optimization, "GreedyLR", torch.optim.lr_scheduler.ReduceLROnPlateau),
)
BEST = ("best_metric", "best_global_step", "best_model_checkpoint")


class _Groups:
    """Micro-batches of one optimizer step together, epoch after epoch; an epoch's last group may be smaller."""

    def __init__(self, loader: Loader, group_size: int, is_over: Callable[[], bool]) -> None:
        self._loader = loader
        self._group_size = group_size
        self._num_per_epoch = len(loader)
        self._num_delivered = 0
        self._is_over = is_over

    def __iter__(self) -> Iterator[list[Any]]:
        while not self._is_over():
            group: list[Any] = []
            for batch in self._loader:  # the rest of an epoch
                group.append(batch)
                self._num_delivered += 1
                in_epoch = self._num_delivered % self._num_per_epoch
                if in_epoch % self._group_size == 0:
                    yield group
                    group = []
                    if self._is_over():
                        return

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict(), "num_delivered": self._num_delivered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state["loader"])
        self._num_delivered = state["num_delivered"]


class _Progress:
    """What the Trainer itself knows of a training, besides its ``log_history``."""

    def __init__(self, trainer: ReplicatedTrainer) -> None:
        self._trainer = trainer
        self._exporting = [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "counted": {name: getattr(trainer.state, name) for name in (*COUNTED, *BEST)},
            "control": vars(trainer.control).copy(),
            "callbacks": [dict(each.state()["attributes"]) for each in self._exporting],
            "loss": trainer._tr_loss,
            "logged_loss": trainer._total_loss_scalar,
            "logged_at": trainer._globalstep_last_logged,
            "flos": float(trainer.current_flos),
            "grad_norm": trainer.grad_norm,
            "learning_rate": trainer.learning_rate,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        for name, value in state["counted"].items():
            setattr(trainer.state, name, value)
        for name, value in state["control"].items():
            setattr(trainer.control, name, value)
        for each, attributes in zip(self._exporting, state["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(each, name, value)
        trainer._tr_loss = state["loss"].to(trainer.args.device)
        trainer._total_loss_scalar = state["logged_loss"]
        trainer._globalstep_last_logged = state["logged_at"]
        trainer.current_flos = state["flos"]
        trainer.grad_norm, trainer.learning_rate = state["grad_norm"], state["learning_rate"]


class ReplicatedTrainer(transformers.Trainer):
    """Takes the arguments of ``transformers.Trainer``, and in ``replicator`` those of ``p2pstate.Replicator`` by name.

    ``trainer.replicator`` is the Replicator once training has begun. Raises ConfigError for settings that cannot be
    protected, naming them.
    """

    def __init__(self, *args: Any, replicator: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(transformers.Trainer, "_run_epoch"):
            raise ConfigError(f"transformers {transformers.__version__} is too old: version 5 or newer is needed")
        if self.args.eval_on_start:
            raise ConfigError(
                "a rank that joins later cannot take part in the evaluation that eval_on_start makes all ranks do "
                "before training: give eval_on_start=False, and call trainer.evaluate() in a process of its own"
            )
        check(self.accelerator)
        _check_data_settings(self.args)
        if isinstance(self.train_dataset, torch.utils.data.IterableDataset):
            raise ConfigError("train_dataset is an IterableDataset: give a data set with a length and indices")
        self.replicator: Replicator | None = None
        self.control: Any
        self.grad_norm: Any = None  # of the newest step
        self.learning_rate: float | None = None
        self._settings = dict(replicator or {})

    def get_train_dataloader(self) -> Loader:
        """Every sample once per epoch, the order a function of the seed; the last batches are filled up."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        sampler = Sampler(
            Shuffled(len(self.train_dataset), seed=seed, shuffle=_strategy(self.args) != "sequential"),
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
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        start_time: float,
        resume_from_checkpoint: Any = None,
        **others: Any,
    ) -> None:
        """All epochs: a rank that joins later begins in a later one."""
        if resume_from_checkpoint is not None:
            raise ConfigError(
                "train(resume_from_checkpoint=...) cannot be protected: a run that is started again goes on by itself "
                'from replicator={"checkpoint": DIR}; the weights of another run are loaded with from_pretrained'
            )
        if not all(callable(getattr(train_dataloader, name, None)) for name in ("state_dict", "load_state_dict")):
            raise ConfigError(
                f"the training loader, a {type(train_dataloader).__name__}, has no position that could be saved "
                "(state_dict, load_state_dict): have get_train_dataloader return a p2pstate.data.Loader"
            )
        self._num_batches_per_epoch, self._num_steps_per_epoch = steps_in_epoch, num_update_steps_per_epoch
        self._start_time = start_time
        data = _Groups(train_dataloader, self.args.gradient_accumulation_steps, self._is_over)
        components = [model, self.optimizer, self.lr_scheduler, _Progress(self)]
        self.replicator = replicate(self.accelerator, *components, data=data, **self._settings)
        self.replicator.every(1, self._between)
        for _ in self.replicator.run(self._step_on, steps=self.state.max_steps):
            pass
        self.control.should_training_stop = True

    def _is_over(self) -> bool:
        return bool(self.control.should_training_stop)

    def _between(self, step: int) -> None:
        """Between two steps, on all ranks: what the Trainer does after a step, and at an epoch's end."""
        epoch, in_epoch = divmod(step, self._num_steps_per_epoch)
        num_batches = in_epoch * self.args.gradient_accumulation_steps
        self.state.global_step = step
        self.state.epoch = epoch + num_batches / self._num_batches_per_epoch
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        self._log_evaluate_and_save()
        if in_epoch == 0 or self._is_over():
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            self._log_evaluate_and_save()
            if not self._is_over():
                self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        elif self.control.should_epoch_stop:
            raise ConfigError(
                "a callback has set control.should_epoch_stop, which skips the rest of an epoch: p2pstate trains on "
                "all batches; set control.should_training_stop to end the training"
            )
        self.model_wrapped.train()

    def _log_evaluate_and_save(self) -> None:
        self._maybe_log_save_evaluate(
            self._tr_loss,
            self.grad_norm,
            self.model_wrapped,
            None,
            self.state.epoch,
            None,
            self._start_time,
            learning_rate=self.learning_rate,
        )

    def _step_on(self, batches: list[Any]) -> torch.Tensor:
        """One optimizer step on its micro-batches. Returns the loss."""
        assert self.replicator is not None
        handler = self.callback_handler
        callbacks = handler.callbacks
        if self.replicator.rehearsing:
            handler.callbacks = []  # nobody else sees anything of it
        try:
            return self._train_on(batches)
        finally:
            handler.callbacks = callbacks

    def _train_on(self, batches: list[Any]) -> torch.Tensor:
        model, handler = self.model_wrapped, self.callback_handler
        num_items = self._get_num_items_in_batch(batches, self.args.device)
        self.current_gradient_accumulation_steps = len(batches)
        total = torch.zeros_like(self._tr_loss)
        self.control = handler.on_step_begin(self.args, self.state, self.control)
        for index, inputs in enumerate(batches):
            last = index == len(batches) - 1
            self.accelerator.gradient_state._set_sync_gradients(last)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model=model):
                loss = self.training_step(model, inputs, num_items)
            total += loss
            if self.args.logging_nan_inf_filter:
                num_unlogged = self.state.global_step - self._globalstep_last_logged
                loss = torch.where(loss.isfinite(), loss, self._tr_loss / (1 + num_unlogged))
            self._tr_loss += loss
            self.current_flos += float(self.floating_point_ops(inputs))
            self._track_num_input_tokens(inputs)
            if not last:
                self.control = handler.on_substep_end(self.args, self.state, self.control)
        norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        norm = self._get_grad_norm(model, grad_norm=norm)
        self.grad_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.control = handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.optimizer.step()
        self.control = handler.on_optimizer_step(self.args, self.state, self.control)
        self.learning_rate = self._get_learning_rate()
        if not (isinstance(self.lr_scheduler, BY_METRIC) or self.accelerator.optimizer_step_was_skipped):
            self.lr_scheduler.step()
        model.zero_grad()
        return total


def _strategy(args: transformers.TrainingArguments) -> str:
    """How the Trainer is to choose batches; transformers before 5.1 has no name for it."""
    by_length = "group_by_length" if getattr(args, "group_by_length", False) else "random"
    return str(getattr(args, "train_sampling_strategy", by_length))


def _check_data_settings(args: transformers.TrainingArguments) -> None:
    """ConfigError for settings that choose batches in a way that is not p2pstate's."""
    refused = {
        _strategy(args): _strategy(args) not in ("random", "sequential"),
        "auto_find_batch_size=True": args.auto_find_batch_size,
        "accelerator_config split_batches=True": args.accelerator_config.split_batches,
        "accelerator_config dispatch_batches=True": args.accelerator_config.dispatch_batches,
        "accelerator_config even_batches=False": not args.accelerator_config.even_batches,
    }
    given = [name for name, is_given in refused.items() if is_given]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: batches come from p2pstate.data, shuffled or in order, of "
            "per_device_train_batch_size samples on each rank, the last ones filled up or dropped "
            "(dataloader_drop_last); leave this setting out, or override get_train_dataloader with a "
            "p2pstate.data.Loader of your own"
        )
