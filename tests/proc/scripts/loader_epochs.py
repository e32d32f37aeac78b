"""Several epochs of augmented samples with p2pstate.data.Loader. Run under p2prun, or alone, saving for itself.

In: ``--out FOLDER --workers N [--mixture] [--checkpoint FOLDER] [--kill STEP:RANK:WHAT ...]``, WHAT being rank, node or
worker (of the rank's loader). With ``--mixture`` the samples are those of three sources, in proportion to weights.
Out, in the folder: what examples/outcome.py compares; positions are the indices of the samples and the bits of what
their augmentation drew. Each kill happens once: a marker file says so. The step writes over its batch when it is done.

``--alone``: no process group; after each step model and position are saved together, as a script without p2pstate's
Replicator does it, and a next start goes on from there.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import p2pstate
from outcome import Recorder, save_final_state
from p2pstate.data import Loader, Mixture, Sampler, Shuffled

NUM_SAMPLES, GLOBAL_BATCH, EPOCHS = 23, 4, 3
BATCH_ALONE = 2
SOURCES, WEIGHTS = (13, 7, 3), (2, 1, 1)  # of a mixture; the smallest comes more than once in an epoch
CHECKPOINT_EVERY = 2


class Augmented(torch.utils.data.Dataset[Any]):
    """Index, and features that each stream has a part in."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return index, torch.tensor([index / NUM_SAMPLES, *drawn], dtype=torch.float64)


def recorded(indices: torch.Tensor, features: torch.Tensor) -> list[int]:
    return [*indices.tolist(), *struct.unpack(f"{features.numel()}q", features.numpy().tobytes())]


class Kills:
    def __init__(self, folder: Path, rank: int, loader: Loader, kills: list[str]) -> None:
        self._folder, self._rank, self._loader, self._kills = folder, rank, loader, set(kills)

    def reach(self, step: int) -> None:
        for what in ("worker", "rank", "node"):
            name = f"{step}:{self._rank}:{what}"
            if name not in self._kills:
                continue
            try:
                os.close(os.open(self._folder / f"killed-{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                continue
            if what == "node":
                os.kill(int(os.environ["P2PSTATE_AGENT_PID"]), signal.SIGKILL)
            for pid in self._loader.worker_pids[:1] if what == "worker" else [os.getpid()]:
                os.kill(pid, signal.SIGKILL)


def loader_of(rank: int, num_ranks: int, batch_size: int, *, workers: int, mixture: bool) -> Loader:
    order = Mixture(SOURCES, WEIGHTS, seed=7) if mixture else Shuffled(NUM_SAMPLES, seed=7)
    sampler = Sampler(order, batch_size, rank=rank, num_ranks=num_ranks, tail="pad")
    return Loader(Augmented(), batch_sampler=sampler, num_workers=workers, seed=7, epochs=EPOCHS)


def build(
    options: argparse.Namespace, rank: int, num_ranks: int, batch_size: int
) -> tuple[nn.Module, torch.optim.Optimizer, Loader]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = loader_of(rank, num_ranks, batch_size, workers=options.workers, mixture=options.mixture)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank)
    return model, optimizer, loader


def replicated(options: argparse.Namespace) -> None:
    p2pstate.init_process_group()
    rank = dist.get_rank()
    num_ranks = dist.get_world_size()
    model, optimizer, loader = build(options, rank, num_ranks, GLOBAL_BATCH // num_ranks)
    net = DistributedDataParallel(model)
    record, kills = Recorder(options.out, rank), Kills(options.out, rank, loader, options.kill)
    state = p2pstate.Replicator(
        net, optimizer, data=loader, checkpoint=options.checkpoint, checkpoint_every=CHECKPOINT_EVERY
    )

    def train_step(batch: list[torch.Tensor]) -> torch.Tensor:
        step = state.committed_step + 1
        if not state.rehearsing:
            record.delivered(step, recorded(*batch))
        loss = net(batch[1]).square().mean()
        if not state.rehearsing:
            kills.reach(step)
        loss.backward()
        for tensor in batch:
            tensor.zero_()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for step, loss in state.run(train_step):
        record.committed(step, loss.item())
        time.sleep(options.pace)
    save_final_state(options.out, rank, model, optimizer, loader)


def alone(options: argparse.Namespace) -> None:
    model, optimizer, loader = build(options, 0, 1, BATCH_ALONE)
    record, kills = Recorder(options.out, 0), Kills(options.out, 0, loader, options.kill)
    saved, step = options.out / "saved.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["rng"])
        step = state["step"]
    for batch in loader:
        step += 1
        record.delivered(step, recorded(*batch))
        loss = model(batch[1]).square().mean()
        kills.reach(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record.committed(step, loss.item())
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save({**state, "rng": torch.get_rng_state(), "step": step}, saved.with_suffix(".partial"))
        saved.with_suffix(".partial").replace(saved)
    save_final_state(options.out, 0, model, optimizer, loader)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--mixture", action="store_true")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--pace", type=float, default=0.0, metavar="SECONDS", help="of rest after each step")
    parser.add_argument("--kill", action="append", default=[], metavar="STEP:RANK:WHAT")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    (alone if options.alone else replicated)(options)


if __name__ == "__main__":
    main()
