"""slots.Slot and vault.Vault: what a reader sees after the writer stopped at any point."""

from __future__ import annotations

import os

import pytest
from durable_site import FakeLink

from p2pstate.capture import SlotPair
from p2pstate.slots import Header, Slot, digest_of
from p2pstate.types import Part, Version
from p2pstate.vault import Vault, VaultFull


def fill(slot: Slot, text: bytes, version: Version) -> Header:
    slot.begin()
    slot.body()[: len(text)] = text
    header = Header(version, len(text), 0, digest_of(slot.body(len(text))), 0)
    slot.complete(header)
    return header


def test_slot_completed_by_one_process_is_read_through_another_mapping() -> None:
    vault = Vault("n")
    slot_id, fd = vault.allocate(Part.own(3), 0, 1000)
    header = fill(Slot(fd), b"hello", Version(2, 9))
    again = Slot(fd)
    assert again.header() == header
    assert again.verify(header)
    (record,) = vault.records()
    assert (record.slot, record.version, record.num_bytes) == (slot_id, Version(2, 9), 5)


def test_vault_lets_go_of_the_parts_that_nobody_needs_and_keeps_the_others() -> None:
    vault = Vault("n")
    slots = {rank: [vault.allocate(Part.own(rank), index, 100)[0] for index in (0, 1)] for rank in (0, 1, 2)}
    _, fd = vault.allocate(Part.own(1), 0, 100)
    header = fill(Slot(fd), b"still mine", Version(1, 1))
    mapped = Slot(fd)
    assert vault.retain({Part.own(0), Part.own(2)}) == [Part.own(1)]
    assert {record.slot for record in vault.records()} == {*slots[0], *slots[2]}
    assert vault.open(slots[1][0]) is None
    assert mapped.verify(header), "who has it mapped can read on"
    assert vault.retain({Part.own(0), Part.own(2)}) == []
    again, _ = vault.allocate(Part.own(1), 0, 100)
    assert again not in slots[1]


def test_slot_being_written_holds_no_version() -> None:
    _, fd = Vault("n").allocate(Part.own(0), 0, 1000)
    slot = Slot(fd)
    fill(slot, b"old", Version(1, 1))
    slot.begin()
    assert slot.header() is None


def test_slot_with_a_torn_header_holds_no_version() -> None:
    _, fd = Vault("n").allocate(Part.own(0), 0, 1000)
    slot = Slot(fd)
    header = fill(slot, b"old", Version(1, 1))
    for offset in range(8, 72):
        before = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([before[0] ^ 1]), offset)
        assert slot.header() is None, f"a flipped bit in byte {offset} of the header went unnoticed"
        os.pwrite(fd, before, offset)
    assert slot.header() == header


def test_slot_with_a_flipped_bit_fails_its_digest() -> None:
    _, fd = Vault("n").allocate(Part.own(0), 0, 1000)
    slot = Slot(fd)
    header = fill(slot, b"precious", Version(1, 1))
    slot.body()[3] ^= 1
    assert not slot.verify(header)


def test_vault_gives_the_same_memory_to_a_successor_and_new_memory_when_it_must_grow() -> None:
    vault = Vault("n")
    first, fd = vault.allocate(Part.own(0), 0, 1000)
    fill(Slot(fd), b"kept", Version(1, 1))
    assert vault.allocate(Part.own(0), 0, 500)[0] == first
    assert vault.allocate(Part.own(0), 1, 500)[0] != first
    second, _ = vault.allocate(Part.own(0), 0, 2000)
    assert second != first
    assert vault.open(first) is None


def test_vault_without_memory_refuses_with_the_figures() -> None:
    with pytest.raises(VaultFull, match=r"MiB are\s+available"):
        Vault("n").allocate(Part.own(0), 0, 1 << 50)


def test_memory_that_versions_will_take_is_there_before_they_come_and_no_version_is_lost_for_it() -> None:
    vault = Vault("n")
    part, size, grown = Part.own(0), 10_000, 1 << 20
    pair = SlotPair(FakeLink(vault), part, expected_bytes=grown)  # type: ignore[arg-type]
    fill(pair.target(size, None), b"first", Version(0, 0))
    pair.prepare(size)
    slots = {record.slot: vault.open(record.slot) for record in vault.records()}
    assert len(slots) == 2
    resident = [os.fstat(fd).st_blocks * 512 for fd in slots.values() if fd is not None]
    assert min(resident) >= grown
    second = fill(pair.target(grown, Version(0, 0)), b"second", Version(0, 1))
    assert {record.slot for record in vault.records()} == slots.keys(), "it fits into what was there"
    assert [os.fstat(fd).st_blocks * 512 for fd in slots.values() if fd is not None] == resident
    pair.prepare(2 * grown)
    assert {record.version for record in vault.records()} == {Version(0, 0), second.version}, (
        "though both are too small"
    )
