"""All slots of one node. Owned by the agent, so they outlive any worker.

In: requests for memory from the node's workers. Out: memfds, and an inventory read from the slots' own headers. Nothing
is ever written here: workers write through their mappings, the headers say what is complete.

Memory that nobody needs any more (a former ward's) is given up by :meth:`Vault.retain`.

Invariants: a slot belongs to one (part, index) pair; asking for it again with the same size gives the same memory, so a
replacement finds what its predecessor completed; a larger request replaces the memory of that slot only. No name in a
file system exists: memory goes when the last process that has it mapped ends.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from p2pstate.errors import P2PStateError
from p2pstate.memory import Bound, room
from p2pstate.sizes import mib
from p2pstate.slots import HEADER_BYTES, Slot
from p2pstate.types import Part, SlotRecord

__all__ = ["Vault", "VaultFull"]


class VaultFull(P2PStateError):
    """The node has not enough memory for another slot."""


@dataclass(slots=True)
class _Entry:
    slot_id: int
    part: Part
    index: int
    fd: int
    num_bytes: int
    slot: Slot


class Vault:
    def __init__(self, node: str) -> None:
        self._node = node
        self._entries: dict[tuple[Part, int], _Entry] = {}
        self._next_id = 1

    @property
    def has_state(self) -> bool:
        """Whether anything beyond the initial state is complete here."""
        return any(record.version and record.version.step > 0 for record in self.records())

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries.values())

    def room(self) -> Bound:
        """What this vault may hold in all, what it holds already among it."""
        bound, held = room(), sum(entry.num_bytes + HEADER_BYTES for entry in self._entries.values())
        return Bound(bound.left_bytes + held - self._promised_bytes(), bound.what)

    def _promised_bytes(self) -> int:
        """What was given out and not yet written: the kernel counts pages only when they are touched."""
        return sum(max(0, entry.num_bytes - os.fstat(entry.fd).st_blocks * 512) for entry in self._entries.values())

    def allocate(self, part: Part, index: int, num_bytes: int) -> tuple[int, int]:
        """The slot ``index`` of ``part`` with room for ``num_bytes`` of body: (slot id, descriptor, which stays ours).

        Raises VaultFull when the node's memory does not suffice.
        """
        entry = self._entries.get((part, index))
        if entry and entry.num_bytes >= num_bytes:
            return entry.slot_id, entry.fd
        size = num_bytes + HEADER_BYTES
        bound = room()
        free = bound.left_bytes - self._promised_bytes()
        if size > free:
            raise VaultFull(
                f"no memory for a slot of {mib(size)} ({part}) on {self._node}: {mib(free)} are "
                f"available ({bound.what}) and the vault holds {mib(self.num_bytes)}; use fewer or smaller "
                "shards per node"
            )
        fd = -1
        try:
            fd = os.memfd_create(f"p2pstate-{part.kind}{part.members[0]}-{index}", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            slot = Slot(fd, header_only=True)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise VaultFull(f"the kernel refused a slot of {mib(size)} on {self._node}: {error}") from error
        if entry:
            os.close(entry.fd)
        slot.capacity = num_bytes
        made = _Entry(self._next_id, part, index, fd, num_bytes, slot)
        self._next_id += 1
        self._entries[part, index] = made
        return made.slot_id, fd

    def open(self, slot_id: int) -> int | None:
        """The descriptor of a slot (stays ours), or None when it does not exist any more."""
        return next((entry.fd for entry in self._entries.values() if entry.slot_id == slot_id), None)

    def retain(self, parts: Collection[Part]) -> list[Part]:
        """Let go of all slots of other parts; returns which these were. Who has one mapped keeps its memory."""
        gone = [key for key in self._entries if key[0] not in parts]
        for key in gone:
            os.close(self._entries.pop(key).fd)
        return sorted({part for part, _ in gone})

    def records(self) -> list[SlotRecord]:
        """What every slot holds right now, by its own header."""
        out = []
        for entry in self._entries.values():
            header = entry.slot.header()
            out.append(
                SlotRecord(
                    node=self._node,
                    slot=entry.slot_id,
                    part=entry.part,
                    version=header.version if header else None,
                    num_bytes=header.num_bytes if header else 0,
                    digest=header.digest.hex() if header else "",
                    num_shared_sets=header.num_shared_sets if header else 0,
                    balance=header.balance if header else 0,
                )
            )
        return out

    def close(self) -> None:
        for entry in self._entries.values():
            os.close(entry.fd)
        self._entries.clear()
