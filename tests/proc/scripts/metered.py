"""A loop with delays of known length (the DELAY_* variables, in seconds): the second batch, the copy of the first
version, a phase after step 3, and each rehearsal. CHECKPOINT names a folder for checkpoints, TRACKED a file for what a
tracker is told last."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import p2pstate
from p2pstate.replicate import Shipper

STEP_S = 0.05
DELAYS = ("BATCH", "COPY", "PHASE", "REHEARSAL")
BATCH_S, COPY_S, PHASE_S, REHEARSAL_S = (float(os.environ.get(f"DELAY_{name}", "0")) for name in DELAYS)


class Batches:
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> int:
        self.position += 1
        if self.position == 2:
            time.sleep(BATCH_S)
        return self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def delay_first_copy() -> None:
    ship = Shipper._do
    delays = [COPY_S]

    def slow(*args: Any) -> Any:
        if delays:
            time.sleep(delays.pop())
        return ship(*args)

    Shipper._do = slow  # type: ignore[method-assign]


delay_first_copy()
p2pstate.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = p2pstate.Replicator(model, optimizer, data=Batches(), checkpoint=os.environ.get("CHECKPOINT"))


if "TRACKED" in os.environ:
    state.track(lambda step, values: Path(os.environ["TRACKED"]).write_text(json.dumps([step, dict(values)])), every=4)


def train_step(batch: int) -> None:
    time.sleep(REHEARSAL_S if state.rehearsing else STEP_S)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


for step, _ in state.run(train_step, steps=int(os.environ["STEPS"])):
    if step == 3:
        with state.expect("evaluation", 60):
            time.sleep(PHASE_S)
print("goodput", state.goodput().ratio, state.goodput().wall_s)
