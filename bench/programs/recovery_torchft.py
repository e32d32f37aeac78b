"""The training of examples/train_gpt.py with torchft: data-parallel replica groups of one rank, healed by each other.

In: the same arguments; TORCHFT_LIGHTHOUSE, and a rendezvous id that ends with the number of this replica group. Out:
events of the same form as a p2prun run's. As torchft's own examples have it, each group has a torchrun of its own,
which starts it again; a restarted group gets model and optimizer from another one.
"""

import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import numpy as np
import torch
from recovery_events import Events, arguments, process_age_s
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from gpt import GPT, GPTConfig
from text_data import StdlibText, TextLoader
from train_gpt import build_optimizer

TIMEOUT = timedelta(seconds=5)  # of gloo: survivors wait so long for a group that is gone; a minute is its default


def main() -> None:
    phases = {"import": process_age_s()}
    began = time.monotonic()
    args = arguments(__doc__)
    rank = int(os.environ["TORCHELASTIC_RUN_ID"].removeprefix("node"))
    events = Events(args.events, rank)
    events.emit("worker_started", t=time.time() - process_age_s(), pid=os.getpid(), local_rank=0)

    torch.manual_seed(args.seed)
    net = GPT(GPTConfig(num_layers=args.num_layers, width=args.width, context=args.context))
    optimizer, scheduler = build_optimizer(net, args.steps)
    parts: dict[str, Any] = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    manager = Manager(
        ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: [parts[name].load_state_dict(state[name]) for name in parts],
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=args.num_replicas - 1,
        timeout=TIMEOUT,
        replica_id=f"group{rank}-",
    )
    model, managed = DistributedDataParallel(manager, net), Optimizer(manager, optimizer)
    loader = TextLoader(
        StdlibText(), context=args.context, batch=args.batch, rank=rank, num_ranks=args.num_replicas, seed=args.seed
    )
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1000 * args.seed + rank)
    phases["model"] = time.monotonic() - began

    began, healing = time.monotonic(), bool(events.newest_step)
    for batch in loader:
        turn_began = time.monotonic()
        managed.zero_grad()
        loss = model(batch.tokens)
        loss.backward()
        before = manager.current_step()
        managed.step()
        step = manager.current_step()
        if step == before:
            continue  # a group was lost meanwhile: the step does not count
        scheduler.step()
        if healing:
            phases["join"] = time.monotonic() - began
            events.emit("recovery", version=[0, step], source="peer", bytes=0, steps_lost=0, phases=phases, epoch=0)
            healing = False
        seconds = time.monotonic() - turn_began
        events.emit("step", step=step, seconds=seconds, protected=None, loss=loss.item())


if __name__ == "__main__":
    main()
