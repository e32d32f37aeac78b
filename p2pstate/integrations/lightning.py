"""Lightning's Trainer with its steps in a Replicator: survivors stay in place, replaced ranks join in mid-epoch.

In: a ``lightning.Trainer`` with the callback :class:`Replicate`, in a process that p2pstate started. Out: the same
``trainer.fit``, bit for bit, whatever process or node dies. Call ``p2pstate.init_process_group()`` before ``Trainer``.

Lightning keeps the module's and the callbacks' hooks, optimization (automatic or manual), accumulation, validation and
logging. One batch is one block of the Replicator. What Lightning does between batches (validation, the end of an epoch
and the beginning of the next) is a hook of the Replicator: after a fault all ranks, newcomers included, do it again
from the version that they resume. Besides model, optimizers and schedulers the state has the loops' progress, the
callbacks' ``state_dict`` and modules, metrics that are accumulating, and what early stopping decided.

Limits: one training loader with a length and a position (``state_dict``), all of its batches; no ``ckpt_path`` for
``fit``, no ``FSDPStrategy``, no time-based validation, validation only where an optimizer steps. Lines that loggers
have written for a step that a fault takes back come again. What the module or a callback keeps outside of its
``state_dict`` is not part of the state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning import __version__ as lightning_version
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loops import _FitLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer import call
from torch import nn
from torchmetrics import Metric

from p2pstate.durable.catalog import damaged_files, list_checkpoints
from p2pstate.durable.export import read_weights
from p2pstate.durable.remote import open_storage
from p2pstate.errors import ConfigError
from p2pstate.replicator import Replicator
from p2pstate.state import rng as random_streams

__all__ = ["Replicate", "ReplicatedCheckpointIO"]


_END_OF_PASS = object()
SAVED_LAST = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")  # of ModelCheckpoint


class Replicate(Callback):
    """A callback for ``Trainer(callbacks=[...])``. Takes the keyword arguments of ``p2pstate.Replicator``.

    ``replicator`` is the Replicator once training has begun. ``trainer.fit`` raises ConfigError for settings that
    cannot be protected, naming them.
    """

    def __init__(self, **replicator: Any) -> None:
        self.settings = replicator
        self.replicator: Replicator | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lightning calls this before it sets up data and model: take over the loop of ``fit``."""
        if stage == "fit" and isinstance(trainer.strategy, FSDPStrategy):
            raise ConfigError(
                "FSDPStrategy cannot be protected: it is FSDP1, which needs cards and has not been tried here; shard "
                "with FSDP2: Trainer(strategy=ModelParallelStrategy()), and fully_shard in configure_model"
            )
        if stage == "fit" and any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
            raise ConfigError(
                "StochasticWeightAveraging cannot be protected: it takes the place of the schedulers while it trains; "
                "WeightAveraging and EMAWeightAveraging can"
            )
        if stage == "fit" and not isinstance(trainer.fit_loop, _ReplicatedFitLoop):
            trainer.fit_loop = _ReplicatedFitLoop(trainer, self)


class ReplicatedCheckpointIO(TorchCheckpointIO):
    """A plugin for ``Trainer(plugins=[...])``: ``validate``, ``test`` and ``predict`` take as ``ckpt_path`` what
    ``Replicate(checkpoint=...)`` was given, or one checkpoint in it. Files of Lightning's are read as ever."""

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The weights of the newest complete checkpoint. Raises FileNotFoundError when there is none, OSError when it
        is damaged."""
        folder = os.path.abspath(os.path.expanduser(path))
        if not os.path.isdir(folder):
            return dict(super().load_checkpoint(path, *args, **kwargs))
        place, name = os.path.split(folder)
        candidates = [each for each in list_checkpoints(open_storage(place)) if each.name == name]
        candidates = candidates or list_checkpoints(open_storage(folder))
        complete = [each for each in candidates if not each.problem]
        if not complete:
            reasons = "; ".join(f"{each.name}: {each.problem}" for each in candidates)
            raise FileNotFoundError(f"there is no complete checkpoint of p2pstate's in {path}. {reasons}".rstrip(". "))
        damaged = damaged_files(complete[0])
        if damaged:
            raise OSError(f"the checkpoint {complete[0].path} is damaged: {'; '.join(damaged)}")
        return {
            "state_dict": read_weights(complete[0], every_name=True),
            "global_step": complete[0].step,
            "epoch": 0,
            "pytorch-lightning_version": lightning_version,
        }


class _Delivered(_DataFetcher):
    """Where Lightning's loop gets its batch: the one that the Replicator has delivered for this turn."""

    batch: Any = None

    def __iter__(self) -> _Delivered:
        self.reset()
        return self

    def __next__(self) -> tuple[Any, int, int]:
        return self.batch, 0, 0


