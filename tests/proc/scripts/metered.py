"""A loop with delays of known length (the DELAY_* variables, in seconds): the second batch, the copy of the first
version, a phase after step 3, each rehearsal, the last save. In each step rank SLOW_RANK takes twice as long as the
others. CHECKPOINT names a folder for checkpoints, TRACKED a file for what a tracker is told last, TOOK a file in which
each rank tells at its end how long each of these delays, with what it delayed, took on this machine in all."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import p2pstate
from p2pstate.replicate import Shipper
from p2pstate.saving import Saving

STEP_S = 0.05
SLOW_RANK = int(os.environ.get("SLOW_RANK", "-1"))
DELAYS = ("BATCH", "COPY", "PHASE", "REHEARSAL", "SAVE")
BATCH_S, COPY_S, PHASE_S, REHEARSAL_S, SAVE_S = (float(os.environ.get(f"DELAY_{name}", "0")) for name in DELAYS)

took: defaultdict[str, float] = defaultdict(float)


@contextmanager
def timed(name: str, delay_s: float) -> Iterator[None]:
    began = time.monotonic()
    time.sleep(delay_s)
    try:
        yield
    finally:
        took[name] += time.monotonic() - began


class Batches:
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> int:
        with timed("batch", BATCH_S if self.position == 1 else 0.0):
            self.position += 1
            return self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def delay_first_copy() -> None:
    ship = Shipper._do
    delays = [COPY_S]

    def slow(*args: Any) -> Any:
        if not delays:
            return ship(*args)
        with timed("copy", delays.pop()):
            return ship(*args)

    Shipper._do = slow  # type: ignore[method-assign]


def delay_last_save() -> None:
    save_last = Saving.save_last

    def slow(*args: Any) -> Any:
        with timed("save", SAVE_S):
            return save_last(*args)

    Saving.save_last = slow  # type: ignore[method-assign]


delay_first_copy()
if SAVE_S:
    delay_last_save()
p2pstate.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = p2pstate.Replicator(model, optimizer, data=Batches(), checkpoint=os.environ.get("CHECKPOINT"))


if "TRACKED" in os.environ:
    state.track(lambda step, values: Path(os.environ["TRACKED"]).write_text(json.dumps([step, dict(values)])), every=4)


def train_step(batch: int) -> None:
    time.sleep(REHEARSAL_S if state.rehearsing else 2 * STEP_S if dist.get_rank() == SLOW_RANK else STEP_S)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


for step, _ in state.run(train_step, steps=int(os.environ["STEPS"])):
    if step == 3:
        with state.expect("evaluation", 60), timed("phase", PHASE_S):
            pass
if "TOOK" in os.environ:
    Path(f"{os.environ['TOOK']}{dist.get_rank()}").write_text(json.dumps(took))
print("goodput", state.goodput().ratio, state.goodput().wall_s)
