"""A loop of any script with torch.save, measured: DIRECTORY, the step at which it dies once, delays of known length.
How long each of them took on this machine is written into DIRECTORY/took, a line for each."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from p2pstate.observe import RunMeter

NUM_STEPS, STEP_S, SAVE_S, BATCH_S = 20, 0.05, 0.5, 0.4


@contextmanager
def timed(name: str, delay_s: float) -> Iterator[None]:
    began = time.monotonic()
    time.sleep(delay_s)
    yield
    with (folder / "took").open("a") as file:
        file.write(f"{name} {time.monotonic() - began}\n")


def batches() -> list[int]:
    time.sleep(BATCH_S)
    return list(range(NUM_STEPS))


folder, dies_at = Path(sys.argv[1]), int(sys.argv[2])
saved, died = folder / "model.pt", folder / "died"
model = torch.nn.Linear(4, 4)
first = torch.load(saved)["step"] + 1 if saved.exists() else 1

with RunMeter(folder) as meter:
    for number, _ in enumerate(meter.fetching(iter(batches())), start=first):
        if number > NUM_STEPS:
            break
        with meter.step(number):
            with timed("step", STEP_S):
                pass
            if number == dies_at and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if number % 5 == 0:
            with meter.saving(), timed("save", SAVE_S):
                torch.save({"step": number, "model": model.state_dict()}, saved)
    with meter.phase("evaluation"), timed("phase", 0.3):
        pass
