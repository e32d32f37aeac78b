"""What protection costs on a CUDA card, and how long NCCL takes to be cut and connected again. One card is enough.

In: bytes of state, seconds per step. Out: figures on the way, and as the last line one JSON object. *capture*: a step
of matrix products, with and without the capture of the whole state beside it, in turns; each version is copied to
pinned slots and hashed, as the shipper does. *nccl*: processes that share the card, each as if it were a host of its
own; one is killed. Exit code 2 where there is no card.

exposed_s            median of what a step with a capture takes longer than one without
landed_s             from the end of a step to the last byte in the slot, hashed
protected_share      of the versions that were hashed before the step beside them ended
floor_copy_s         one copy of as many bytes from the card to pinned memory, nothing beside it
seen_s, freed_s      from the kill to the error, and from there to a free card (the slowest rank)
rebuilt_s            a new communicator without the dead rank
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Before this folder, which has a `rendezvous`, too.
sys.path[:0] = [str(HERE / "programs"), str(HERE.parent), str(HERE.parent / "examples")]

import torch  # noqa: E402
from torch.distributed import FileStore, PrefixStore, ProcessGroup  # noqa: E402

from devices import device_for  # noqa: E402
from p2pstate.cards.card import CudaCard  # noqa: E402
from p2pstate.cards.gather import Gatherer  # noqa: E402
from p2pstate.groups import nccl_settings  # noqa: E402
from p2pstate.groups.inner import Inner, card_inner  # noqa: E402
from p2pstate.groups.nccl import Communicator  # noqa: E402
from p2pstate.slots import HEADER_BYTES, Slot, digest_of  # noqa: E402
from p2pstate.state import Layout, Leaf  # noqa: E402

DEADLINE_S = 120.0
TIMEOUT = timedelta(seconds=DEADLINE_S)
SMALL_LEAVES = 2000  # of 16 KiB, beside the large ones
LARGE_BYTES = 256 << 20


def summary(plain_s: Sequence[float], protected_s: Sequence[float], landed_s: Sequence[float]) -> dict[str, Any]:
    """Of pairs of steps, one without a capture and one with it, and of how long each version took to be hashed."""
    step_s = statistics.median(plain_s)
    exposed_s = statistics.median(after - before for before, after in zip(plain_s, protected_s, strict=True))
    in_time = [landed <= step_s for landed in landed_s]
    return {
        "step_s": step_s,
        "exposed_s": exposed_s,
        "exposed_pct": 100 * exposed_s / step_s,
        "landed_s": statistics.median(landed_s),
        "protected_share": sum(in_time) / len(in_time),
        "num_versions": len(landed_s),
    }


def slot_of(num_bytes: int) -> Slot:
    fd = os.memfd_create("bench")
    os.ftruncate(fd, num_bytes + HEADER_BYTES)
    try:
        slot = Slot(fd)
    finally:
        os.close(fd)
    slot.populate()
    return slot


class Training:
    """Steps of about ``step_s``, each of which changes all of the state at its end."""

    def __init__(self, device: torch.device, num_bytes: int, step_s: float) -> None:
        self.device = device
        large = max(1, (num_bytes - SMALL_LEAVES * (16 << 10)) // LARGE_BYTES)
        sizes = [LARGE_BYTES // 4] * large + [4096] * SMALL_LEAVES
        self.state = [torch.randn(size, device=device) for size in sizes]
        self.leaves = [Leaf(f"{number:06d}", tensor, (0,)) for number, tensor in enumerate(self.state)]
        self._matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        self._num_products = 1
        self.step()
        began = time.monotonic()
        for _ in range(20):
            self._forward()
        torch.cuda.synchronize(device)
        self._num_products = max(1, round(step_s / ((time.monotonic() - began) / 20)))

    def _forward(self) -> None:
        for _ in range(self._num_products):
            torch.mm(self._matrix, self._matrix)

    def step(self, gatherer: Gatherer | None = None) -> None:
        """Forward and backward, then ``optimizer.step()`` behind the fence. Returns when the card has done it."""
        self._forward()
        if gatherer is not None:
            gatherer.fence()
        torch._foreach_mul_(self.state, 1.0001)
        torch.cuda.synchronize(self.device)


def capture(device: torch.device, num_bytes: int, step_s: float, num_pairs: int) -> dict[str, Any]:
    training = Training(device, num_bytes, step_s)
    layout, card = Layout.build(training.leaves), CudaCard(device)
    gatherer = Gatherer(card, lambda name: True)
    slots = [slot_of(layout.num_bytes) for _ in range(2)]
    regions = [torch.frombuffer(slot.body(), dtype=torch.uint8) for slot in slots]
    began = time.monotonic()
    for region in regions:
        card.pin(region)
    pin_s = (time.monotonic() - began) / 2
    on_card = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    began = time.monotonic()
    regions[0][: layout.num_bytes].copy_(on_card, non_blocking=True)
    torch.cuda.synchronize(device)
    floor_s = time.monotonic() - began
    del on_card
    plain_s: list[float] = []
    protected_s: list[float] = []
    landed_s: list[float] = []
    for number in range(num_pairs + 2):
        began = time.monotonic()
        training.step()
        between = time.monotonic()
        gatherer.begin()
        gatherer.write(layout, training.leaves, regions[number % 2], slots[number % 2])
        landing = gatherer.start()
        hasher = threading.Thread(
            target=hash_when_landed, args=(landing, slots[number % 2], layout.num_bytes, landed_s)
        )
        hasher.start()
        training.step(gatherer)
        ended = time.monotonic()
        hasher.join(DEADLINE_S)
        if number >= 2:  # the first ones warm up
            plain_s.append(between - began)
            protected_s.append(ended - between)
    found = summary(plain_s, protected_s, landed_s[2:])
    return {"state_bytes": layout.num_bytes, **found, "pin_s": pin_s, "floor_copy_s": floor_s}


def hash_when_landed(landing: Any, slot: Slot, num_bytes: int, took_s: list[float]) -> None:
    began = time.monotonic()
    while not landing.is_there():
        time.sleep(0.0005)
    landing.finish()
    digest_of(slot.body(num_bytes))
    took_s.append(time.monotonic() - began)


def member(line: Connection, rank: int, num_ranks: int, folder: str) -> None:
    nccl_settings.apply(os.environ)
    device = device_for("cuda", rank, share=True)

    def connected(members: int, name: str) -> Inner:
        store = PrefixStore(name, FileStore(f"{folder}/store", num_ranks))
        inner = card_inner(store, rank, members, 1)
        inner.join_card(Communicator(store, rank, range(members), device, TIMEOUT, name=name))
        return inner

    inner = connected(num_ranks, "first")
    line.send("connected")
    if rank == num_ranks - 1:
        time.sleep(DEADLINE_S)
    group: ProcessGroup = inner.group
    group.allreduce([torch.ones(1 << 20, device=device)]).wait()
    queued = torch.cuda.current_stream().record_event()
    killed_at = line.recv()
    while inner.error() is None:
        time.sleep(0.001)
    seen_at = time.monotonic()
    inner.cut()
    while not queued.query():
        time.sleep(0.001)
    freed_at = time.monotonic()
    inner.release().wait(DEADLINE_S)
    line.send("free")
    line.recv()
    began = time.monotonic()
    connected(num_ranks - 1, "second")
    line.send([seen_at - killed_at, freed_at - seen_at, time.monotonic() - began])


def nccl(num_ranks: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="p2p-bench-") as folder:
        lines, processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=member, args=(theirs, rank, num_ranks, folder), daemon=True)
            process.start()
            lines.append(ours)
            processes.append(process)
        try:
            for line in lines:
                hear(line)
            victim = processes[-1].pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            killed_at = time.monotonic()
            for line in lines[:-1]:
                line.send(killed_at)
            for line in lines[:-1]:
                hear(line)
            for line in lines[:-1]:
                line.send("again")
            rows = [hear(line) for line in lines[:-1]]
        finally:
            for process in processes:
                process.kill()
                process.join(DEADLINE_S)
    seen, freed, rebuilt = (max(row[index] for row in rows) for index in range(3))
    return {"num_ranks": num_ranks, "seen_s": seen, "freed_s": freed, "rebuilt_s": rebuilt}


def hear(line: Connection) -> Any:
    if not line.poll(DEADLINE_S):
        raise SystemExit(f"a process says nothing for {DEADLINE_S:g} s")
    return line.recv()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--state-gb", type=float, default=8.0, help="bytes of state, in 1e9")
    parser.add_argument("--step-s", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4, help="processes that share the card for the NCCL figures")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/cards.py needs a CUDA card, and there is none here", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    result: dict[str, Any] = {"card": torch.cuda.get_device_name(device), "torch": torch.__version__}
    result["nccl"] = nccl(options.ranks)
    print(result["nccl"], flush=True)
    result["capture"] = capture(device, int(options.state_gb * 1e9), options.step_s, options.steps)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
