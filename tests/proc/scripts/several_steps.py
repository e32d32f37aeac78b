"""Loops in which collectives or another ``optimizer.step()`` follow the first one of a block. Run under p2prun.

Arguments and results as of loop_forms.py, whose model, data and kill points are used here. Every form reaches the
points between (after the first step() of a block), collective (before a collective that the other rank is in by then)
and end (nothing follows in the block).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent))

from loop_forms import Batch, Run

import p2pstate

NUM_STEPS = 10


def summed(value: Tensor, run: Run) -> Tensor:
    """A collective of the loop's own."""
    run.points.reach("collective")
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / run.num_ranks


class Pair(nn.Module):
    """What two adversaries need: parts with parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))


def adversaries(run: Run) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """The generator, its critic (both data parallel) and their optimizers; run.model becomes what is saved."""
    torch.manual_seed(6)
    run.model = pair = Pair()  # type: ignore[assignment]
    generator, critic = DistributedDataParallel(pair.generator), DistributedDataParallel(pair.critic)
    return (
        generator,
        critic,
        torch.optim.Adam(generator.parameters(), 0.01),
        torch.optim.Adam(critic.parameters(), 0.02),
    )


def gan(options: argparse.Namespace) -> None:
    """The critic steps, then a forward and a backward with collectives, then the generator steps."""
    run = Run(options, sharded=False)
    generator, critic, for_generator, for_critic = adversaries(run)
    state = p2pstate.Replicator(generator, critic, for_generator, for_critic, data=run.loader)

    def train_step(batch: Batch) -> Tensor:
        run.begin(state, batch, batch.number)
        fake = generator(batch.inputs)
        gap = critic(fake.detach()).mean() - critic(batch.targets).mean()
        for_critic.zero_grad()
        gap.backward()
        for_critic.step()
        run.points.reach("between")
        for_generator.zero_grad()
        loss = -critic(fake).mean()
        run.points.reach("collective")
        loss.backward()
        for_generator.step()
        run.points.reach("end")
        return loss.detach()

    for step, loss in state.run(train_step, steps=NUM_STEPS):
        run.record.committed(step, loss.item())
    run.save([for_generator, for_critic])


def every_third(options: argparse.Namespace) -> None:
    """One optimizer at every step, another at every third; a block that is quiet twice and then is not."""
    run = Run(options, sharded=False)
    generator, critic, for_generator, for_critic = adversaries(run)
    state = p2pstate.Replicator(generator, critic, for_generator, for_critic, data=run.loader)

    for batch in state.batches(steps=NUM_STEPS):
        with state.step() as step:
            run.begin(state, batch, step.number)
            for_critic.zero_grad()
            loss = critic(batch.targets).square().mean()
            loss.backward()
            for_critic.step()
            run.points.reach("between")
            if step.number % 3 == 0:
                for_generator.zero_grad()
                loss = (generator(batch.inputs) - batch.targets).square().mean()
                run.points.reach("collective")
                loss.backward()
                for_generator.step()
            run.points.reach("end")
        run.points.at = None
        if step.committed:
            run.record.committed(step.number, loss.item())
    run.save([for_generator, for_critic])


def accumulating(options: argparse.Namespace) -> None:
    """One loss, two optimizers; the gradients of the second add up over three steps, through several versions."""
    run = Run(options, sharded=options.sharded)
    often = torch.optim.AdamW([*run.model.first.parameters(), *run.model.norm.parameters()], lr=0.01)
    seldom = torch.optim.SGD(run.model.last.parameters(), lr=0.05, momentum=0.9)
    state = p2pstate.Replicator(run.net, often, seldom, data=run.loader)

    def train_step(batch: Batch) -> Tensor:
        run.begin(state, batch, batch.number)
        often.zero_grad()
        loss = run.loss(batch)
        loss.backward()
        often.step()
        run.points.reach("between")
        if batch.number % 3 == 0:
            seldom.step()
            seldom.zero_grad()
        run.points.reach("end")
        return loss.detach()

    for step, loss in state.run(train_step, steps=NUM_STEPS):
        run.record.committed(step, loss.item())
    assert run.model.last.bias.grad is not None
    run.save([often, seldom], gradient=run.model.last.weight.grad)


def carried(options: argparse.Namespace) -> None:
    """No gradient is ever reset: each step adds to half of those from the step before."""
    run = Run(options, sharded=options.sharded)
    optimizer = torch.optim.SGD(run.net.parameters(), lr=0.05, momentum=0.9)
    state = p2pstate.Replicator(run.net, optimizer, data=run.loader)

    def train_step(batch: Batch) -> Tensor:
        run.begin(state, batch, batch.number)
        for parameter in run.net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        loss = run.loss(batch)
        loss.backward()
        run.points.reach("between")
        optimizer.step()
        run.points.reach("end")
        return loss.detach()

    for step, loss in state.run(train_step, steps=NUM_STEPS):
        run.record.committed(step, loss.item())
    run.save([optimizer], gradient=run.model.last.weight.grad)


def ppo(options: argparse.Namespace) -> None:
    """Several epochs over one batch in one block: clipping and stepping each time."""
    run = Run(options, sharded=True)
    optimizer = torch.optim.AdamW(run.net.parameters(), lr=0.02)
    state = p2pstate.Replicator(run.net, optimizer, data=run.loader, extra={"epochs": 0})

    def train_step(batch: Batch) -> Tensor:
        run.begin(state, batch, batch.number)
        for epoch in range(3):
            loss = run.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            if epoch == 1:
                run.points.reach("collective")
            nn.utils.clip_grad_norm_(run.net.parameters(), 1.0)
            optimizer.step()
            state.extra["epochs"] += 1
            if epoch == 0:
                run.points.reach("between")
        mean = summed(loss, run)
        run.points.reach("end")
        return mean

    for step, loss in state.run(train_step, steps=NUM_STEPS):
        run.record.committed(step, loss.item())
    run.save([optimizer], extra=dict(state.extra))


def line_search(options: argparse.Namespace) -> None:
    """LBFGS: every evaluation of its closure is a forward and a backward on parameters it has changed meanwhile."""
    run = Run(options, sharded=False)
    optimizer = torch.optim.LBFGS(
        run.net.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe", tolerance_grad=0.0
    )
    state = p2pstate.Replicator(run.net, optimizer, data=run.loader)

    def train_step(batch: Batch) -> Tensor:
        run.begin(state, batch, batch.number)
        num_evaluations = 0

        def evaluate() -> Tensor:
            nonlocal num_evaluations
            num_evaluations += 1
            if num_evaluations == 2:
                run.points.reach("between")
            optimizer.zero_grad()
            loss = run.loss(batch)
            if num_evaluations == 3:
                run.points.reach("collective")
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            return total / run.num_ranks

        loss = optimizer.step(evaluate)
        run.points.reach("end")
        return loss

    for step, loss in state.run(train_step, steps=NUM_STEPS):
        run.record.committed(step, loss.item())
    run.save([optimizer])


def zero_redundancy(options: argparse.Namespace) -> None:
    """Each rank has the optimizer state of some parameters, and broadcasts those after its step."""
    run = Run(options, sharded=False)
    optimizer = ZeroRedundancyOptimizer(
        run.net.parameters(), torch.optim.AdamW, lr=0.02, parameters_as_bucket_view=options.sharded
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = p2pstate.Replicator(run.net, optimizer, scheduler, data=run.loader)
    optimizer.optim.register_step_post_hook(lambda *_: run.points.reach("collective"))

    def train_step(batch: Batch) -> Tensor:
        run.begin(state, batch, batch.number)
        optimizer.zero_grad()
        loss = run.loss(batch)
        loss.backward()
        optimizer.step()
        run.points.reach("between")
        scheduler.step()
        run.points.reach("end")
        return loss.detach()

    for step, loss in state.run(train_step, steps=NUM_STEPS):
        run.record.committed(step, loss.item())
    assert 0 < len(optimizer.optim.state) < len(list(run.net.parameters())), "nothing was divided"
    run.save([optimizer.optim], scheduler=scheduler.state_dict())


def in_backward(options: argparse.Namespace) -> None:
    """Every parameter has an optimizer, which steps as soon as its gradient has been reduced."""
    run = Run(options, sharded=False)
    run.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))  # type: ignore[assignment]
    for layer in (run.model[0], run.model[2]):  # type: ignore[index]
        fully_shard(layer)
    run.net = fully_shard(run.model)
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=0.02) for parameter in run.net.parameters()}
    first = next(reversed(optimizers))

    def step_now(parameter: Tensor) -> None:
        if parameter is first:
            run.points.reach("collective")  # while the other rank reduces the gradients of the layer before
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        if parameter is first:
            run.points.reach("between")

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step_now)
    state = p2pstate.Replicator(run.net, *optimizers.values(), data=run.loader)

    def train_step(batch: Batch) -> Tensor:
        run.begin(state, batch, batch.number)
        loss = run.loss(batch)
        loss.backward()
        run.points.reach("end")
        return loss.detach()

    for step, loss in state.run(train_step, steps=NUM_STEPS):
        run.record.committed(step, loss.item())
    assert all(optimizer.state[p]["step"] == NUM_STEPS for p, optimizer in optimizers.items())
    run.save(list(optimizers.values()))


def scaler_skips(options: argparse.Namespace) -> None:
    """Two optimizers and a loss scaler, which skips another optimizer on each rank: nothing reduces the gradients."""
    run = Run(options, sharded=False)
    run.model = pair = Pair()  # type: ignore[assignment]
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.02) for part in (pair.generator, pair.critic)]
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    state = p2pstate.Replicator(pair, *optimizers, scale, data=run.loader)

    def train_step(batch: Batch) -> Tensor:
        run.begin(state, batch, batch.number)
        losses = [
            (pair.generator(batch.inputs) - batch.targets).square().mean(),
            pair.critic(batch.targets).square().mean(),
        ]
        total = torch.zeros(())
        for index, (loss, optimizer) in enumerate(zip(losses, optimizers, strict=True)):
            overflows = batch.number in (3, 6) and index == (run.rank + batch.number) % 2
            optimizer.zero_grad()
            scale.scale(loss * float("inf") if overflows else loss).backward()
            scale.step(optimizer)
            run.points.reach("end" if index else "between")
            total += summed(loss, run)
        scale.update()
        return total

    for step, loss in state.run(train_step, steps=NUM_STEPS):
        run.record.committed(step, loss.item())
    for part, optimizer in zip((pair.generator, pair.critic), optimizers, strict=True):
        assert optimizer.state[part[0].weight]["step"] == NUM_STEPS - 1, "no step was skipped"
    run.save(optimizers, scaler=scale.state_dict())


FORMS: dict[str, Callable[[argparse.Namespace], None]] = {
    form.__name__: form
    for form in (gan, every_third, accumulating, carried, ppo, line_search, zero_redundancy, in_backward, scaler_skips)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--kill", action="append", default=[], metavar="STEP:POINT")
    options = parser.parse_args()
    FORMS[options.form](options)


if __name__ == "__main__":
    main()
