"""Two nodes with two ranks each, as vaults only: versions of a made-up state, captured by the real capturer."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from p2pstate.capture import Capturer
from p2pstate.durable.catalog import Found, find
from p2pstate.durable.dcp_write import write_shares
from p2pstate.durable.division import divide_version
from p2pstate.durable.manifest import Manifest
from p2pstate.durable.publish import publish_checkpoint
from p2pstate.durable.storage import Directory, Storage
from p2pstate.slots import Slot, digest_of
from p2pstate.state import Collected, Leaf
from p2pstate.state.encoding import encode
from p2pstate.types import Part, Version
from p2pstate.vault import Vault

PLACES = (0, 0, 1, 1)
ROWS = (3, 3, 3, 1)  # of the sharded matrix, by rank
NODES = ("n0", "n1")
HOME = {rank: NODES[place] for rank, place in enumerate(PLACES)}


class Sharded:
    """As much of a DTensor as capturing needs."""

    def __init__(self, size: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        self.shape, self._spec = size, (size, offsets)
        self.device_mesh = SimpleNamespace(mesh=torch.arange(len(PLACES)))
        self._chunk = SimpleNamespace(offsets=offsets, sizes=sizes)

    def __create_chunk_list__(self) -> list[Any]:
        return [self._chunk]


@dataclass
class FakeLink:
    vault: Vault

    def allocate(self, part: Part, index: int, num_bytes: int) -> int:
        return os.dup(self.vault.allocate(part, index, num_bytes)[1])


class Site:
    def __init__(self, *, reserve: bool = False) -> None:
        self.vaults = [Vault(node) for node in NODES]
        for vault in self.vaults:
            weakref.finalize(self, vault.close)
        self.capturers = [
            Capturer(FakeLink(self.vaults[place]), rank, PLACES, reserve=reserve)  # type: ignore[arg-type]
            for rank, place in enumerate(PLACES)
        ]

    def capture(self, step: int, keep: Version | None = None, *, set_aside: bool = False) -> Version:
        version = Version(1, step)
        for rank, capturer in enumerate(self.capturers):
            for image in capturer.capture(state(rank, step), version, keep, set_aside=set_aside):
                image.slot.complete(image.header(digest_of(image.slot.body(image.num_bytes))))
        return version

    def slot(self, node: int, slot_id: int) -> Slot:
        fd = self.vaults[node].open(slot_id)
        assert fd is not None
        return Slot(fd)

    def write(self, directory: Path, version: Version) -> dict[int, str]:
        """What all nodes do before the checkpoint is published; returns place -> digest."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(exist_ok=True)
        return self.write_to(Directory(directory.parent), directory.name, version)

    def write_to(self, storage: Storage, save: str, version: Version) -> dict[int, str]:
        records = [r for vault in self.vaults for r in vault.records() if r.version == version]
        shares = divide_version(HOME, records)
        assert not isinstance(shares, str), shares
        digests = {}
        for place, node in enumerate(NODES):
            given = [(share, self.slot(place, share.slot)) for share in shares[node]]
            digests[place], _ = write_shares(storage, save, place, node, version, len(PLACES), given)
        return digests

    def save(self, directory: Path, version: Version) -> Manifest:
        return publish(directory, self.write(directory, version), version)


def publish(directory: Path, digests: dict[int, str], version: Version) -> Manifest:
    return publish_to(Directory(directory.parent), directory.name, digests, version)


def publish_to(storage: Storage, save: str, digests: dict[int, str], version: Version) -> Manifest:
    return publish_checkpoint(storage, save, digests, ("run", "nonce"), version, len(PLACES), 0.0, "test")


def at(directory: Path) -> Found:
    """The checkpoint in this directory."""
    return find(Directory(directory.parent), directory.name)


def matrix(step: int) -> torch.Tensor:
    return torch.arange(40, dtype=torch.float32).reshape(10, 4) + 100 * step


def bias(step: int) -> torch.Tensor:
    return torch.full((5,), float(step), dtype=torch.bfloat16)


def mean(rank: int, step: int) -> torch.Tensor:
    return torch.tensor([rank + 0.5, step])


def values(rank: int, step: int) -> bytes:
    group = {"params": ["model/w"], "values": {"lr": 0.5, "betas": (0.9, 0.99)}}
    return encode({"rank": rank, "step": step, "optimizers": {"optimizer": {"groups": [group]}}})


def state(rank: int, step: int) -> Collected:
    """A matrix split unevenly by rows, its optimizer state, a bias that all ranks hold, statistics of each rank."""
    begin, count = sum(ROWS[:rank]), ROWS[rank]
    rows = matrix(step)[begin : begin + count].clone()
    whole: Any = Sharded((10, 4), (begin, 0), (count, 4))
    leaves = [
        Leaf("model/bias", bias(step), (0, 1, 2, 3)),
        Leaf("model/norm.mean", mean(rank, step), (rank,)),
        Leaf("model/w", rows, (rank,), whole),
        Leaf("optimizer/model/w/exp_avg", rows * 2, (rank,), whole),
        Leaf("optimizer/model/w/step", torch.tensor(float(step)), (rank,)),
    ]
    return Collected(leaves, values(rank, step), {"model/head.w": "model/w", "model/alias": "model/bias"})
