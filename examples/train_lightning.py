"""Trains a small language model with PyTorch Lightning's Trainer, and survives: run it under p2prun (docs/trainers.md).

Batches are accumulated, every epoch ends with a validation, and early stopping and a checkpoint callback watch it. What
it leaves in --out is for comparing runs (outcome.py).
"""

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import p2pstate
from counting_data import Counting
from gpt import GPT, GPTConfig
from outcome import save_final_state
from p2pstate.data import Loader, Sampler, Shuffled
from p2pstate.integrations.lightning import Replicate


class Language(lightning.LightningModule):
    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.model = GPT(GPTConfig(num_layers=2, width=32, context=23))
        self.to_be_sharded = sharded

    def configure_model(self) -> None:
        if self.to_be_sharded:
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
        self.to_be_sharded = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(batch["input_ids"])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(batch["input_ids"]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}

    def train_dataloader(self) -> Loader:
        data = Counting(64, 24)
        ranks = {"rank": dist.get_rank(), "num_ranks": dist.get_world_size()}
        return Loader(data, batch_sampler=Sampler(Shuffled(len(data), seed=1), batch_size=4, **ranks), num_workers=1)

    def val_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(Counting(160, 24), batch_size=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True, help="folder for the final state")
    parser.add_argument(
        "--sharded", action="store_true", help="FSDP2 (Lightning's ModelParallelStrategy) instead of DDP"
    )
    args = parser.parse_args()

    p2pstate.init_process_group()  # before Trainer, which would make another one
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_local = int(os.environ["LOCAL_WORLD_SIZE"])
    lightning.seed_everything(1, verbose=False)  # the same weights everywhere
    model = Language(args.sharded)
    lightning.seed_everything(1000 + rank, verbose=False)  # dropout differs from rank to rank

    stopping = EarlyStopping("val_loss", patience=100)
    best = ModelCheckpoint(args.out / "lightning", monitor="val_loss", save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=ModelParallelStrategy(num_ranks, 1) if args.sharded else "ddp",
        devices=num_local,
        num_nodes=num_ranks // num_local,
        max_steps=args.steps,
        accumulate_grad_batches=2,
        log_every_n_steps=10,
        callbacks=[Replicate(), stopping, best],
        default_root_dir=args.out,
        enable_progress_bar=False,
    )
    trainer.fit(model)

    scores = {f"score{n}": value for n, (_, value) in enumerate(sorted(best.best_k_models.items()))}
    found = {**scores, **trainer.callback_metrics}
    averages = nn.ParameterDict({name: value.float() for name, value in sorted(found.items())})
    optimizer = trainer.optimizers[0]
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    save_final_state(args.out, rank, nn.ModuleList([model, averages]), optimizer, scheduler)
    if rank == 0:
        print(f"{trainer.global_step} steps, epoch {trainer.current_epoch}, best {stopping.best_score}", flush=True)


if __name__ == "__main__":
    main()
