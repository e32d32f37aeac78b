"""Who writes what of a version: every part once, spread over the nodes that hold it. Pure.

In: what the vaults hold of one version, and which node each rank is on. Out: for every node its shares, or the sentence
that says why the version is not whole. Invariants: every leaf is in exactly one share, also when copies of a part are
on several nodes; a rank's own shard is written by its own node, while that node has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from p2pstate.types import Part, SlotRecord

__all__ = ["Share", "divide_version"]


@dataclass(frozen=True, slots=True)
class Share:
    """One slot to read. Of a shared part's leaves this node writes one of ``num_writers`` shares."""

    slot: int
    part: Part
    writer: int = 0
    num_writers: int = 1

    def pack(self) -> list[Any]:
        return [self.slot, list(self.part), self.writer, self.num_writers]

    @staticmethod
    def unpack(raw: list[Any]) -> Share:
        slot, part, writer, num_writers = raw
        return Share(slot, Part.unpack(part), writer, num_writers)


def divide_version(home: Mapping[int, str], records: Iterable[SlotRecord]) -> dict[str, list[Share]] | str:
    """``home``: the node of every rank. ``records``: of one version, of live nodes."""
    own: dict[int, list[SlotRecord]] = {}
    pieces: dict[tuple[int, ...], dict[str, dict[int, SlotRecord]]] = {}
    for record in sorted(records, key=lambda r: (r.node, r.slot)):
        if record.part.kind == "own":
            own.setdefault(record.part.members[0], []).append(record)
        else:
            pieces.setdefault(record.part.members, {}).setdefault(record.node, {})[record.part.piece] = record
    shares: dict[str, list[Share]] = {}
    num_sets: Counter[int] = Counter()
    for members, nodes in sorted(pieces.items()):
        full = {node: held for node, held in nodes.items() if len(held) == next(iter(held.values())).part.num_pieces}
        if full:
            num_sets.update(members)
        for writer, held in enumerate(full.values()):
            for record in held.values():
                shares.setdefault(record.node, []).append(Share(record.slot, record.part, writer, len(full)))
    for rank, node in sorted(home.items()):
        if rank not in own:
            return f"no live node has shard {rank}"
        if num_sets[rank] < own[rank][0].num_shared_sets:
            return f"no live node has all of what rank {rank} shares with others"
        best = min(own[rank], key=lambda record: (record.node != node, record.node, record.slot))
        shares.setdefault(best.node, []).append(Share(best.slot, best.part))
    return shares
