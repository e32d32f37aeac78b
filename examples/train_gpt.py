"""Trains a small GPT on Python's own sources, and survives: run it under p2prun (see demo.py, or README.md).

FSDP2 (or DDP), AdamW with weight decay on matrices only, warm-up and cosine schedule, dropout: an ordinary script. The
lines that make it survive a dead process or node are the ones that say p2pstate or state. What it leaves in --out is
for comparing runs (outcome.py); --kill makes it die at an exact point, once (kill_points.py).
"""

import argparse
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import p2pstate
from devices import device_for
from gpt import GPT, GPTConfig
from kill_points import KillPoints
from outcome import Recorder, save_final_state
from text_data import Batch, StdlibText, TextLoader


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="folder for the final state and the positions seen")
    parser.add_argument("--ddp", action="store_true", help="DDP instead of FSDP2")
    parser.add_argument("--batch-norm", action="store_true", help="a BatchNorm, whose statistics differ by rank")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--share-cards", action="store_true", help="several ranks of one machine on the same card")
    parser.add_argument("--pace", type=float, default=0.0, metavar="S", help="rest this long after each step")
    parser.add_argument("--checkpoint", help="folder or URL for checkpoints")
    parser.add_argument("--checkpoint-stage", type=Path, help="local folder for files on their way to a URL")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--kill", action="append", default=[], metavar="STEP:RANK:PHASE[:node]")
    for name in ("num_layers", "width", "context"):
        default = GPTConfig.__dataclass_fields__[name].default
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--batch", type=int, default=4, help="windows of text per rank and step")
    return parser.parse_args()


def build_model(args: argparse.Namespace, device: torch.device) -> tuple[GPT, nn.Module]:
    """The model, and what to call in its place."""
    torch.manual_seed(args.seed)  # the same weights everywhere
    config = GPTConfig(num_layers=args.num_layers, width=args.width, context=args.context, batch_norm=args.batch_norm)
    model = GPT(config).to(device)
    if args.ddp:
        return model, nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))  # by default on a card, wherever the model is
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return model, fully_shard(model, mesh=mesh)


def build_optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    warm_up = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

    return optimizer, LambdaLR(optimizer, factor)


def main() -> None:
    args = arguments()
    device = device_for(args.device, int(os.environ["LOCAL_RANK"]), share=args.share_cards)
    p2pstate.init_process_group()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    model, net = build_model(args, device)
    optimizer, scheduler = build_optimizer(model, args.steps)
    loader = TextLoader(
        StdlibText(), context=args.context, batch=args.batch, rank=rank, num_ranks=num_ranks, seed=args.seed
    )
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # dropout differs from rank to rank
        seed(1000 * args.seed + rank)

    state = p2pstate.Replicator(
        net,
        optimizer,
        scheduler,
        data=loader,
        checkpoint=args.checkpoint,
        checkpoint_every=args.checkpoint_every,
        checkpoint_stage=args.checkpoint_stage,
    )
    record = Recorder(args.out, rank)
    kill = KillPoints(args.kill, args.out, rank, model.blocks[len(model.blocks) // 2], optimizer)

    def train_step(batch: Batch) -> Tensor:
        if not state.rehearsing:
            record.delivered(batch.number, batch.positions)
        loss = net(batch.tokens.to(device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    for step, loss in state.run(kill.around(train_step, state), steps=args.steps):
        if state.finished():  # else a card has lost the step, which comes again
            record.committed(step, loss.item())
        kill.between(step)
        time.sleep(args.pace)

    save_final_state(args.out, rank, model, optimizer, scheduler, loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
