"""Trains a tiny model under p2prun, and hangs where it is told to: --hang STEP:RANK:KIND, each once.

stop      SIGSTOP in the middle of backward, in the thread that all others wait for
lock      a lock that nobody releases, in forward
loop      an endless loop in forward
gil       a C call that holds the interpreter's lock, in backward
loader    the data does not come
slow      a step that takes several times as long as others, which is no hang
busy      a step that takes as long as it has announced, which is none either
die       SIGKILL in backward
digest-RANK, in the folder --out, is the digest of parameters and momentum at the end.
"""

import argparse
import hashlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import p2pstate

STEP_S = 0.01


class Hangs:
    def __init__(self, specs: list[str], rank: int, out: Path) -> None:
        self._out = out
        parsed = [spec.split(":") for spec in specs]
        self._at = {(int(step), kind) for step, of, kind in parsed if int(of) == rank}
        self.step = 0

    def here(self, *kinds: str) -> str:
        """The kind of hang that is due here, if one of ``kinds`` is, and did not happen yet."""
        for kind in kinds:
            if (self.step, kind) in self._at:
                try:
                    os.close(os.open(self._out / f"hung-{self.step}-{kind}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                return kind
        return ""


class Data:
    def __init__(self, hangs: Hangs) -> None:
        self.position, self._hangs = 0, hangs

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        while True:
            self.position += 1
            self._hangs.step = self.position
            if self._hangs.here("loader"):
                threading.Event().wait()
            yield self.position, torch.full((2, 8), float(self.position % 7))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hang", action="append", default=[])
    args = parser.parse_args()
    p2pstate.init_process_group()
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hangs = Hangs(args.hang, rank, args.out)
    state = p2pstate.Replicator(model, optimizer, data=Data(hangs))

    def forward() -> None:
        kind = hangs.here("lock", "loop", "slow", "busy")
        if kind == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        while kind == "loop":
            pass
        if kind == "slow":
            time.sleep(8 * STEP_S)
        if kind == "busy":
            with state.expect("counting", 60):
                time.sleep(2)

    def backward() -> None:
        kind = hangs.here("stop", "gil", "die")
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "die":
            time.sleep(0.3)  # until others are stopped
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "gil":
            re.match("(a+)+$", "a" * 60 + "b")

    def train_step(batch: tuple[int, Tensor]) -> Tensor:
        _, values = batch
        if state.rehearsing:
            hangs.step = -1
        forward()
        time.sleep(STEP_S)
        loss = model(values * (rank + 1)).pow(2).mean()
        loss.register_hook(lambda grad: backward())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for step, _ in state.run(train_step, steps=args.steps):
        assert step == hangs.step

    digest = hashlib.sha256()
    for tensor in [*module.parameters(), *(optimizer.state[p]["momentum_buffer"] for p in module.parameters())]:
        digest.update(tensor.detach().numpy().tobytes())
    (args.out / f"digest-{rank}").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
