"""Shipping between two ranks over a network that is slow, stands still, or changes a byte.

Each scenario runs in a process of its own: both ranks with their real lines, slots and connections, an agent for each
that serves memory, and a relay between them.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgpack
import torch
from groups_in_processes import run_alone
from torch.distributed import HashStore

from p2pstate.capture import Capturer
from p2pstate.groups.mesh import Mesh
from p2pstate.groups.tcp import TcpTransport
from p2pstate.image_format import read_image
from p2pstate.replicate import Shipper
from p2pstate.slots import Slot
from p2pstate.state import Collected, Leaf
from p2pstate.stats import ProtectionStats
from p2pstate.types import Part, Version
from p2pstate.vault import Vault
from p2pstate.worker.link import Link
from rendezvous.channel import Channel

HOST = "127.0.0.1"
DEADLINE_S = 40.0
RELAYED_BYTES = 1 << 16  # at a time
NUM_BYTES = 8 << 20
TWO_NODES = (0, 1)


class Relay:
    """Carries what rank 1 and rank 0 say to each other. ``on_bytes``: called with what rank 0 sent so far, and what
    comes next; may change it, and take its time. ``open``: while it is not set, nothing is carried at all."""

    def __init__(self, address: tuple[str, int], on_bytes: Callable[[int, bytearray], None]) -> None:
        self.open = threading.Event()
        self.open.set()
        self._on_bytes = on_bytes
        self._address = address
        self._server = socket.create_server((HOST, 0))
        self.address = self._server.getsockname()[:2]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        theirs, _ = self._server.accept()
        ours = socket.create_connection(self._address)
        threading.Thread(target=self._carry, args=(theirs, ours, lambda at, data: None), daemon=True).start()
        self._carry(ours, theirs, self._on_bytes)

    def _carry(self, source: socket.socket, to: socket.socket, on_bytes: Callable[[int, bytearray], None]) -> None:
        at = 0
        while data := bytearray(source.recv(RELAYED_BYTES)):
            self.open.wait(DEADLINE_S)
            on_bytes(at, data)
            at += len(data)
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)


class Rank:
    """One rank on a node of its own: what it has, and what its node keeps."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.vault = Vault(f"n{rank}")
        self.stats = ProtectionStats()
        self.errors: list[Exception] = []
        agent, sock = Channel.pair()
        agent.set_blocking()
        threading.Thread(target=self._serve, args=(agent,), daemon=True).start()
        self.link = Link(Channel(sock, blocking=True))
        self.capturer = Capturer(self.link, rank, TWO_NODES)
        self.shipper = Shipper(
            self.link, [1 - rank], [1 - rank], lambda epoch, error: self.errors.append(error), self.stats
        )
        self.mesh = Mesh(DEADLINE_S)
        self.transport = TcpTransport(1, self.mesh, DEADLINE_S)
        self.tensor = torch.full((NUM_BYTES // 4,), float(rank))

    def _serve(self, agent: Channel) -> None:
        while True:
            for message, _ in agent.receive():
                if message["t"] == "allocate":
                    _, fd = self.vault.allocate(Part.unpack(message["part"]), message["index"], message["num_bytes"])
                    agent.send({"t": "reply", "id": message["id"]}, (fd,))

    def capture(self, step: int, keep: Version | None) -> None:
        collected = Collected([Leaf("model.weight", self.tensor, (self.rank,))], f"step {step}".encode(), {})
        images = self.capturer.capture(collected, Version(1, step), keep)
        self.shipper.ship(images, keep, self.transport, time.monotonic())

    def kept(self, part: Part) -> dict[Version, tuple[float, float, bytes]]:
        """What this node's vault holds of a part, by version: smallest and largest value, plain values; verified."""
        out = {}
        for record in self.vault.records():
            if record.part == part and record.version:
                fd = self.vault.open(record.slot)
                assert fd is not None
                slot = Slot(fd)
                header = slot.header()
                assert header is not None
                assert slot.verify(header)
                leaves, values = read_image(torch.frombuffer(slot.body(header.num_bytes), dtype=torch.uint8))
                weight = leaves["model.weight"]
                out[record.version] = weight.min().item(), weight.max().item(), values
        return out


def two_ranks(on_bytes: Callable[[int, bytearray], None]) -> tuple[list[Rank], Relay]:
    ranks = [Rank(0), Rank(1)]
    stores = [HashStore(), HashStore()]
    relays: list[Relay] = []

    def introduce() -> None:
        """Rank 1 is told the relay's address instead of rank 0's."""
        relays.append(Relay(tuple(msgpack.unpackb(stores[0].get("address/0"))), on_bytes))
        stores[1].set("secret", stores[0].get("secret"))
        stores[1].set("address/0", msgpack.packb(relays[0].address))

    threads = [
        threading.Thread(target=ranks[r].mesh.connect, args=(stores[r], r, 2, HOST, DEADLINE_S)) for r in range(2)
    ]
    for thread in [*threads, introducing := threading.Thread(target=introduce)]:
        thread.start()
    for thread in [introducing, *threads]:
        thread.join()
    return ranks, relays[0]


# -- a slow buddy


def ship_slowly() -> dict[str, Any]:
    ranks, _ = two_ranks(lambda at, data: time.sleep(0.002))
    busy = 0
    for step in range(3):
        torch.set_num_threads(1 + step % 2)  # one thread hashes what it copies, several leave that to the shipper
        for rank in ranks:
            rank.capture(step, Version(1, step - 1) if step else None)
        before = [rank.tensor.clone() for rank in ranks]
        while not all(rank.shipper.wait(0) for rank in ranks):
            busy += 1
            for rank in ranks:
                rank.tensor += 1000.0  # what training does, right after the capture and all the time
        for rank, value in zip(ranks, before, strict=True):
            rank.tensor.copy_(value + 10.0)
    assert [rank.errors for rank in ranks] == [[], []]
    return {
        "busy": busy,
        "own": ranks[0].kept(Part.own(0)),
        "copy": ranks[1].kept(Part.own(0)),
        "other copy": ranks[0].kept(Part.own(1)),
    }


def test_state_that_changes_while_it_is_shipped_slowly_arrives_as_it_was_captured() -> None:
    found = run_alone(ship_slowly)
    assert found["busy"] > 10, "nothing was shipped while training went on"
    expected = {Version(1, step): (10.0 * step,) * 2 + (f"step {step}".encode(),) for step in (1, 2)}
    assert found["own"] == found["copy"] == expected
    assert found["other copy"] == {
        version: (low + 1, high + 1, values) for version, (low, high, values) in expected.items()
    }


# -- a buddy that stands still


def ship_to_a_standstill() -> dict[str, Any]:
    ranks, relay = two_ranks(lambda at, data: None)
    for rank in ranks:
        rank.capture(0, None)
    arrived = [rank.shipper.wait(DEADLINE_S) for rank in ranks]
    relay.open.clear()
    ranks[0].capture(1, Version(1, 0))  # rank 1 reads nothing, and sends nothing
    waited = [ranks[0].shipper.wait(0.01) for _ in range(20)]  # the votes of twenty steps
    complete = ranks[0].shipper.complete
    ranks[0].transport.cut()
    freed = ranks[0].shipper.wait(DEADLINE_S)
    return {
        "arrived": arrived,
        "waited": waited,
        "complete": complete,
        "freed": freed,
        "errors": [type(error).__name__ for error in ranks[0].errors],
        "copy": list(ranks[1].kept(Part.own(0))),
        "ward": list(ranks[0].kept(Part.own(1))),
    }


def test_buddy_that_stops_reading_stops_nobody_and_the_version_before_is_kept() -> None:
    found = run_alone(ship_to_a_standstill)
    assert found == {
        "arrived": [True, True],
        "waited": [False] * 20,
        "complete": Version(1, 0),
        "freed": True,
        "errors": ["TransferFailed"],
        "copy": [Version(1, 0)],
        "ward": [Version(1, 0)],
    }


# -- a byte that changes on its way


def ship_a_changed_byte() -> dict[str, Any]:
    changed: list[int] = []

    def change(at: int, data: bytearray) -> None:
        if not changed and at > NUM_BYTES // 2:
            data[0] ^= 1
            changed.append(at)

    ranks, _ = two_ranks(change)
    for rank in ranks:
        rank.capture(0, None)
    waited = [rank.shipper.wait(DEADLINE_S) for rank in ranks]
    return {
        "changed": len(changed),
        "waited": waited,
        "complete": [rank.shipper.complete for rank in ranks],
        "errors": [[str(error) for error in rank.errors] for rank in ranks],
        "kept": [[sorted(rank.kept(Part.own(owner))) for owner in range(2)] for rank in ranks],
    }


def test_byte_changed_on_the_way_is_detected_and_the_copy_never_published() -> None:
    found = run_alone(ship_a_changed_byte)
    assert found["changed"] == 1
    assert found["waited"] == [True, True]
    assert found["errors"][0] == []
    (error,) = found["errors"][1]
    assert "shard 0 arrived with another digest" in error
    first = Version(1, 0)
    assert found["kept"] == [[[first], [first]], [[], [first]]], "the copy of shard 0 on node 1 is the damaged one"
    assert found["complete"] == [first, Version(0, -1)], "the smallest vote says that it is not protected"
