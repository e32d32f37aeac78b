"""Trains a tiny model under p2prun, and hangs, dies or raises where it is told to: --mishap STEP:RANK:KIND, each once.

A kind is WHERE-WHAT. Where: fetch (the batch), forward (half of it is done), backward (half of it is done), grads (they
are there), after (the optimizer has stepped), hook (of state.every, half of it is done), body (of the loop), or both
(forward, each time, however often the step is tried). What:

stop      SIGSTOP
die       SIGKILL
lock      a lock that nobody releases
loop      an endless loop
gil       a C call that holds the interpreter's lock
slow      takes several times as long as a step, which is no hang
busy      takes as long as it has announced, which is none either
raise     an exception
odd       an exception that cannot be copied or shown
exit      sys.exit()
interrupt KeyboardInterrupt
reduce    a collective
nan       gradients that are no numbers; with checkpoints, once there is one

digest-RANK, in the folder --out, is the digest of parameters, momentum and random state at the end; steps-RANK has the
steps that came out of the loop and the process that they came from, batches-RANK these steps and the batch of each.
"""

import argparse
import hashlib
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import p2pstate

STEP_S = 0.01


class Odd(BaseException):  # as torch.distributed.checkpoint.CheckpointException is
    def __init__(self, first: int, second: int) -> None:
        super().__init__("odd")

    def __str__(self) -> str:
        raise RuntimeError("cannot be shown")

    def __reduce__(self) -> Any:
        raise TypeError("cannot be copied")


class Mishaps:
    def __init__(self, specs: list[str], rank: int, out: Path) -> None:
        parsed = [spec.split(":") for spec in specs]
        self._at = {(int(step), kind) for step, of, kind in parsed if int(of) == rank}
        self._out = out
        self.step = 0
        self.spoils = False
        self.saves = False  # there will be checkpoints

    def here(self, where: str) -> None:
        for step, kind in self._at:
            of, what = kind.split("-")
            if step != self.step or of != where or (of != "both" and not self._first(f"mishap-{step}-{kind}")):
                continue
            getattr(self, f"_{what}")()

    def _first(self, name: str) -> bool:
        try:
            os.close(os.open(self._out / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _die(self) -> None:
        time.sleep(0.3)  # until others are stopped
        os.kill(os.getpid(), signal.SIGKILL)

    def _lock(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def _loop(self) -> None:
        while True:
            pass

    def _gil(self) -> None:
        re.match("(a+)+$", "a" * 60 + "b")

    def _slow(self) -> None:
        time.sleep(8 * STEP_S)

    def _busy(self) -> None:
        with p2pstate.Replicator.expect("counting", 60):
            time.sleep(2)

    def _raise(self) -> None:
        raise ZeroDivisionError("raised on purpose")

    def _odd(self) -> None:
        raise Odd(1, 2)

    def _exit(self) -> None:
        sys.exit(3)

    def _interrupt(self) -> None:
        raise KeyboardInterrupt

    def _nan(self) -> None:
        self.spoils = True
        with p2pstate.Replicator.expect("a checkpoint", 60):
            while self.saves and not any(self._out.glob("disk/*/.metadata")):
                time.sleep(0.01)

    def _reduce(self) -> None:
        dist.all_reduce(torch.ones(1))


class Tap(nn.Module):
    """Does nothing, in the middle of forward and backward."""

    def __init__(self, mishaps: Mishaps) -> None:
        super().__init__()
        self._mishaps = mishaps

    def forward(self, x: Tensor) -> Tensor:
        self._mishaps.here("forward")
        self._mishaps.here("both")
        if x.requires_grad:
            x.register_hook(lambda grad: self._mishaps.here("backward"))
        return x + 0


class Data:
    def __init__(self, mishaps: Mishaps) -> None:
        self.position, self._mishaps = 0, mishaps

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.position += 1
            self._mishaps.step = self.position
            self._mishaps.here("fetch")
            yield torch.full((2, 8), float(self.position % 7))


def build(args: argparse.Namespace, mishaps: Mishaps) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    halves = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2)]
    module = nn.Sequential(halves[0], Tap(mishaps), nn.Dropout(0.2), halves[1])
    if args.fsdp:
        for half in halves:
            fully_shard(half)
        return module, fully_shard(module)
    return module, nn.parallel.DistributedDataParallel(module)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mishap", action="append", default=[])
    parser.add_argument("--on-nan", default="ignore")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--fsdp", action="store_true")
    args = parser.parse_args()
    p2pstate.init_process_group()
    rank = int(os.environ["RANK"])
    mishaps = Mishaps(args.mishap, rank, args.out)
    mishaps.saves = 0 < args.checkpoint_every < args.steps
    module, model = build(args, mishaps)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    disk = {"checkpoint": args.out / "disk", "checkpoint_every": args.checkpoint_every} if args.checkpoint_every else {}
    state = p2pstate.Replicator(model, optimizer, data=Data(mishaps), on_nan=args.on_nan, every=args.every, **disk)

    def train_step(batch: Tensor) -> Tensor:
        if state.rehearsing:
            mishaps.step = -1
        time.sleep(STEP_S)
        loss = model(batch * (rank + 1)).pow(2).mean()
        loss.backward()
        mishaps.here("grads")
        if mishaps.spoils:
            mishaps.spoils = False
            for parameter in model.parameters():
                parameter.grad.fill_(math.inf)  # of this rank alone
        optimizer.step()
        mishaps.here("after")
        optimizer.zero_grad()
        return loss.detach()

    seen = []

    def evaluate(step: int) -> None:
        noise = torch.rand(1)  # moves the random state of every rank
        dist.all_reduce(noise)
        mishaps.here("hook")
        model.eval()
        with torch.no_grad():
            loss = model(torch.ones(2, 8)).mean()
        model.train()
        dist.all_reduce(loss)
        seen.append((step, noise.item(), loss.item()))

    state.every(5, evaluate)
    for step, _ in state.run(train_step, steps=args.steps):
        assert step == mishaps.step or args.on_nan in ("skip", "rollback")
        mishaps.here("body")
        with open(args.out / f"steps-{rank}", "a") as file:
            file.write(f"{step} {os.getpid()}\n")
        with open(args.out / f"batches-{rank}", "a") as file:
            file.write(f"{step} {mishaps.step}\n")

    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for parameter in module.parameters():
        for tensor in (parameter.detach(), optimizer.state[parameter]["momentum_buffer"]):
            digest.update((tensor.to_local() if args.fsdp else tensor).contiguous().numpy().tobytes())
    for buffer in module.buffers():
        digest.update(buffer.numpy().tobytes())
    (args.out / f"seen-{rank}").write_text(repr(sorted(set(seen))))
    (args.out / f"digest-{rank}").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
