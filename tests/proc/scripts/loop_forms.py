"""A small model trained in each of the ways a loop can be written, and in ways it must not be. Run under p2prun.

In: ``FORM --out FOLDER [--kill STEP:POINT ...]``. Out, in the folder: what examples/outcome.py compares. Rank 1 kills
itself at each STEP:POINT, once: a marker file says that it has happened. POINT is a name that a form below passes to
``Points.reach``, or forward and backward (in the middle of the model).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.data
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import p2pstate
from outcome import Recorder, local, random_states
from p2pstate.groups.journal import MAX_STEP_OUTPUT_BYTES

NUM_STEPS = 10
VICTIM = 1
INF_AT = 4  # the batch whose loss overflows, in the form with a scaler
MICRO = 2  # micro-batches per step, in the forms that accumulate


@dataclass(frozen=True, slots=True)
class Batch:
    number: int
    inputs: Tensor
    targets: Tensor


class Numbers:
    """Batches of this rank, numbered from 1; the position means delivered. They come through a loader of torch, which
    draws a seed in the middle of the process's stream when the rank goes on in them."""

    def __init__(self, rank: int, num_batches: int | None = None) -> None:
        self._rank, self._num_batches = rank, num_batches
        self._delivered = 0

    def __iter__(self) -> Iterator[Batch]:
        end = sys.maxsize if self._num_batches is None else self._num_batches + 1
        for number in torch.utils.data.DataLoader(range(self._delivered + 1, end), batch_size=None, num_workers=0):
            self._delivered = number
            source = torch.Generator().manual_seed(1000 * self._rank + number)
            inputs = torch.randn(6, 8, generator=source)
            yield Batch(number, inputs, inputs[:, :4].sin())

    def state_dict(self) -> dict[str, Any]:
        return {"delivered": self._delivered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._delivered = state["delivered"]


class Points:
    """Where rank 1 dies. ``at`` the step being tried; None between steps and in a rehearsal."""

    def __init__(self, folder: Path, rank: int, kills: Sequence[str]) -> None:
        self._folder = folder
        self._kills = set(kills) if rank == VICTIM else set()
        self.at: int | None = None

    def reach(self, point: str) -> None:
        if f"{self.at}:{point}" not in self._kills:
            return
        try:
            os.close(os.open(self._folder / f"killed-{self.at}-{point}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    def __init__(self, points: Points) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(16, 4)
        self._points = points

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs)).relu()
        self._points.reach("forward")
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._points.reach("backward"))
        return self.last(self.drop(hidden))


class Run:
    """What every form needs: ranks, model, data, records."""

    def __init__(self, options: argparse.Namespace, *, sharded: bool, num_batches: int | None = None) -> None:
        p2pstate.init_process_group()
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.folder = options.out
        self.record = Recorder(options.out, self.rank)
        self.points = Points(options.out, self.rank, options.kill)
        self.loader = Numbers(self.rank, num_batches)
        torch.manual_seed(5)
        self.model = Net(self.points)
        self.sharded = sharded
        self.net: nn.Module = fully_shard(self.model) if sharded else DistributedDataParallel(self.model)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(100 + self.rank)

    def begin(self, state: Any, batch: Batch, step: int) -> None:
        if not state.rehearsing:
            self.points.at = step
            self.record.delivered(batch.number, [step])

    def loss(self, batch: Batch) -> Tensor:
        return (self.net(batch.inputs) - batch.targets).square().mean()

    def save(self, optimizers: Sequence[torch.optim.Optimizer], **others: Any) -> None:
        """rank<r>.pt, as examples/outcome.py reads it."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}

        def add(name: str, value: Any) -> None:
            if isinstance(value, Tensor):
                tensors[name] = local(value).clone()
            elif isinstance(value, dict):
                for key, each in value.items():
                    add(f"{name}/{key}", each)
            elif isinstance(value, list | tuple):
                add(f"{name}/length", len(value))
                for index, each in enumerate(value):
                    add(f"{name}/{index}", each)
            else:
                values[name] = repr(value)

        add("parameter", dict(self.model.named_parameters()))
        add("buffer", dict(self.model.named_buffers()))
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for index, optimizer in enumerate(optimizers):
            add(f"optimizer {index}", {names[id(parameter)]: entry for parameter, entry in optimizer.state.items()})
            add(
                f"groups {index}",
                [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            )
        add("random", random_states())
        add("loader", self.loader.state_dict())
        add("other", others)
        partial = self.folder / f"rank{self.rank}.{os.getpid()}.partial"
        torch.save({"tensors": tensors, "values": values}, partial)
        partial.replace(self.folder / f"rank{self.rank}.pt")


# -- the forms


def run_with_two_optimizers(options: argparse.Namespace) -> None:
    """state.run; two optimizers in one step; an evaluation within it; counters of the loop's own; left by break."""
    run = Run(options, sharded=False)
    body = torch.optim.AdamW([*run.model.first.parameters(), *run.model.norm.parameters()], lr=0.01)
    head = torch.optim.SGD(run.model.last.parameters(), lr=0.05, momentum=0.9)
    state = p2pstate.Replicator(run.net, body, head, data=run.loader, extra={"samples": 0, "bodies": 0, "last": []})

    def train_step(batch: Batch) -> Tensor:
        run.begin(state, batch, batch.number)
        if batch.number == 2 and os.fork() == 0:
            sys.exit(3)  # a child says nothing of this rank
        loss = run.loss(batch)
        loss.backward()
        body.step()
        run.points.reach("between_optimizers")
        head.step()
        run.points.reach("after_step")
        body.zero_grad()
        head.zero_grad()
        if batch.number % 2 == 0:  # after it DDP's next forward does not broadcast buffers
            run.net.eval()
            with torch.no_grad():
                run.net(batch.inputs)
            run.net.train()
        state.extra["samples"] += len(batch.inputs)
        state.extra["last"] = [*state.extra["last"], batch.number][-3:]
        return loss.detach()

    for step, loss in state.run(train_step):
        run.record.committed(step, loss.item())
        state.extra["bodies"] += 1
        run.points.reach("body")
        if step == NUM_STEPS:
            break
    run.save([body, head], extra=dict(state.extra))


