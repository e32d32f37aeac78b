"""The training of examples/train_gpt.py as it is written without p2pstate: torchrun, dcp.async_save every 10 steps.

In: the same arguments. Out: events of the same form as a p2prun run's, so that one timeline measures both.
"""

import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from recovery_events import Events, arguments, process_age_s
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from text_data import StdlibText, TextLoader
from train_gpt import build_model, build_optimizer

SAVE_EVERY = 10
NUM_KEPT = 2


class Checkpoints:
    """A new folder per save; a save is complete when its `.metadata` exists, which DCP writes last."""

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, others: dict[str, Any]):
        self._folder, self._model, self._optimizer, self._others = folder, model, optimizer, others
        self._group = dist.new_group(backend="gloo")  # on the training group an asynchronous save can hang
        self._saving: Any = None

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        mine = {name: part.state_dict() for name, part in self._others.items()}
        mine["rng"] = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
        return {"model": model, "optimizer": optimizer, f"rank{dist.get_rank()}": mine}

    def load(self) -> int:
        """The step of the newest complete save, 0 if there is none. All ranks load the same."""
        complete = [int(path.parent.name) for path in self._folder.glob("*/.metadata")]
        chosen = [max(complete, default=0)]
        dist.broadcast_object_list(chosen)
        (step,) = chosen
        if not step:
            return 0
        state = self._state()
        dcp.load(state, checkpoint_id=self._folder / str(step), process_group=self._group)
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        mine = state[f"rank{dist.get_rank()}"]
        for name, part in self._others.items():
            part.load_state_dict(mine[name])
        torch_state, python_state, numpy_state = mine["rng"]
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        return step

    def save(self, step: int) -> None:
        if self._saving is not None:
            self._saving.result()
        if dist.get_rank() == 0:
            for old in sorted(self._folder.glob("*"), key=lambda path: int(path.name))[:-NUM_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        folder = self._folder / str(step)
        self._saving = dcp.async_save(self._state(), checkpoint_id=folder, process_group=self._group)


def main() -> None:
    phases = {"import": process_age_s()}
    began = time.monotonic()
    args = arguments(__doc__)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    events = Events(args.events, rank)
    events.emit("worker_started", t=time.time() - process_age_s(), pid=os.getpid(), local_rank=0)
    phases["groups"] = time.monotonic() - began

    began = time.monotonic()
    model, net = build_model(args, torch.device("cpu"))
    optimizer, scheduler = build_optimizer(model, args.steps)
    loader = TextLoader(
        StdlibText(), context=args.context, batch=args.batch, rank=rank, num_ranks=num_ranks, seed=args.seed
    )
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1000 * args.seed + rank)
    phases["model"] = time.monotonic() - began

    began = time.monotonic()
    folder = args.out / "checkpoints"
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder, net, optimizer, {"scheduler": scheduler, "loader": loader})
    first = checkpoints.load()
    phases["load"] = time.monotonic() - began
    if events.newest_step:
        lost = max(0, events.newest_step - first)
        events.emit("recovery", version=[0, first], source="dcp", bytes=0, steps_lost=lost, phases=phases, epoch=0)
    for step, batch in enumerate(loader, start=first + 1):
        began = time.monotonic()
        loss = net(batch.tokens)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            checkpoints.save(step)
        seconds = time.monotonic() - began
        events.emit("step", step=step, seconds=seconds, protected=None, loss=loss.item())


if __name__ == "__main__":
    main()
