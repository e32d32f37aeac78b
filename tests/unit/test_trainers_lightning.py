"""integrations/lightning.py: settings that cannot be protected are refused by name; checkpoints are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from durable_site import Site, matrix

from p2pstate.data import Loader
from p2pstate.errors import ConfigError

pytestmark = [pytest.mark.trainers, pytest.mark.usefixtures("gloo")]
lightning = pytest.importorskip("lightning")

SAMPLES = torch.utils.data.TensorDataset(torch.ones(12, 4))


def model() -> Any:
    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).mean()

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("loss", self.net(batch[0]).mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Model()


def fit(loader: Any, folder: Path, *, validate: bool = False, ckpt_path: Path | None = None, **settings: Any) -> None:
    from p2pstate.integrations.lightning import Replicate

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[Replicate()],
        default_root_dir=folder,
        **quiet,
        **settings,
    )
    trainer.fit(model(), loader, loader if validate else None, ckpt_path=ckpt_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"limit_train_batches": 2}, "limit_train_batches"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"accumulate_grad_batches": 2, "val_check_interval": 3, "validate": True}, "accumulate_grad_batches=2"),
        ({"val_check_interval": "00:00:01:00", "validate": True}, "val_check_interval as a time"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fit_with_a_setting_that_cannot_be_protected_is_refused(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        fit(Loader(SAMPLES, num_workers=0), tmp_path, **settings)


def test_fit_with_a_loader_that_has_no_position_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"DataLoader, has no position .*p2pstate\.data\.Loader"):
        fit(torch.utils.data.DataLoader(SAMPLES), tmp_path)


def test_fit_with_several_training_loaders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give one training loader"):
        fit([Loader(SAMPLES, num_workers=0), Loader(SAMPLES, num_workers=0)], tmp_path)


def test_fit_with_fsdp1_is_refused_and_fsdp2_named(tmp_path: Path) -> None:
    class OnCPU(lightning.pytorch.strategies.FSDPStrategy):  # itself begins only where a card is
        pass

    with pytest.raises(ConfigError, match=r"FSDPStrategy .*ModelParallelStrategy"):
        fit(Loader(SAMPLES, num_workers=0), tmp_path, strategy=OnCPU())


def test_fit_from_a_checkpoint_of_lightnings_is_refused(tmp_path: Path) -> None:
    stock = lightning.Trainer(accelerator="cpu", devices=1, max_steps=2, logger=False, default_root_dir=tmp_path)
    stock.fit(model(), torch.utils.data.DataLoader(SAMPLES))
    stock.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.raises(ConfigError, match="ckpt_path"):
        fit(Loader(SAMPLES, num_workers=0), tmp_path, ckpt_path=tmp_path / "two.ckpt")


def test_fit_in_a_process_that_p2pstate_has_not_started_says_how_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="p2prun --nproc-per-node"):
        fit(Loader(SAMPLES, num_workers=0), tmp_path)


def test_checkpoint_io_reads_the_newest_or_the_named_checkpoint_and_files_of_lightnings(tmp_path: Path) -> None:
    from p2pstate.integrations.lightning import ReplicatedCheckpointIO

    reader, site = ReplicatedCheckpointIO(), Site()
    for serial, step in enumerate((10, 20), start=1):
        site.save(tmp_path / "ckpt" / f"{serial:06d}-step{step}", site.capture(step))
    (tmp_path / "ckpt" / "000003-step30").mkdir()
    newest = reader.load_checkpoint(tmp_path / "ckpt")
    assert newest["global_step"] == 20
    assert torch.equal(newest["state_dict"]["w"], matrix(20))
    assert torch.equal(reader.load_checkpoint(tmp_path / "ckpt" / "000001-step10")["state_dict"]["w"], matrix(10))
    reader.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, tmp_path / "lightning.ckpt")
    assert reader.load_checkpoint(tmp_path / "lightning.ckpt")["state_dict"]["w"].tolist() == [1, 1]
    with pytest.raises(FileNotFoundError, match="000003-step30: "):
        reader.load_checkpoint(tmp_path / "ckpt" / "000003-step30")


def test_weights_that_a_callback_averages_and_what_was_saved_last_go_over_to_another_trainer(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
    from torchmetrics import MeanMetric

    from p2pstate.integrations.lightning import FitProgress, Replicate, _modules_of_callbacks

    class Measuring(lightning.Callback):
        def __init__(self) -> None:
            self.mean = MeanMetric()

    def progress() -> tuple[Any, FitProgress]:
        callbacks = [Replicate(), EMAWeightAveraging(), ModelCheckpoint(tmp_path), Measuring()]
        trainer = lightning.Trainer(accelerator="cpu", devices=1, callbacks=callbacks, logger=False)
        trainer.strategy.connect(model())
        for callback in callbacks:
            callback.setup(trainer, trainer.lightning_module, "fit")
        return trainer, FitProgress(trainer.fit_loop)

    (left, told), (right, knows_nothing) = progress(), progress()
    modules = [dict(_modules_of_callbacks(trainer)) for trainer in (left, right)]
    assert [type(each).__name__ for each in modules[0].values()] == ["AveragedModel", "MeanMetric"]
    assert modules[0].keys() == modules[1].keys()
    left.checkpoint_callback._last_global_step_saved = 40
    means = [next(each for each in found.values() if isinstance(each, MeanMetric)) for found in modules]
    means[0].update(3.0)
    knows_nothing.load_state_dict(told.state_dict())
    assert right.checkpoint_callback._last_global_step_saved == 40
    assert means[1].compute() == 3.0


def test_averaging_that_replaces_schedulers_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from p2pstate.integrations.lightning import Replicate

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, callbacks=[Replicate(), StochasticWeightAveraging(0.1)]
    )
    with pytest.raises(ConfigError, match="StochasticWeightAveraging"):
        trainer.fit(model(), Loader(SAMPLES, batch_size=4))
