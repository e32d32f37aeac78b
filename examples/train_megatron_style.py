"""Trains with tensor and data parallelism made by hand, as Megatron does, and survives: run it under p2prun.

Groups come from dist.new_group; layers are cut by hand; the weights of a rank lie in one flat bfloat16 buffer, their
gradients in another one of float32; each data-parallel rank has the float32 master weights and Adam's state of its part
of it (a distributed optimizer); dropout draws from a generator of its own on each tensor-parallel rank. What it leaves
in --out is for comparing runs (outcome.py).
"""

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import p2pstate
from counting_data import Counting
from outcome import save_final_state
from p2pstate.data import Loader, Sampler, Shuffled

WIDTH, NUM_TOKENS, NUM_MICRO_BATCHES = 32, 64, 2


def make_groups(tp_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's tensor-parallel group (neighbours, on one node) and data-parallel group. All ranks make all of them,
    in one order, as always."""
    num_ranks = dist.get_world_size()
    rows = [list(range(first, first + tp_size)) for first in range(0, num_ranks, tp_size)]
    columns = [list(range(first, num_ranks, tp_size)) for first in range(tp_size)]
    tp_groups, dp_groups = ({tuple(ranks): dist.new_group(ranks) for ranks in each} for each in (rows, columns))
    mine = [
        next(group for ranks, group in groups.items() if dist.get_rank() in ranks) for groups in (tp_groups, dp_groups)
    ]
    return mine[0], mine[1]


class ToParallel(torch.autograd.Function):
    """Into layers that are cut: the gradients of all pieces add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class FromParallel(torch.autograd.Function):
    """Out of them: what all pieces have computed adds up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ParallelBlock(nn.Module):
    """A column-parallel layer, dropout that differs from piece to piece, and a row-parallel layer."""

    def __init__(self, group: dist.ProcessGroup, generator: torch.Generator) -> None:
        super().__init__()
        self.group, self.generator = group, generator
        num_mine = 4 * WIDTH // dist.get_world_size(group)
        self.norm = nn.LayerNorm(WIDTH)
        whole = torch.randn(2, 4 * WIDTH, WIDTH) / WIDTH  # drawn alike everywhere, then cut
        first = dist.get_rank(group) * num_mine
        self.up, self.down = (nn.Parameter(each[first : first + num_mine].clone()) for each in whole)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(ToParallel.apply(self.norm(x), self.group) @ self.up.T)
        if self.training:
            hidden = hidden * (torch.rand(hidden.shape, generator=self.generator) >= 0.1) / 0.9
        return x + FromParallel.apply(hidden.to(self.down.dtype) @ self.down, self.group)


class Language(nn.Module):
    def __init__(self, group: dist.ProcessGroup, generator: torch.Generator) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(ParallelBlock(group, generator) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = F.linear(x, self.token.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class DistributedOptimizer:
    """Flat buffers for a rank's weights and gradients; AdamW on this data-parallel rank's part, in float32."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.group, self.num_ranks = group, dist.get_world_size(group)
        parameters = list(model.parameters())
        length = sum(parameter.numel() for parameter in parameters)
        part = -(-length // self.num_ranks)  # the last one is filled up
        self.weights = torch.zeros(part * self.num_ranks, dtype=torch.bfloat16)
        self.gradients = torch.zeros(part * self.num_ranks)
        begin = 0
        for parameter in parameters:
            end = begin + parameter.numel()
            view = self.weights[begin:end].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.register_post_accumulate_grad_hook(self._accumulator(self.gradients[begin:end]))
            begin = end
        own = slice(dist.get_rank(group) * part, (dist.get_rank(group) + 1) * part)
        self.own_weights = self.weights[own]
        # Master weights are no model's parameters: as a module of their own they have a name, and are captured
        self.masters = nn.ParameterList([nn.Parameter(self.own_weights.float())])
        self.adam = torch.optim.AdamW(self.masters, lr=1e-2)

    @staticmethod
    def _accumulator(total: Tensor) -> Any:
        def accumulate(parameter: Tensor) -> None:
            assert parameter.grad is not None
            total.add_(parameter.grad.flatten())
            parameter.grad = None

        return accumulate

    def zero_grad(self) -> None:
        self.gradients.zero_()

    def step(self) -> None:
        master = self.masters[0]
        master.grad = torch.empty_like(master)
        dist.reduce_scatter_tensor(master.grad, self.gradients, group=self.group)
        master.grad /= self.num_ranks
        self.adam.step()  # here all ranks vote whether the step counts
        self.own_weights.copy_(master.detach())
        dist.all_gather_into_tensor(self.weights, self.own_weights.clone(), group=self.group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tensor-parallel", type=int, default=2, metavar="RANKS")
    parser.add_argument("--out", type=Path, required=True, help="folder for the final state")
    args = parser.parse_args()

    p2pstate.init_process_group()
    rank = dist.get_rank()
    tp_group, dp_group = make_groups(args.tensor_parallel)
    torch.manual_seed(1)  # the same weights everywhere
    generator = torch.Generator().manual_seed(1000 + rank)
    model = Language(tp_group, generator)
    optimizer = DistributedOptimizer(model, dp_group)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer.adam, 0.1, total_iters=10)
    samples = Counting(96, 24)
    sampler = Sampler(
        Shuffled(len(samples), seed=1),
        batch_size=4 * NUM_MICRO_BATCHES,
        rank=dist.get_rank(dp_group),
        num_ranks=dist.get_world_size(dp_group),
    )
    loader = Loader(samples, batch_sampler=sampler, num_workers=0, epochs=1000)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1000 + rank)

    state = p2pstate.Replicator(
        model, optimizer.masters, optimizer.adam, scheduler, data=loader, extra={"dropout": generator}
    )

    def train_step(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()  # at the beginning: a step that was discarded has left something there
        total = torch.zeros(())
        for tokens in batch["input_ids"].chunk(NUM_MICRO_BATCHES):
            loss = model(tokens) / NUM_MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        scheduler.step()
        return total

    for step, loss in state.run(train_step, steps=args.steps):
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    save_final_state(args.out, rank, nn.ModuleList([model, optimizer.masters]), optimizer.adam, scheduler, loader)


if __name__ == "__main__":
    main()
