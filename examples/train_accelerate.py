"""Trains a small language model in a loop with Hugging Face's Accelerate, and survives (docs/trainers.md).

Run it under p2prun, or under `accelerate launch --rdzv_backend p2p`. What it leaves in --out is for comparing runs
(outcome.py).
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed

import p2pstate
from counting_data import Counting
from gpt import GPT, GPTConfig
from outcome import save_final_state
from p2pstate.data import Loader, Sampler, Shuffled
from p2pstate.integrations.accelerate import replicate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pace", type=float, default=0.0, metavar="S", help="rest this long after each step")
    parser.add_argument("--out", type=Path, required=True, help="folder for the final state")
    args = parser.parse_args()

    p2pstate.init_process_group()  # before Accelerator, which would make another one
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    set_seed(1)  # the same weights everywhere
    model = GPT(GPTConfig(num_layers=2, width=32, context=23))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=40)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    samples = Counting(96, 24)
    sampler = Sampler(Shuffled(len(samples), seed=1), batch_size=4, rank=rank, num_ranks=num_ranks)
    loader = Loader(samples, batch_sampler=sampler, epochs=1000, device=accelerator.device)
    set_seed(1000 + rank)  # dropout differs from rank to rank

    state = replicate(accelerator, model, optimizer, scheduler, data=loader)
    for batch in state.batches(steps=args.steps):
        with state.step() as step, accelerator.accumulate(model):
            loss = model(batch["input_ids"])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step.committed:
            accelerator.print(f"step {step.number} loss {loss.item():.4f}", flush=True)
            time.sleep(args.pace)

    args.out.mkdir(parents=True, exist_ok=True)
    save_final_state(args.out, rank, model, optimizer.optimizer, scheduler.scheduler, loader)


if __name__ == "__main__":
    main()
