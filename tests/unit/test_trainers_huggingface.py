"""integrations/huggingface.py and accelerate.py: what is refused by name, what is remembered, where data ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from p2pstate.data import Loader
from p2pstate.errors import ConfigError

pytestmark = [pytest.mark.trainers, pytest.mark.usefixtures("gloo")]
transformers = pytest.importorskip("transformers")

SAMPLES = torch.utils.data.TensorDataset(torch.arange(10.0))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


def make_trainer(folder: Path, *, callbacks: Any = (), **settings: Any) -> Any:
    from p2pstate.integrations.huggingface import ReplicatedTrainer

    args = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **settings)
    return ReplicatedTrainer(Model(), args, train_dataset=SAMPLES, eval_dataset=SAMPLES, callbacks=list(callbacks))


def test_evaluation_before_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval_on_start"):
        make_trainer(tmp_path, eval_on_start=True, eval_strategy="steps")


def test_data_set_without_indices_is_refused(tmp_path: Path) -> None:
    from p2pstate.integrations.huggingface import ReplicatedTrainer

    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.arange(10.0)

    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    with pytest.raises(ConfigError, match="IterableDataset"):
        ReplicatedTrainer(Model(), args, train_dataset=Endless())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"accelerator_config": {"even_batches": False}}, "even_batches"),
    ],
)
def test_setting_that_chooses_other_batches_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_trainer(tmp_path, **settings)


def test_ranks_that_would_train_apart_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # as a Trainer of Lightning leaves it behind
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)  # a process group of two, in which Accelerate sees one
    with pytest.raises(ConfigError, match=r"rank 0 of 1, but it is rank 0 of 2.*use_cpu=True"):
        make_trainer(tmp_path)


def test_data_in_order_comes_in_order(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_sampling_strategy="sequential", per_device_train_batch_size=4)
    trainer.data_collator = lambda samples: torch.stack([x for (x,) in samples])
    delivered = [batch.tolist() for batch in trainer.get_train_dataloader()]
    assert delivered[:2] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]


def test_loader_of_the_users_without_a_position_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(SAMPLES)
    with pytest.raises(ConfigError, match=r"a DataLoader\w*, has no position"):
        trainer.train()


def test_resume_from_a_checkpoint_of_the_trainers_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_strategy="no")
    torch.save(trainer.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint.*goes on by itself"):
        trainer._run_epoch(trainer.model, 0, None, 1, 1, 0.0, resume_from_checkpoint=str(tmp_path))


def test_training_in_a_process_that_p2pstate_has_not_started_says_how_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="p2prun --nproc-per-node"):
        make_trainer(tmp_path, save_strategy="no").train()


def test_groups_of_batches_end_with_an_epoch_and_when_training_is_over() -> None:
    from p2pstate.integrations.huggingface import _Groups

    sizes: list[int] = []
    groups = _Groups(Loader(SAMPLES, batch_size=2, num_workers=0), 2, lambda: len(sizes) == 5)
    for group in groups:
        sizes.append(len(group))
    assert sizes == [2, 2, 1, 2, 2]


def test_progress_goes_over_to_a_trainer_that_knows_nothing_yet(tmp_path: Path) -> None:
    from p2pstate.integrations.huggingface import _Progress

    settings = {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5, "load_best_model_at_end": True}
    old, new = (make_trainer(tmp_path, callbacks=[transformers.EarlyStoppingCallback(3)], **settings) for _ in "ab")
    for trainer in (old, new):
        trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = torch.zeros(()), 0.0, 0
    old.state.global_step, old.state.best_metric, old.state.best_model_checkpoint = 7, 0.5, "checkpoint-5"
    old.control.should_training_stop = True
    old._tr_loss += 2.5
    old._globalstep_last_logged = 5
    (stopping,) = [each for each in old.callback_handler.callbacks if hasattr(each, "early_stopping_patience")]
    stopping.early_stopping_patience_counter = 2
    _Progress(new).load_state_dict(_Progress(old).state_dict())
    assert _Progress(new).state_dict() == _Progress(old).state_dict()
    (restored,) = [each for each in new.callback_handler.callbacks if hasattr(each, "early_stopping_patience")]
    assert restored.early_stopping_patience_counter == 2
    assert (new.state.best_model_checkpoint, new.control.should_training_stop) == ("checkpoint-5", True)


def test_evaluation_that_was_interrupted_at_its_last_batch_does_not_end_accumulation() -> None:
    from accelerate import Accelerator

    from p2pstate.integrations.accelerate import _Accumulation

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    loader = accelerator.prepare(torch.utils.data.DataLoader(SAMPLES, batch_size=10))
    accumulation = _Accumulation(accelerator)
    version = accumulation.state_dict()
    evaluation = iter(loader)
    next(evaluation)
    assert accelerator.gradient_state.end_of_dataloader
    accumulation.load_state_dict(version)
    with accelerator.accumulate():
        assert not accelerator.sync_gradients
