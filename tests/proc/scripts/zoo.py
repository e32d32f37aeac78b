"""A model and optimizers with every odd kind of state, trained under one of several parallelisms. Run under p2prun.

Arguments: form, folder, steps, and where to die: "STEP:RANK" or "STEP:RANK:node", once per rank. Leaves its final
state, bit by bit, in the folder. ``train_on_stock_gloo`` is the same training without p2pstate.

The big layers are split or replicated as the form says; the odd leaves are plain tensors beside them, and what is in
the odd buffers differs between ranks.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "unit"))

from parallel import BATCH, Data, build, die_once, width_of
from state_zoo import Codes, bits

import p2pstate

NUM_RANKS = 4
ADDED_AT, FROZEN_AT = 4, 5
CODES = (torch.bool, torch.int8, torch.uint16, torch.uint64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)


def name_of(dtype: torch.dtype) -> str:
    return f"of_{str(dtype).removeprefix('torch.')}"


class Odd(nn.Module):
    """One of each: what a capture has got wrong somewhere."""

    def __init__(self, rank: int, width: int) -> None:
        super().__init__()
        self.rank = rank
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.empty(0, 5))
        self.turned = nn.Parameter(torch.randn(width, 3).t())
        self.column = nn.Parameter(torch.randn(width, 4)[:, 1])
        self.conv = nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.embed = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.late, self.added = nn.Linear(width, width), nn.Linear(width, width)
        self.unused = nn.Parameter(torch.randn(3), requires_grad=False)
        flat = torch.zeros(8)
        for name, buffer in (
            ("flat", flat),
            ("view", flat[2:5]),
            ("expanded", torch.zeros(1).expand(3)),
            ("assigned", torch.zeros(3)),
            ("gone", torch.empty(0)),
            *((name_of(dtype), torch.zeros(3, dtype=dtype)) for dtype in CODES),
        ):
            self.register_buffer(name, buffer)
        self.register_buffer("table", torch.arange(float(width)), persistent=False)
        self.register_buffer("weights", Codes(torch.zeros(3, 4, dtype=torch.int8), torch.ones(3)))
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.late(x * self.scale + self.column * self.table.cos())
        x = x + self.added(x).tanh() + x.mul(self.turned.sum(0))
        x = x + self.conv(x[:, :9].reshape(-1, 1, 3, 3).contiguous()).sum(dim=(1, 2, 3)).unsqueeze(1)
        if self.training:  # buffers that change in forward
            self.flat[:3] += x.detach().mean()
        return self.head(nn.functional.dropout(x, 0.1, self.training)) + self.nothing.sum()

    @torch.no_grad()
    def change(self, step: int) -> None:
        """Everything that no optimizer changes, differently on every rank."""
        value = 7 * step + self.rank
        self.assigned = self.assigned + value
        self.gone = torch.full((step % 4,), float(value))  # another size, also none
        self.table.mul_(0.9)
        self.expanded[:1].fill_(value)
        for dtype in CODES:
            getattr(self, name_of(dtype)).view(torch.uint8).random_(0, 2)  # 0 and 1 are bools, too
        self.weights.codes.random_(-128, 128)
        self.weights.scale.fill_(value).reciprocal_()
        self.column.data = self.column.data.clone()  # other memory, and no column any more
        self.history.append(value)

    def get_extra_state(self) -> dict[str, Any]:
        return {"history": self.history, "sum": torch.tensor(sum(self.history))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.history = state["history"]


class OddAdamW(torch.optim.AdamW):
    """Keeps more than tensors of the parameter's shape and dtype."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    continue
                number = int(state["step"])
                state["note"], state["none"], state["history"] = f"step {number}", None, [number, (number, 0.5)]
                state["nested"] = {0: torch.tensor([number], dtype=torch.int16), "a/b": {"c": torch.tensor(0.5)}}
                state["generator"] = torch.get_rng_state()[:64].clone()
                if "codes" not in state:
                    state["codes"] = Codes(torch.zeros(4, dtype=torch.int8), torch.ones(1))
                state["codes"].codes.random_(-128, 128)