class _Batches:
    """The loader's batches, epoch after epoch, until the loop says that training is over."""

    def __init__(self, loop: _ReplicatedFitLoop, loader: Any) -> None:
        self._loop = loop
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        iterator, was_empty = self._pass(), False  # the first one may be: the rest of an epoch that is over
        while not self._loop.has_ended():
            batch = next(iterator, _END_OF_PASS)
            if batch is not _END_OF_PASS:
                was_empty = False
                yield batch
            elif was_empty:
                return
            else:
                iterator, was_empty = self._pass(), True

    def _pass(self) -> Iterator[Any]:
        with random_streams.kept():  # many loaders draw a seed for workers when an iterator is made
            return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        with random_streams.kept():
            return dict(self._loader.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state)


class FitProgress:
    """What Lightning itself knows of a training: how far its loops are, what it has counted, what was decided."""

    def __init__(self, loop: _ReplicatedFitLoop) -> None:
        self._loop = loop

    def state_dict(self) -> dict[str, Any]:
        loop, trainer = self._loop, self._loop.trainer
        logs = trainer._logger_connector
        return {
            "loops": loop.state_dict(),
            "is_over": loop.is_over,
            "should_stop": trainer.should_stop,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "callbacks": call._call_callbacks_state_dict(trainer),
            "saved": [
                {name: vars(each)[name] for name in SAVED_LAST if name in vars(each)}
                for each in trainer.checkpoint_callbacks
            ],
            "logged_by": [logs._first_loop_iter, logs._current_fx],
            "callback_metrics": dict(logs._callback_metrics),
            "metrics": {name: _metric_state(metric) for name, metric in self._metrics().items()},
            "num_validated": dict(loop.epoch_loop.val_loop._seen_batches_per_dataloader),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loop, trainer = self._loop, self._loop.trainer
        loop.load_state_dict(dict(state["loops"]))
        for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            each.on_iteration_done()  # this is not Lightning's way to go on at a checkpoint: the loop is at this point
        loop.is_over = state["is_over"]
        trainer.should_stop = state["should_stop"]
        trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
        for each, saved in zip(trainer.checkpoint_callbacks, state["saved"], strict=True):
            vars(each).update(saved)  # ranks that differ in what they have saved do not save together
        logs = trainer._logger_connector
        logs._first_loop_iter, logs._current_fx = state["logged_by"]
        logs._callback_metrics = dict(state["callback_metrics"])
        for name, metric in self._metrics().items():
            if name in state["metrics"]:
                _restore_metric(metric, state["metrics"][name])
            else:
                metric.reset()
        validation = loop.epoch_loop.val_loop
        validation._results.reset(metrics=False)  # averages of a validation that a fault has interrupted
        validation._seen_batches_per_dataloader.clear()
        validation._seen_batches_per_dataloader.update(state["num_validated"])

    def _metrics(self) -> dict[str, Metric]:
        """Those of the module and of callbacks, and those in which Lightning averages what is logged."""
        module: Any = self._loop.trainer.lightning_module
        found = {f"module.{name}": m for name, m in module.named_modules() if isinstance(m, Metric)}
        found |= {name: m for name, m in _modules_of_callbacks(self._loop.trainer) if isinstance(m, Metric)}
        results = self._loop.epoch_loop._results
        return found | {f"log.{key}": metric for key, metric in results.items() if metric.is_tensor}


def _modules_of_callbacks(trainer: Trainer) -> list[tuple[str, nn.Module]]:
    """What callbacks keep besides their ``state_dict`` and is no part of the module: averaged weights, for example."""
    known = set(trainer.lightning_module.modules()) | {trainer.model}
    return [
        (f"callback{index}.{name}", value)
        for index, callback in enumerate(trainer.callbacks)
        for name, value in vars(callback).items()
        if isinstance(value, nn.Module) and value not in known
    ]


def _metric_state(metric: Metric) -> dict[str, Any]:
    values = {name: getattr(metric, name) for name in metric._defaults}
    return {"values": values, "num_updates": metric._update_count, "has_reset": getattr(metric, "has_reset", None)}


def _restore_metric(metric: Metric, state: Mapping[str, Any]) -> None:
    for name, value in state["values"].items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = state["num_updates"], None
    if state["has_reset"] is not None:
        metric.has_reset = state["has_reset"]


class _ReplicatedFitLoop(_FitLoop):
    """Lightning's loop over epochs, turned inside out: the Replicator gives batches, and epochs end between them."""

    def __init__(self, trainer: Trainer, callback: Replicate) -> None:
        super().__init__(trainer)
        self.__dict__.update(vars(trainer.fit_loop))  # its limits, data and inner loops
        self._callback = callback
        self.is_over = False

    def has_ended(self) -> bool:
        """Whether Lightning wants no further batch."""
        return self.is_over

    def setup_data(self) -> None:
        """As Lightning's, but the loader stays what it is: it divides the data among the ranks by itself."""
        if self._combined_loader is not None:
            return
        connector = self.trainer._accelerator_connector
        distribute, connector.use_distributed_sampler = connector.use_distributed_sampler, False
        try:
            super().setup_data()
        finally:
            connector.use_distributed_sampler = distribute

    def run(self) -> None:
        if self._loaded_from_state_dict:
            raise ConfigError(
                "fit(ckpt_path=...) cannot be protected: load the weights with load_from_checkpoint, and keep "
                "checkpoints that a next start goes on from with Replicate(checkpoint=DIR)"
            )
        self.setup_data()
        if self.skip:
            return
        loader = self._checked_loader()
        assert self._combined_loader is not None
        self._data_fetcher = self._delivered = _Delivered()
        self._delivered.setup(self._combined_loader)
        self.trainer._signal_connector.teardown()  # its handler uses a collective; signals are the Replicator's
        self.is_over = False
        self.reset()
        self.on_run_start()
        self._begin_epoch()
        replicator = self._callback.replicator = self._protect(loader)
        for batch in replicator.batches():
            with replicator.step(), self._quiet(replicator.rehearsing):
                self._train_on(batch)
        self.on_run_end()

    def _protect(self, loader: Any) -> Replicator:
        trainer = self.trainer
        components = [trainer.model, *trainer.optimizers, *(each.scheduler for each in trainer.lr_scheduler_configs)]
        components += [module for _, module in _modules_of_callbacks(trainer) if not isinstance(module, Metric)]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            components.append(scaler)
        replicator = Replicator(*components, FitProgress(self), data=_Batches(self, loader), **self._callback.settings)
        replicator.every(1, self._between)
        return replicator

    def _train_on(self, batch: Any) -> None:
        """One batch, as Lightning trains on it."""
        progress = self.epoch_loop.batch_progress.current
        self.trainer.lightning_module._current_fx_name = None  # where a discarded step has left it
        self._delivered.batch, self._delivered.done = batch, progress.ready + 1 >= self.max_batches
        try:
            self.epoch_loop.advance(self._delivered)
        except StopIteration:
            raise ConfigError(
                "on_train_batch_start returned -1, which skips the rest of an epoch: p2pstate trains on all batches"
            ) from None
        finally:
            self._delivered.batch = None

    def _between(self, step: int) -> None:
        """Between two steps, on all ranks: what Lightning does after a batch, and at an epoch's end."""
        try:
            self.epoch_loop.on_advance_end(self._delivered)
            self.epoch_loop.on_iteration_done()
            if not self.epoch_loop.done:
                return
            self.on_advance_end()
            self.on_iteration_done()
            self.is_over = self.done
            if not self.is_over:
                self._begin_epoch()
        finally:
            self.trainer.training = True  # not validating, if a fault has interrupted it

    def _begin_epoch(self) -> None:
        self.on_advance_start()
        self.epoch_loop.reset()
        self.epoch_loop.on_run_start(self._delivered)

    @contextmanager
    def _quiet(self, rehearsing: bool) -> Iterator[None]:
        """In a rehearsal nobody else sees anything."""
        trainer = self.trainer
        callbacks, loggers = trainer.callbacks, trainer.loggers
        if rehearsing:
            trainer.callbacks, trainer.loggers = [], []
        try:
            yield
        finally:
            trainer.callbacks, trainer.loggers = callbacks, loggers

    def _checked_loader(self) -> Any:
        """The loader for training. Raises ConfigError for what cannot be protected."""
        trainer, combined = self.trainer, self._combined_loader
        assert combined is not None
        loader = combined.flattened[0]
        ranks = (trainer.global_rank, trainer.world_size)
        accumulates = trainer.accumulate_grad_batches > 1
        val_batches = trainer.val_check_batch if trainer.enable_validation else None
        problem = ""
        if not dist.is_initialized() or ranks != (dist.get_rank(), dist.get_world_size()):
            problem = (
                f"Trainer takes this process for rank {ranks[0]} of {ranks[1]}, which it is not: call "
                'p2pstate.init_process_group() before Trainer(strategy="ddp", devices=<processes per node>, '
                "num_nodes=<nodes>)"
            )
        elif combined.iterables is not loader or isinstance(self._data_fetcher, _DataLoaderIterDataFetcher):
            problem = "give one training loader, and a training_step that takes a batch"
        elif not all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")):
            problem = (
                f"the training loader, a {type(loader).__name__}, has no position that could be saved "
                "(state_dict, load_state_dict): give a p2pstate.data.Loader"
            )
        elif self.max_batches == float("inf") or self.max_batches != len(loader):
            problem = "the training loader has to have a length, and limit_train_batches and overfit_batches none"
        elif trainer.reload_dataloaders_every_n_epochs:
            problem = "reload_dataloaders_every_n_epochs would lose the position in the data: give 0"
        elif trainer.enable_validation and trainer._val_check_time_interval is not None:
            problem = "val_check_interval as a time differs from rank to rank: give a number of batches, or a fraction"
        elif (
            accumulates
            and val_batches is not None
            and (
                trainer.check_val_every_n_epoch is None
                or (val_batches < self.max_batches and val_batches % trainer.accumulate_grad_batches)
            )
        ):
            problem = (
                f"validation every {val_batches} batches would come between the batches of one optimizer step: give a "
                f"multiple of accumulate_grad_batches={trainer.accumulate_grad_batches}, and check_val_every_n_epoch"
            )
        if problem:
            raise ConfigError(f"Lightning's Trainer cannot be protected like this: {problem}")
        return loader
