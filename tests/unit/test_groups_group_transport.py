"""Bulk transfers over a process group: gloo here, which works on host memory as it is."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from groups_in_processes import run_ranks, start_ranks
from torch.distributed import FileStore

from p2pstate.groups.group_transport import CHUNK_BYTES, GroupTransport, _Turn
from p2pstate.groups.inner import build_inner
from p2pstate.groups.sockets import Connections
from p2pstate.groups.transport import Incoming, Outgoing, Payload, TransferFailed

SILENCE_S = 600.0
NUM_RANKS = 3


def transport_of(rank: int, num_ranks: int, folder: str) -> GroupTransport:
    store = FileStore(f"{folder}/store", num_ranks)
    timeout = timedelta(seconds=SILENCE_S)
    inner = build_inner(store, rank, num_ranks, "127.0.0.1", 1, timeout, Connections())
    kept.append(GroupTransport(inner, torch.device("cpu"), SILENCE_S))
    return kept[-1]


kept: list[GroupTransport] = []  # the destructor of a group with an operation in flight waits for it


def body_of(rank: int, num_bytes: int) -> bytearray:
    return bytearray((rank * 7 + i) % 251 for i in range(251)) * (num_bytes // 251 + 1)


class FakeStreams:
    """A card's, on the host: what is queued runs at once. ``marks``: how often anything was stored."""

    def __init__(self) -> None:
        self.marks = 0

    def loading(self) -> Any:
        return contextlib.nullcontext()

    storing = loading

    def stored(self) -> FakeStreams:
        self.marks += 1
        return self

    def query(self) -> bool:
        return True


def exchange_all(_line: Any, rank: int, num_ranks: int, folder: str, on_card: bool) -> list[str]:
    """Every rank sends to every other, each another number of chunks; returns what was wrong."""
    transport = transport_of(rank, num_ranks, folder)
    streams = FakeStreams()
    if on_card:
        transport._streams = streams  # type: ignore[assignment]
    sizes = [0, 100, 2 * CHUNK_BYTES + 5]
    wrong, bodies, told = [], {}, []

    def expect(sender: int) -> Incoming:
        def accept(head: bytes, num_bytes: int) -> memoryview:
            if head != f"{sender} to {rank}".encode() or num_bytes != sizes[sender]:
                wrong.append(f"{head!r} and {num_bytes} bytes from {sender}")
            bodies[sender] = bytearray(num_bytes)
            return memoryview(bodies[sender])

        def arrived(computed: bytes, announced: bytes) -> None:
            right = body_of(sender, sizes[sender])[: sizes[sender]]
            if bodies[sender] != right or not computed == announced == xxhash.xxh3_128_digest(right):
                wrong.append(f"the body of {sender}")

        return Incoming(sender, accept, arrived)

    others = [other for other in range(num_ranks) if other != rank]
    for _ in range(3):
        payload = Payload(memoryview(body_of(rank, sizes[rank]))[: sizes[rank]], on_digest=told.append)
        transport.exchange(
            [Outgoing(other, f"{rank} to {other}".encode(), payload) for other in others], list(map(expect, others))
        )
    if len(told) != 3:
        wrong.append(f"hashed {len(told)} times")
    buffers = {buffer for _, _, buffer in transport._staging}
    if (buffers, streams.marks > 0) != (({0, 1}, True) if on_card else (set(), False)):
        wrong.append(f"went through the buffers {buffers}")
    return wrong


@pytest.mark.parametrize("on_card", [False, True])
def test_messages_of_any_number_of_chunks_arrive_from_and_to_every_rank(on_card: bool, tmp_path: Path) -> None:
    assert run_ranks(exchange_all, tmp_path, NUM_RANKS, on_card) == [[]] * NUM_RANKS


class BrokenInner:
    epoch = 1

    def __init__(self, says: str | None) -> None:
        self.says = says

    def error(self) -> str | None:
        return self.says

    def cut(self) -> None:
        """Nothing is connected."""


class Never:
    def query(self) -> bool:
        return False


@pytest.mark.parametrize(("cut", "what"), [(True, "the round is over"), (False, "NCCL reports REMOTE_ERROR")])
def test_wait_for_a_card_ends_with_a_cut_or_with_an_error_of_nccl(cut: bool, what: str) -> None:
    inner = BrokenInner(None if cut else what)
    transport = GroupTransport(inner, torch.device("cpu"), SILENCE_S)  # type: ignore[arg-type]
    if cut:
        threading.Timer(0.05, transport.cut).start()
    with pytest.raises(TransferFailed, match=what):
        transport._end(_Turn([], [], Never()))


def expected(sender: int) -> Incoming:
    return Incoming(sender, lambda head, num_bytes: memoryview(bytearray(num_bytes)), lambda *digests: None)


def blocked(line: Any, rank: int, num_ranks: int, folder: str, cut: bool) -> str:
    transport = transport_of(rank, num_ranks, folder)
    line.send("connected")
    if rank == 0:
        time.sleep(SILENCE_S)
    if cut:
        threading.Timer(0.2, transport.cut).start()
    try:
        transport.exchange([Outgoing(0, b"", Payload(memoryview(bytearray(64 << 20))))], [expected(0)])
    except TransferFailed as error:
        return str(error)
    return "it went on"


def test_cut_frees_an_exchange_whose_peer_takes_no_part(tmp_path: Path) -> None:
    children = start_ranks(blocked, tmp_path, 2, True)
    try:
        assert [child.hear() for child in children] == ["connected"] * 2
        assert "failed" in children[1].result()
    finally:
        for child in children:
            child.end()


def test_peer_killed_frees_the_other_at_once(tmp_path: Path) -> None:
    children = start_ranks(blocked, tmp_path, 2, False)
    try:
        assert [child.hear() for child in children] == ["connected"] * 2
        os.kill(children[0].pid, signal.SIGKILL)
        assert "failed" in children[1].result()
    finally:
        for child in children:
            child.end()
