"""recover.py: bytes that are whole, and of something else than the plan says, are as bad as damaged ones."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from p2pstate.capture import Capturer
from p2pstate.plan_recovery import Fetch, Plan
from p2pstate.recover import _LocalSlots, _verify
from p2pstate.slots import Slot, digest_of
from p2pstate.state import Collected, Leaf
from p2pstate.types import Part, Version
from p2pstate.vault import Vault

NODE, V6, V7 = "n0", Version(1, 6), Version(1, 7)


class Line:
    """What a worker's line to its agent does with memory."""

    def __init__(self, vault: Vault) -> None:
        self.vault = vault

    def allocate(self, part: Part, index: int, num_bytes: int) -> int:
        return os.dup(self.vault.allocate(part, index, num_bytes)[1])

    def open_slot(self, slot_id: int) -> int:
        fd = self.vault.open(slot_id)
        assert fd is not None
        return os.dup(fd)


def vault_of_two_ranks() -> Vault:
    """Versions 6 and 7 of what ranks 0 and 1 have, of the same names and shapes."""
    vault = Vault(NODE)
    for rank in range(2):
        capturer = Capturer(Line(vault), rank, (0, 0))  # type: ignore[arg-type]
        for version in (V6, V7):
            leaf = Leaf("model/weight", torch.full((9,), 10.0 * version.step + rank), (rank,))
            (image,) = capturer.capture(Collected([leaf], b"", {}), version, V6 if version == V7 else None)
            assert image.slot is not None
            image.slot.complete(image.header(digest_of(image.slot.body(image.num_bytes))))
    return vault


def found_bad(vault: Vault, held: Mapping[tuple[int, Version], tuple[int, Version]]) -> set[tuple[int, Version]]:
    """Which of all copies are refused, where ``held`` says what lies in the place of what."""
    records = {(record.part.members[0], record.version): record for record in vault.records()}
    images = {}
    for key, record in records.items():
        slot = Slot(vault.open(record.slot))  # type: ignore[arg-type]
        images[key] = bytes(slot.body(record.num_bytes)), slot.header()
    for at, what in held.items():
        slot = Slot(vault.open(records[at].slot))  # type: ignore[arg-type]
        body, header = images[what]
        slot.body()[: len(body)] = body
        assert header is not None
        slot.complete(type(header)(at[1], header.data_bytes, header.tail_bytes, header.digest, 0))  # type: ignore[arg-type]
    bad = set()
    for record in vault.records():
        assert record.version is not None
        rank = record.part.members[0]
        fetch = Fetch(rank, record.part, NODE, record.slot, None, record.num_bytes, record.digest)
        line = Line(vault)
        if _verify(_LocalSlots(line), Plan(record.version, V6, (fetch,), 0, ""), rank, NODE):  # type: ignore[arg-type]
            bad.add((rank, record.version))
    return bad


def test_copy_of_another_rank_or_an_older_version_is_refused_although_its_digest_is_right() -> None:
    assert found_bad(vault_of_two_ranks(), {}) == set()
    swapped = {(0, V7): (1, V7), (1, V7): (0, V7)}
    assert found_bad(vault_of_two_ranks(), swapped) == {(0, V7), (1, V7)}
    replayed = {(0, V7): (0, V6)}
    assert found_bad(vault_of_two_ranks(), replayed) == {(0, V7)}
