"""What one rank of the durable benchmark runs, under p2prun: windows of steps with saves of each kind, in turns.

Arguments: parallelism, number of parameters, rounds, file for the result, folder for checkpoints. Rank 0 writes the
medians of rank 0. Ours saves in the middle of a protected loop; the others are called after a step outside of any loop,
where p2pstate does nothing but forward collectives. What is saved in the background is saved while training goes on.
"""

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from overhead_model import Job, build
from overhead_saves import DcpSave, TorchSave, savers, stock_gloo_group
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import p2pstate
from p2pstate.durable.catalog import Found, list_checkpoints
from p2pstate.durable.resume import load
from p2pstate.durable.storage import Directory

DEADLINE_S = 300.0
WINDOW = 16  # steps of a protected loop
EVERY = WINDOW // 2  # ours saves in the middle of each, and at its end
NUM_STEPS_BETWEEN = 3  # of the others
BATCH = 8


class AsyncProcess:
    """dcp.async_save with a process of its own."""

    def __init__(self, save_state: Callable[[], dict[str, Any]], folder: Path, group: dist.ProcessGroup) -> None:
        self._state, self._folder, self._group, self._number = save_state, folder, group, 0
        self._saving: Any = None

    def save(self) -> None:
        self._number += 1
        self._saving = dcp.async_save(
            self._state(),
            checkpoint_id=self._folder / str(self._number),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )

    def is_done(self) -> bool:
        return bool((self._saving if hasattr(self._saving, "done") else self._saving.upload_completion).done())

    def finish(self) -> None:
        saving, self._saving = self._saving, None
        (saving if hasattr(saving, "result") else saving.upload_completion).result(DEADLINE_S)


def main() -> None:
    form, num_parameters, num_rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    result, scratch = Path(sys.argv[4]), Path(sys.argv[5])
    p2pstate.init_process_group(timeout=timedelta(seconds=DEADLINE_S))
    rank = dist.get_rank()
    job = build(form, num_parameters, BATCH, rank)
    ours = scratch / "ours"
    state = p2pstate.Replicator(job.model, job.optimizer, data=job.data, checkpoint=ours, checkpoint_every=EVERY)
    batches: Iterator[torch.Tensor] = iter(job.data)
    for _ in range(3):
        job.train_step(next(batches))  # the optimizer's state comes to exist

    scratch.mkdir(exist_ok=True)
    kinds: dict[str, Any] = savers(job, made(scratch / "others"), DEADLINE_S)
    kinds = {
        "dcp_save_s": kinds["dcp_save"],
        "dcp_async_thread_s": kinds["dcp_async_cached"],
        "dcp_async_process_s": AsyncProcess(job.state_dict, scratch / "process", stock_gloo_group(DEADLINE_S)),
        "torch_save_s": kinds["torch_save"],
    }
    stalls: dict[str, list[float]] = {name: [] for name in kinds}
    durable: dict[str, list[float]] = {name: [] for name in kinds}
    stall_s: list[float] = []
    stall_cpu_s: list[float] = []  # seconds of the processor, of the training thread
    agreeing = stock_gloo_group(DEADLINE_S)
    for number in range(num_rounds + 1):  # the first one makes folders, plans and memory come to exist
        settle_disk(rank)
        wall, processor = protected_window(state, job)
        if number:
            stall_s.append(added_by_save(wall))
            stall_cpu_s.append(added_by_save(processor))
        for name, saver in kinds.items():
            for _ in range(NUM_STEPS_BETWEEN):
                job.train_step(next(batches))
            settle_disk(rank)
            stalled_s, durable_s = time_save(saver, lambda: job.train_step(next(batches)), agreeing)
            if number:
                stalls[name].append(stalled_s)
                durable[name].append(durable_s)

    medians = {name: statistics.median(values) for name, values in stalls.items()}
    newest = next(found for found in list_checkpoints(Directory(ours)) if not found.problem)
    assert newest.manifest is not None
    load_s = statistics.median([time_load(newest, rank) for _ in range(num_rounds + 1)][1:])
    if rank == 0:
        found = {
            "state_bytes": newest.manifest.num_bytes,
            "stall_s": statistics.median(stall_s),
            "stall_cpu_s": statistics.median(stall_cpu_s),
            **medians,
            "durable_s": statistics.median(list(state.stats.saved_s)[2:]),
            "dcp_async_durable_s": statistics.median(durable["dcp_async_thread_s"]),
            "load_gbps": newest.manifest.num_bytes / load_s / 1e9,
            "num_saved": state.stats.num_saved,
            "num_saves_failed": state.stats.num_saves_failed,
        }
        result.write_text(json.dumps(found))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(scratch / "others", ignore_errors=True)


def time_save(saver: Any, train: Callable[[], object], group: dist.ProcessGroup) -> tuple[float, float]:
    """Seconds until training goes on, and until the save is complete on all ranks of ``group``."""
    began = time.monotonic()
    saver.save()
    stalled = time.monotonic()
    if not isinstance(saver, TorchSave | DcpSave):
        while not all_say(saver.is_done(), group):
            train()
        saver.finish()
    return stalled - began, time.monotonic() - began


def time_load(newest: Found, rank: int) -> float:
    """Seconds until all ranks have read their state."""
    dist.barrier()
    began = time.monotonic()
    load(newest, rank)
    dist.barrier()
    return time.monotonic() - began


def settle_disk(rank: int) -> None:
    """What a save has left to the kernel (torch.save all of it) is on disk before the next kind is measured."""
    if rank == 0:
        os.sync()
    dist.barrier()


def protected_window(state: Any, job: Job) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of each step of one loop, by step, and the processor's of this thread; without the first, which waits for
    nothing."""
    wall: dict[int, float] = {}
    processor: dict[int, float] = {}
    last, last_cpu = time.monotonic(), time.thread_time()
    for step, _ in state.run(job.train_step, steps=state.committed_step + WINDOW):
        now, now_cpu = time.monotonic(), time.thread_time()
        wall[step], last = now - last, now
        processor[step], last_cpu = now_cpu - last_cpu, now_cpu
    first = min(wall)
    del wall[first], processor[first]
    return wall, processor


def added_by_save(seconds: dict[int, float]) -> float:
    """What the steps of a save take longer than others: the one captured aside, and the first into its reserve."""
    usual = statistics.median(s for at, s in seconds.items() if at % EVERY not in (1, 2))
    with_save = [s for at, s in seconds.items() if at % EVERY in (1, 2)]
    return sum(with_save) - usual * len(with_save)


def all_say(what: bool, group: dist.ProcessGroup) -> bool:
    """Whether all ranks say so: they train equally many steps."""
    answer = torch.tensor(int(what))
    dist.all_reduce(answer, dist.ReduceOp.MIN, group)
    return bool(answer)


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    main()
