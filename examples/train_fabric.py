"""Trains a small GPT in a loop over Lightning Fabric, and survives: run it under p2prun (docs/trainers.md).

What it leaves in --out is for comparing runs (outcome.py).
"""

import argparse
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

import p2pstate
from gpt import GPT, GPTConfig
from outcome import save_final_state
from text_data import Batch, StdlibText, TextLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True, help="folder for the final state")
    args = parser.parse_args()

    p2pstate.init_process_group()  # Fabric takes the process group that is there
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_local = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=num_local, num_nodes=num_ranks // num_local)
    fabric.launch()

    torch.manual_seed(1)  # the same weights everywhere
    model = GPT(GPTConfig(num_layers=2, width=32, context=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = TextLoader(StdlibText(), context=16, batch=2, rank=rank, num_ranks=num_ranks, seed=1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # dropout differs from rank to rank
        seed(1000 + rank)

    state = p2pstate.Replicator(model, optimizer.optimizer, data=loader)

    def train_step(batch: Batch) -> torch.Tensor:
        loss = model(batch.tokens)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for step, loss in state.run(train_step, steps=args.steps):
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    save_final_state(args.out, rank, model, optimizer.optimizer)


if __name__ == "__main__":
    main()
