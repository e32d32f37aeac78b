"""Groups over NCCL: four ranks on one card, each as if it were a host of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from groups_in_processes import end_all, registry_of, start_ranks

from devices import device_for
from p2pstate.groups import nccl_settings
from p2pstate.groups.group import P2PGroup
from p2pstate.groups.group_transport import CARD_CHUNK_BYTES, GroupTransport
from p2pstate.groups.registry import Registry
from p2pstate.groups.status import Status
from p2pstate.groups.transport import Incoming, Outgoing, Payload

NUM_RANKS = 4
TIMEOUT = timedelta(seconds=120)
DEADLINE_S = 60.0


def begin(rank: int, num_ranks: int, folder: str) -> tuple[Registry, Status, torch.device]:
    nccl_settings.apply(os.environ)
    device = device_for("cuda", rank, share=True)
    status = Status()
    registry = registry_of(rank, num_ranks, folder, status)
    registry.card = device
    status.connect(1)
    return registry, status, device


def reduced(group: P2PGroup, device: torch.device) -> float:
    tensor = torch.ones(1000, device=device)
    group.allreduce([tensor]).wait()
    return float(tensor.sum().item()) / 1000


def wait_until(is_so: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.005)
    return time.monotonic() - began


def collectives(_line: Any, rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    registry, status, device = begin(rank, num_ranks, folder)
    group = registry.create((), rank, TIMEOUT)
    found: dict[str, Any] = {"sum": reduced(group, device)}
    out = torch.empty(num_ranks, device=device)
    group._allgather_base(out, torch.full((1,), float(rank), device=device)).wait()
    found["gathered"] = out.tolist()
    host = torch.ones(1)
    group.allreduce([host]).wait()
    found["host"] = host.item()
    blocking = dist.AllreduceOptions()
    blocking.asyncOp = False  # as dist.all_reduce asks for
    own_stream = torch.ones(1, device=device)
    if (handle := group.allreduce([own_stream], blocking)) is not None:
        handle.wait()
    found["own_stream"] = own_stream.item()
    received = torch.empty(1, device=device)
    group._start_coalescing(device)
    group.send([torch.full((1,), float(rank), device=device)], (rank + 1) % num_ranks, 0)
    group.recv([received], (rank - 1) % num_ranks, 0)
    group._end_coalescing(device).wait()
    found["received"] = received.item()
    future = group.allreduce([out]).get_future()
    future.wait()
    found["future"] = out.tolist()
    for where in (device, torch.device("cpu")):
        options = dist.BarrierOptions()
        options.device, options.asyncOp = where, False
        group.barrier(options).wait()
    group.shutdown()
    found["error"] = status.error
    return found


def test_collectives_over_nccl_are_right_on_every_rank(tmp_path: Path) -> None:
    children = start_ranks(collectives, tmp_path, NUM_RANKS)
    try:
        for rank, found in enumerate(child.result() for child in children):
            assert found == {
                "sum": NUM_RANKS,
                "gathered": [0, 1, 2, 3],
                "host": NUM_RANKS,
                "own_stream": NUM_RANKS,
                "received": (rank - 1) % NUM_RANKS,
                "future": [0, 4, 8, 12],
                "error": None,
            }
    finally:
        end_all(children)


def survive(line: Any, rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Round 1 until rank 3 is stopped or dies; then round 2 with whoever says so over ``line``."""
    registry, status, device = begin(rank, num_ranks, folder)
    group = registry.create((), rank, TIMEOUT)
    sums = [reduced(group, device)]
    line.send("connected")
    kept = torch.arange(1000.0, device=device)
    if rank == num_ranks - 1:
        time.sleep(DEADLINE_S)
    tensor = torch.ones(1000, device=device)
    group.allreduce([tensor]).wait()
    queued = torch.cuda.current_stream(device).record_event()
    if line.recv() == "abort":  # as the control plane says when a rank hangs
        status.fail(RuntimeError("rank 3 hangs"), 1)
    seen_s = wait_until(lambda: status.error is not None)
    freed_s = wait_until(queued.query)
    registry.release()
    line.send("free")
    assert line.recv() == "again"
    registry.world_size = num_ranks - 1
    status.connect(2)
    again = P2PGroup("again", tuple(range(num_ranks - 1)), rank, TIMEOUT, status)
    again.card = device
    began = time.monotonic()
    again.attach(registry._build("again", again.members, 2, TIMEOUT, device))
    rebuilt_s = time.monotonic() - began
    sums.append(reduced(again, device))
    intact = bool(torch.equal(kept.cpu(), torch.arange(1000.0)))
    return {"sums": sums, "intact": intact, "seen_s": seen_s, "freed_s": freed_s, "rebuilt_s": rebuilt_s}


def survivors_go_on(tmp_path: Path, number: int, word: str) -> None:
    children = start_ranks(survive, tmp_path, NUM_RANKS)
    try:
        assert [child.hear() for child in children] == ["connected"] * NUM_RANKS
        os.kill(children[-1].pid, number)
        for child in children[:-1]:
            child.say(word)
        assert [child.hear() for child in children[:-1]] == ["free"] * (NUM_RANKS - 1)
        for child in children[:-1]:
            child.say("again")
        for found in [child.result() for child in children[:-1]]:
            assert found["sums"] == [NUM_RANKS, NUM_RANKS - 1]
            assert found["intact"], "what was on the card before is not there any more"
            print({key: value for key, value in found.items() if key.endswith("_s")})
    finally:
        end_all(children)


def test_death_of_a_peer_is_seen_and_frees_the_card_and_the_same_processes_go_on(tmp_path: Path) -> None:
    survivors_go_on(tmp_path, signal.SIGKILL, "wait")


def test_peer_that_hangs_is_cut_and_the_same_processes_go_on(tmp_path: Path) -> None:
    survivors_go_on(tmp_path, signal.SIGSTOP, "abort")


def shipped(_line: Any, rank: int, num_ranks: int, folder: str) -> list[str]:
    registry, _, _ = begin(rank, num_ranks, folder)
    transport = registry._build_replication(tuple(range(num_ranks)), 1)
    if not isinstance(transport, GroupTransport) or transport.name != "nccl":
        return [f"bulk state goes over {transport.name}"]
    wrong: list[str] = []
    size = 3 * CARD_CHUNK_BYTES + 5
    sender, to = (rank - 1) % num_ranks, (rank + 1) % num_ranks
    body = bytearray(size)

    def arrived(computed: bytes, announced: bytes) -> None:
        right = xxhash.xxh3_128_digest(bytes([sender + 1]) * size)
        if not computed == announced == right:
            wrong.append(f"the body of {sender}")

    for _ in range(3):
        payload = Payload(memoryview(bytearray(bytes([rank + 1]) * size)))
        incoming = Incoming(sender, lambda head, num_bytes: memoryview(body), arrived)
        transport.exchange([Outgoing(to, b"head", payload)], [incoming])
    return wrong


def test_bulk_state_over_nccl_arrives_whole(tmp_path: Path) -> None:
    children = start_ranks(shipped, tmp_path, NUM_RANKS)
    try:
        assert [child.result() for child in children] == [[]] * NUM_RANKS
    finally:
        end_all(children)