def block_with_scheduler_outside(options: argparse.Namespace) -> None:
    """with state.step(); the scheduler steps between two blocks; garbage makes user code raise; the data ends.

    With --raise-alone it raises in a rehearsal as well: then nobody can join alone, and all workers start again. What
    is added up is more than the journal of the first steps keeps for a newcomer.
    """
    run = Run(options, sharded=False, num_batches=NUM_STEPS)
    optimizer = torch.optim.AdamW(run.net.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS)
    state = p2pstate.Replicator(run.net, optimizer, scheduler, data=run.loader)
    for batch in state.batches():
        with state.step() as step:
            run.begin(state, batch, step.number)
            loss = run.loss(batch)
            loss.backward()
            count = torch.ones(MAX_STEP_OUTPUT_BYTES // 4 + 1)
            dist.all_reduce(count)
            if count[0].item() != run.num_ranks and (options.raise_alone or not state.rehearsing):
                raise ArithmeticError(f"{count[0].item()} ranks have added up: garbage")
            run.points.reach("before_step")
            optimizer.step()
            optimizer.zero_grad()
        run.points.reach("after_block")
        if step.committed:
            scheduler.step()
            run.record.committed(step.number, loss.item())
            run.points.reach("after_scheduler")
        run.points.at = None
    run.save([optimizer], scheduler=scheduler.state_dict())


def closure(options: argparse.Namespace) -> None:
    """optimizer.step(closure), by position and by keyword, with FSDP2."""
    run = Run(options, sharded=True)
    optimizer = torch.optim.AdamW(run.net.parameters(), lr=0.02)
    state = p2pstate.Replicator(run.net, optimizer, data=run.loader)

    def train_step(batch: Batch) -> Tensor:
        run.begin(state, batch, batch.number)

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = run.loss(batch)
            loss.backward()
            run.points.reach("closure_end")
            return loss

        loss = optimizer.step(evaluate) if batch.number % 2 else optimizer.step(closure=evaluate)
        run.points.reach("after_step")
        return loss.detach()

    for step, loss in state.run(train_step, steps=NUM_STEPS):
        run.record.committed(step, loss.item())
    run.save([optimizer])


def lbfgs(options: argparse.Namespace) -> None:
    """A closure that is called several times within one step, and an optimizer whose state grows."""
    run = Run(options, sharded=False)
    optimizer = torch.optim.LBFGS(
        run.net.parameters(), lr=0.1, max_iter=3, history_size=4, tolerance_grad=0.0, tolerance_change=0.0
    )
    state = p2pstate.Replicator(run.net, optimizer, data=run.loader)

    def train_step(batch: Batch) -> Tensor:
        run.begin(state, batch, batch.number)
        num_calls = 0

        def evaluate() -> Tensor:
            nonlocal num_calls
            num_calls += 1
            run.points.reach(f"call_{num_calls}")
            optimizer.zero_grad()
            loss = run.loss(batch)
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.SUM)
            return mean / run.num_ranks

        loss = optimizer.step(evaluate)
        run.points.reach("after_step")
        return loss

    for step, loss in state.run(train_step, steps=NUM_STEPS):
        run.record.committed(step, loss.item())
    run.save([optimizer])


def scaler(options: argparse.Namespace) -> None:
    """A loss scaler that finds an overflow and does not step the optimizer: the step counts all the same."""
    run = Run(options, sharded=False)
    optimizer = torch.optim.AdamW(run.net.parameters(), lr=0.02)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    state = p2pstate.Replicator(run.net, optimizer, scale, data=run.loader)

    def train_step(batch: Batch) -> Tensor:
        run.begin(state, batch, batch.number)
        loss = run.loss(batch)
        scale.scale(loss * float("inf") if batch.number == INF_AT else loss).backward()
        scale.unscale_(optimizer)
        run.points.reach("unscaled")
        nn.utils.clip_grad_norm_(run.net.parameters(), 1.0)
        scale.step(optimizer)
        run.points.reach("after_step")
        scale.update()
        run.points.reach("after_update")
        optimizer.zero_grad()
        return loss.detach()

    for step, loss in state.run(train_step, steps=NUM_STEPS):
        run.record.committed(step, loss.item())
    assert optimizer.state[run.model.last.bias]["step"].item() == NUM_STEPS - 1, "no step was skipped"
    run.save([optimizer], scaler=scale.state_dict())


