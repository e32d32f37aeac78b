"""Trains a pipeline of stages, each replicated, and survives: run it under p2prun.

The model is cut by torch.distributed.pipelining: a stage per group of ranks, and DDP between the ranks of a stage. With
two ranks a node and two stages a stage lies on one node, so that its state exists nowhere else: it is copied to the
other node after every step. What it leaves in --out is for comparing runs (outcome.py).
"""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import p2pstate
from counting_data import Counting
from outcome import save_final_state
from p2pstate.data import Loader, Sampler, Shuffled

WIDTH, NUM_TOKENS, LENGTH, NUM_BLOCKS, NUM_MICRO_BATCHES = 32, 64, 24, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Stage(nn.Module):
    """Some blocks of the model, under the names they have in the whole; the first and the last stage have the ends."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        each = NUM_BLOCKS // num_stages
        self.token = nn.Embedding(NUM_TOKENS, WIDTH) if index == 0 else None
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(index * each, (index + 1) * each)})
        self.head = nn.Linear(WIDTH, NUM_TOKENS) if index == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.token is None else self.token(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--checkpoint", metavar="PATH", help="folder or URL of the checkpoints on disk")
    parser.add_argument("--out", type=Path, required=True, help="folder for the final state")
    args = parser.parse_args()

    p2pstate.init_process_group()
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (args.stages, num_ranks // args.stages), mesh_dim_names=("stage", "replica"))
    index, replica = mesh["stage"].get_local_rank(), mesh["replica"].get_local_rank()
    torch.manual_seed(1 + index)
    module = DistributedDataParallel(Stage(index, args.stages), process_group=mesh["replica"].get_group())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    stage = PipelineStage(module, index, args.stages, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = Schedule1F1B(stage, NUM_MICRO_BATCHES, loss_fn=cross_entropy)

    samples = Counting(96, LENGTH)
    sampler = Sampler(Shuffled(len(samples), seed=1), batch_size=16, rank=replica, num_ranks=mesh["replica"].size())
    loader = Loader(samples, batch_sampler=sampler, num_workers=0, epochs=1000)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1000 + rank)
    state = p2pstate.Replicator(module, optimizer, data=loader, checkpoint=args.checkpoint, checkpoint_every=20)

    def train_step(batch: dict[str, Tensor]) -> Tensor | None:
        """The loss of the last stage; None elsewhere."""
        tokens, losses = batch["input_ids"], []
        inputs = (tokens,) if stage.is_first else ()
        schedule.step(*inputs, target=tokens if stage.is_last else None, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    for step, loss in state.run(train_step, steps=args.steps):
        if loss is not None and replica == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    save_final_state(args.out, rank, module, optimizer, loader)


if __name__ == "__main__":
    main()
