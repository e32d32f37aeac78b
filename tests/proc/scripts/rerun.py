"""A script that restarts in process: DDP, its own checkpoint file, no Replicator. See tests/proc/test_restartable.py.

Arguments: folder, steps, then what happens: STEP:RANK:KIND with KIND kill, raise or loop, once each.
"""

import gc
import os
import signal
import sys
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import p2pstate

OUT, NUM_STEPS, FAULTS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
SAVE_EVERY = 4
previous: "weakref.ref[Big] | None" = None


class Big:
    """What an attempt holds, as a model does."""

    def __init__(self) -> None:
        self.data = torch.zeros(1 << 20)


def due(step: int, rank: int, kind: str) -> bool:
    marker = OUT / f"{step}-{rank}-{kind}"
    if f"{step}:{rank}:{kind}" not in FAULTS or marker.exists():
        return False
    marker.touch()
    return True


@p2pstate.restartable(max_failures=1)
def train(num_steps: int) -> torch.Tensor:
    global previous
    assert previous is None or previous() is None, "the last attempt's objects are still there"
    big = Big()
    previous = weakref.ref(big)
    gc.disable()  # what is gone is gone because nobody holds it, or because the restart collects
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (OUT / f"attempts-{os.getpid()}").open("a").write(f"{rank}\n")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint, first = OUT / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    dist.barrier()  # nobody saves before everybody has loaded
    for step in range(first + 1, num_steps + 1):
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(4, 8)).square().mean()
        if due(step, rank, "kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if due(step, rank, "raise"):
            raise ValueError("once")
        while due(step, rank, "loop"):
            while True:
                time.sleep(0.01)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, OUT / "new.pt")
            (OUT / "new.pt").rename(checkpoint)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


if __name__ == "__main__":
    result = train(NUM_STEPS)
    torch.save(result, OUT / f"result-{dist.get_rank()}.pt")
