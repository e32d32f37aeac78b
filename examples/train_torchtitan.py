"""Trains a small language model with torchtitan's parts, and survives: run it under p2prun (docs/trainers.md).

torchtitan's Trainer needs a card to begin. This has its loop, with the calls of its checkpoint manager in their places
(torchtitan 0.3.0, trainer.py), and its optimizers, schedulers and loader; on CPUs. What it leaves in --out is for
comparing runs (outcome.py).
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.dataloader import DataloaderExhaustedError, ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from counting_data import Counting
from gpt import GPT, GPTConfig
from outcome import save_final_state
from p2pstate.integrations.torchtitan import ReplicatedCheckpointManager

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Endless(torch.utils.data.IterableDataset[Batch]):
    """This rank's samples, again and again, from a position that torchtitan's loader saves."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._samples, self._rank, self._num_ranks, self._position = Counting(96, 24), rank, num_ranks, 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            tokens = self._samples[(self._position * self._num_ranks + self._rank) % len(self._samples)]["input_ids"]
            self._position += 1
            yield {"input": tokens}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]


class Trainer:
    """torchtitan.trainer.Trainer as far as it needs no card: its construction and loop, in its order."""

    def __init__(self, steps: int, num_microbatches: int) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)  # the same weights everywhere
        model = GPT(GPTConfig(num_layers=2, width=32, context=23))
        for block in model.blocks:
            fully_shard(block)
        self.model_parts: list[Any] = [fully_shard(model)]
        for seed in (random.seed, np.random.seed, torch.manual_seed):  # dropout differs from rank to rank
            seed(1000 + rank)
        adamw = default_adamw(lr=2e-3)
        adamw.implementation = "for-loop"
        self.optimizers = adamw.build(model_parts=self.model_parts)
        schedule = LRSchedulersContainer.Config(warmup_steps=10)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=steps)
        self.steps, self.num_microbatches = steps, num_microbatches
        self.step = self.ntokens_seen = 0
        self.dataloader: Any = ParallelAwareDataloader(Endless(rank, num_ranks), rank, num_ranks, batch_size=4)
        self.checkpointer = ReplicatedCheckpointManager.Config(enable=True).build(
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder="",
        )

    def batch_generator(self, data_iterable: Any) -> Iterator[Batch]:
        data_iterator = iter(data_iterable)
        while True:
            try:
                batch = next(data_iterator)
            except StopIteration as error:
                raise DataloaderExhaustedError from error
            self.ntokens_seen += batch[1].numel()
            yield batch

    def train_step(self, data_iterator: Iterator[Batch]) -> torch.Tensor:
        self.optimizers.zero_grad(set_to_none=False)
        microbatches = [next(data_iterator) for _ in range(self.num_microbatches)]
        num_tokens = torch.tensor(sum(labels.numel() for _, labels in microbatches))
        dist.all_reduce(num_tokens)
        total = torch.zeros(())
        for inputs, labels in microbatches:
            loss = self.model_parts[0](inputs["input"]) * labels.numel() / num_tokens
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model_parts[0].parameters(), 1.0)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        dist.all_reduce(total)  # for the log
        return total

    def train(self) -> None:
        self.checkpointer.load(step=-1)
        data_iterator = self.batch_generator(self.dataloader)
        while self.step < self.steps:
            self.step += 1
            try:
                loss = self.train_step(data_iterator)
            except DataloaderExhaustedError:
                break
            self.checkpointer.save(self.step, last_step=self.step == self.steps)
            if dist.get_rank() == 0 and self.step % 10 == 0:
                print(f"step {self.step} loss {loss.item():.4f}", flush=True)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True, help="folder for the final state")
    args = parser.parse_args()

    dist.init_process_group()  # as torchtitan does it; under p2prun these are p2pstate's groups
    trainer = Trainer(args.steps, num_microbatches=2)
    trainer.train()
    trainer.checkpointer.close()

    args.out.mkdir(parents=True, exist_ok=True)
    counters = (trainer.lr_schedulers, trainer)
    save_final_state(args.out, dist.get_rank(), trainer.model_parts[0], trainer.optimizers.optimizers[0], *counters)


if __name__ == "__main__":
    main()