class Average:
    """An exponential average: an object with a state_dict."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self.mean = [torch.zeros(()) for _ in parameters]

    def update(self) -> None:
        for mean, parameter in zip(self.mean, self._parameters, strict=True):
            mean.lerp_(local(parameter).sum(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return, operator]


class Job:
    """Models, optimizers and all else, and one step of training them."""

    def __init__(self, form: str) -> None:
        torch.set_num_threads(1)  # as p2prun sets it: the number decides in which order is added up
        self.rank = dist.get_rank()
        self.body, seed = build(form, self.rank)
        width = width_of(form)
        self.odd = Odd(self.rank, width)
        self.data = Data(seed, BATCH, width)
        self.by_hand = list(self.odd.parameters()) + (list(self.body.parameters()) if form == "plain" else [])
        self.alike = "tp" in form  # ranks of one tensor see the same data, so nothing may be drawn for it
        self.for_body = torch.optim.AdamW(self.body.parameters(), lr=1e-2)
        if form == "ddp":
            self.for_body = ZeroRedundancyOptimizer(self.body.parameters(), torch.optim.AdamW, lr=1e-2)
        odd = self.odd
        self.for_odd = OddAdamW(
            [
                {"params": [odd.scale, odd.turned, odd.column, *odd.conv.parameters(), odd.embed.weight]},
                {"params": [], "tag": ("empty", 1)},
                {"params": [*odd.late.parameters(), odd.nothing, odd.unused], "betas": (0.8, 0.9)},
            ],
            lr=torch.tensor(0.01),
            foreach=False,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.for_body, lambda epoch: 0.9**epoch)
        self.average = Average([*self.body.parameters()])
        self.extra: dict[str, Any] = {
            "steps": 0,
            "drawn": torch.Generator().manual_seed(self.rank),
            "numpy": np.random.default_rng(self.rank),
            "losses": [],
        }
        for seeding in (random.seed, np.random.seed, torch.manual_seed):
            seeding(50 + self.rank)

    def step(self, batch: Tensor, before_step: Callable[[], None]) -> Tensor:
        number = self.extra["steps"] + 1
        if number == ADDED_AT:
            self.for_odd.add_param_group({"params": self.odd.added.parameters(), "lr": torch.tensor(0.02)})
        if number == FROZEN_AT:
            self.odd.late.requires_grad_(False)
            self.odd.conv.eval()
        noise = 0.0 if self.alike else random.random() + float(self.extra["numpy"].random())
        hidden = self.body(batch)
        loss = hidden.pow(2).mean() * (1 + noise) + self.odd(hidden.detach()).pow(2).mean()
        loss.backward()
        for parameter in self.by_hand:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        before_step()
        for optimizer in (self.for_body, self.for_odd):
            optimizer.step()
            optimizer.zero_grad()
        self.odd.zero_grad()  # also of what is in no group yet
        self.scheduler.step()
        self.average.update()
        self.odd.change(number)
        self.for_odd.param_groups[0]["lr"].mul_(0.99)
        self.extra["steps"] = number
        drawn = torch.rand((), generator=self.extra["drawn"])
        self.extra["losses"] = [*self.extra["losses"], loss.item(), drawn.item()]
        return loss.detach()

    def final(self) -> dict[str, Any]:
        """Everything, in a form that is equal exactly if all bits are."""
        found: dict[str, Any] = {"lr": str(self.for_odd.param_groups), "scheduler": str(self.scheduler.state_dict())}
        for part, module in (("body", self.body), ("odd", self.odd)):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                found[f"{part} {name}"] = self._plain(tensor)
        names = {id(p): n for m in (self.body, self.odd) for n, p in m.named_parameters()}
        for optimizer in (getattr(self.for_body, "optim", self.for_body), self.for_odd):
            for parameter, entry in optimizer.state.items():
                found[f"state {names[id(parameter)]}"] = self._plain(entry)
        found["flags"] = [(p.requires_grad, p.grad is None) for p in self.odd.parameters()]
        found["modes"] = [module.training for module in self.odd.modules()]
        found["tied"] = self.odd.head.weight is self.odd.embed.weight
        found["view"] = self.odd.view.data_ptr() - self.odd.flat.data_ptr()
        found["strides"] = [buffer.stride() for buffer in self.odd.buffers()]
        found["extra"] = str([self.extra["steps"], self.extra["losses"], self.extra["numpy"].bit_generator.state])
        found["random"] = [str(random.getstate()), str(np.random.get_state()), self._plain(torch.get_rng_state())]
        found |= {"history": self.odd.history, "average": self._plain(self.average.mean), "data": self.data.position}
        return found

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Codes):
            return "codes", self._plain(value.codes), self._plain(value.scale)
        if isinstance(value, Tensor):
            return str(value.dtype), list(value.shape), bits(local(value))
        if isinstance(value, dict):
            return {key: self._plain(each) for key, each in value.items()}
        return [self._plain(each) for each in value] if isinstance(value, list) else value


def train_on_stock_gloo(
    _line: Any, rank: int, num_ranks: int, folder: str, form: str, num_steps: int
) -> dict[str, Any]:
    """The same without p2pstate; for groups_in_processes.run_ranks."""
    store = dist.FileStore(f"{folder}/stock", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    job = Job(form)
    for _, batch in zip(range(num_steps), job.data, strict=False):
        job.step(batch, lambda: None)
    dist.destroy_process_group()
    return job.final()


def main() -> None:
    form, folder, num_steps, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    p2pstate.init_process_group()
    job = Job(form)
    state = p2pstate.Replicator(
        *(job.body, job.odd, job.for_body, job.for_odd, job.scheduler, job.average), data=job.data, extra=job.extra
    )

    def train_step(batch: Tensor) -> Tensor:
        def maybe_die() -> None:
            for kill in kills if not state.rehearsing else ():
                die_once(kill, state.committed_step + 1, job.rank, folder)

        return job.step(batch, maybe_die)

    for _ in state.run(train_step, steps=num_steps):
        pass
    sizes = [state.stats.num_own_bytes, state.stats.num_shared_bytes]
    torch.save({"state": job.final(), "sizes": sizes}, folder / f"final-{job.rank}.pt")


if __name__ == "__main__":
    main()