def accumulate(options: argparse.Namespace) -> None:
    """Micro-batches inside one block, reduced with the last one."""
    run = Run(options, sharded=False)
    optimizer = torch.optim.AdamW(run.net.parameters(), lr=0.02)
    state = p2pstate.Replicator(run.net, optimizer, data=run.loader)

    def train_step(batch: Batch) -> Tensor:
        run.begin(state, batch, batch.number)
        total = torch.zeros(())
        for index, (inputs, targets) in enumerate(
            zip(batch.inputs.chunk(MICRO), batch.targets.chunk(MICRO), strict=True)
        ):
            last = index == MICRO - 1
            with nullcontext() if last else run.net.no_sync():  # type: ignore[operator]
                loss = (run.net(inputs) - targets).square().mean() / MICRO
                run.points.reach(f"micro_{index + 1}_forward")
                loss.backward()
            run.points.reach(f"micro_{index + 1}_backward")
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    for step, loss in state.run(train_step, steps=NUM_STEPS):
        run.record.committed(step, loss.item())
    run.save([optimizer])


def micro_blocks(options: argparse.Namespace) -> None:
    """One block per micro-batch: only the last of a window steps the optimizer, and only that block is a version."""
    run = Run(options, sharded=options.sharded, num_batches=NUM_STEPS * MICRO)
    optimizer = torch.optim.AdamW(run.net.parameters(), lr=0.02)
    state = p2pstate.Replicator(run.net, optimizer, data=run.loader)
    for batch in state.batches():
        last = batch.number % MICRO == 0
        if run.sharded:
            run.net.set_requires_gradient_sync(last)  # type: ignore[operator]
        with state.step() as step:
            run.begin(state, batch, step.number)
            index = (batch.number - 1) % MICRO + 1
            with nullcontext() if last or run.sharded else run.net.no_sync():  # type: ignore[operator]
                loss = run.loss(batch) / MICRO
                run.points.reach(f"micro_{index}_forward")
                loss.backward()
            run.points.reach(f"micro_{index}_backward")
            if last:
                optimizer.step()
                optimizer.zero_grad()
        run.points.reach(f"micro_{index}_after_block")
        run.points.at = None
        assert step.committed <= last, "a block without optimizer.step() was committed"
        if step.committed:
            assert step.number == batch.number // MICRO
            run.record.committed(step.number, loss.item())
    run.save([optimizer])


# -- misuse


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def nested_block(_options: argparse.Namespace) -> None:
    p2pstate.init_process_group()
    state = p2pstate.Replicator(*model_and_optimizer())
    for _ in state.batches(steps=1):
        with state.step(), state.step():
            pass


def block_outside_of_batches(_options: argparse.Namespace) -> None:
    p2pstate.init_process_group()
    state = p2pstate.Replicator(*model_and_optimizer())
    with state.step():
        pass


def second_block_in_one_turn(_options: argparse.Namespace) -> None:
    p2pstate.init_process_group()
    state = p2pstate.Replicator(*model_and_optimizer())
    for _ in state.batches(steps=1):
        for _ in range(2):
            with state.step():
                pass


def no_optimizer(_options: argparse.Namespace) -> None:
    p2pstate.init_process_group()
    p2pstate.Replicator(model_and_optimizer()[0])


def no_model(_options: argparse.Namespace) -> None:
    p2pstate.init_process_group()
    p2pstate.Replicator(model_and_optimizer()[1])


def data_without_state(_options: argparse.Namespace) -> None:
    p2pstate.init_process_group()
    p2pstate.Replicator(*model_and_optimizer(), data=[1, 2, 3])


def no_process_group(_options: argparse.Namespace) -> None:
    p2pstate.Replicator(*model_and_optimizer())


def raises_in_a_good_step(_options: argparse.Namespace) -> None:
    p2pstate.init_process_group()
    state = p2pstate.Replicator(*model_and_optimizer())

    def train_step() -> None:
        raise LookupError("a bug of the user's own")

    for _ in state.run(train_step, steps=1):
        pass


FORMS: dict[str, Callable[[argparse.Namespace], None]] = {
    form.__name__: form
    for form in (
        *(run_with_two_optimizers, block_with_scheduler_outside, closure, lbfgs, scaler, accumulate, micro_blocks),
        *(nested_block, block_outside_of_batches, second_block_in_one_turn, no_optimizer, no_model),
        *(data_without_state, no_process_group, raises_in_a_good_step),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--raise-alone", action="store_true")
    parser.add_argument("--kill", action="append", default=[], metavar="STEP:POINT")
    options = parser.parse_args()
    FORMS[options.form](options)


if __name__ == "__main__":
    main()
