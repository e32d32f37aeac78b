"""From what the vaults hold to what every rank does next. Pure: every rank computes the same plan.

In: the slot records of every live node's vault, who has which rank, what each rank says of itself, and which versions
were resumed before. Out: a :class:`Plan` (the version, and for every rank where each part of its state comes from),
:class:`StartOver` or :class:`StateLost`. Each carries a sentence that says why.

Invariants: the version of a plan is whole (every shard has a complete copy on a live node that was not found corrupt,
and, of every set of leaves that ranks share, some live node has all pieces); it is the newest such version; a version
that an earlier round decided to go back behind is never used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from p2pstate.types import Part, RoundInfo, SlotRecord, Start, Version
from p2pstate.versions import version_to_keep

__all__ = ["Fetch", "Lineage", "Plan", "RankReport", "StartOver", "StateLost", "plan_recovery"]

NOTHING_TO_LOSE_STEP = 1  # a run that has not got further than this starts anew without asking


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank says of itself when it joins a round."""

    rank: int
    newcomer: bool
    num_warm_steps: int  # whole iterations this process has done (rehearsals count)
    committed_step: int  # newest step it has committed in this process
    ended_at: int = -1  # its data ended after this step; -1: it has data


@dataclass(frozen=True, slots=True)
class Lineage:
    """Round ``epoch`` resumed from ``version``: everything newer from an older round is void."""

    epoch: int
    version: Version


@dataclass(frozen=True, slots=True)
class Fetch:
    """One rank takes one part from one slot. ``sender`` is None when the slot is on its own node."""

    rank: int
    part: Part
    node: str
    slot: int
    sender: int | None
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Plan:
    """``keep``: the whole version whose slots no rank writes until the resumed one is protected (see versions.py)."""

    version: Version
    keep: Version
    fetches: tuple[Fetch, ...]
    steps_lost: int
    reason: str

    def of(self, rank: int) -> list[Fetch]:
        return [fetch for fetch in self.fetches if fetch.rank == rank]


@dataclass(frozen=True, slots=True)
class StartOver:
    """The workers cannot go on in place; ``start`` says how all of them begin again."""

    start: str
    reason: str


@dataclass(frozen=True, slots=True)
class StateLost:
    """Every copy of some part of the state is gone: nobody can go on, and starting anew would hide it."""

    reason: str


def plan_recovery(
    info: RoundInfo,
    reports: Mapping[int, RankReport],
    records: Iterable[SlotRecord],
    lineage: Iterable[Lineage] = (),
    corrupt: frozenset[tuple[str, int]] = frozenset(),
    num_warm_steps_needed: int = 2,
) -> Plan | StartOver | StateLost:
    """Decide what all ranks of ``info`` resume from.

    ``corrupt`` names (node, slot) pairs whose bytes did not match their digest: they are never used.
    """
    usable = _usable(info, records, lineage, corrupt)
    versions = sorted({record.version for record in usable if record.version}, reverse=True)
    seen = [report.committed_step for report in reports.values()] + [version.step for version in versions]
    newest = max([*seen, info.progress])
    missing = ""
    for version in versions:
        found = [record for record in usable if record.version == version]
        why_not = _why_not_whole(info, found)
        if why_not:
            missing = missing or f"version {version.step} of round {version.epoch} is not whole: {why_not}"
            continue
        if version.step == 0:
            return StartOver(Start.FRESH, "no step was protected yet, so training starts anew")
        cold = [r.rank for r in reports.values() if not r.newcomer and r.num_warm_steps < num_warm_steps_needed]
        if cold:
            return StartOver(
                Start.RESTART,
                f"rank {cold[0]} has done fewer than {num_warm_steps_needed} steps in its process, so wrappers such as "
                f"DDP still change their layout: all workers start again and resume from memory at step {version.step}",
            )
        fetches = [fetch for rank in range(info.world_size) for fetch in _fetches(info, rank, found)]
        reason = f"step {version.step} of round {version.epoch} is the newest that is whole"
        reason = f"{reason}; {missing}" if missing else reason
        return Plan(version, _keep(info, usable), tuple(fetches), max(0, max(seen) - version.step), reason)
    missing = missing or "no version of the training state is complete anywhere"
    if newest > NOTHING_TO_LOSE_STEP:
        return StateLost(f"training had come to step {newest}, and {missing}")
    return StartOver(Start.FRESH, f"{missing}; training starts anew")


def _usable(
    info: RoundInfo,
    records: Iterable[SlotRecord],
    lineage: Iterable[Lineage],
    corrupt: frozenset[tuple[str, int]],
) -> list[SlotRecord]:
    live = {worker.node for worker in info.workers}
    turns = list(lineage)

    def void(version: Version) -> bool:
        return any(version.epoch < turn.epoch and version > turn.version for turn in turns)

    return sorted(
        (
            r
            for r in records
            if r.version and r.node in live and (r.node, r.slot) not in corrupt and not void(r.version)
        ),
        key=lambda r: (r.node, r.slot),
    )


def _why_not_whole(info: RoundInfo, found: Sequence[SlotRecord]) -> str:
    needed = {record.part.members[0]: record.num_shared_sets for record in found if record.part.kind == "own"}
    complete = _complete_sets(found)
    for rank in range(info.world_size):
        if rank not in needed:
            return f"no live node has shard {rank}"
        if sum(rank in members for members in complete) < needed[rank]:
            return f"no live node has all of what rank {rank} shares with others"
    return ""


def _keep(info: RoundInfo, usable: Sequence[SlotRecord]) -> Version:
    needed_nodes = {}
    for version in {record.version for record in usable if record.version}:
        found = [record for record in usable if record.version == version]
        if not _why_not_whole(info, found):
            holders = [{r.node for r in found if r.part == Part.own(rank)} for rank in range(info.world_size)]
            holders += [set(nodes) for nodes in _complete_sets(found).values()]
            needed_nodes[version] = frozenset(min(nodes) for nodes in holders if len(nodes) == 1)
    return version_to_keep(needed_nodes)


def _complete_sets(found: Sequence[SlotRecord]) -> dict[tuple[int, ...], list[str]]:
    """For every set of ranks that share leaves: the nodes that hold all pieces of them."""
    held: dict[tuple[tuple[int, ...], str], set[Part]] = {}
    for record in found:
        if record.part.kind == "shared":
            held.setdefault((record.part.members, record.node), set()).add(record.part)
    out: dict[tuple[int, ...], list[str]] = {}
    for (members, node), parts in held.items():
        if len(parts) == next(iter(parts)).num_pieces:
            out.setdefault(members, []).append(node)
    return out


def _fetches(info: RoundInfo, rank: int, found: Sequence[SlotRecord]) -> list[Fetch]:
    home = info.node_of(rank)
    out = [_fetch(info, rank, _nearest(home, [r for r in found if r.part == Part.own(rank)]))]
    for members, nodes in sorted(_complete_sets(found).items()):
        if rank not in members:
            continue
        node = home if home in nodes else min(nodes)
        parts = {r.part: r for r in found if r.part.kind == "shared" and r.part.members == members and r.node == node}
        out += [_fetch(info, rank, parts[part]) for part in sorted(parts)]
    return out


def _nearest(home: str, candidates: list[SlotRecord]) -> SlotRecord:
    return min(candidates, key=lambda r: (r.node != home, r.node, r.slot))


def _fetch(info: RoundInfo, rank: int, record: SlotRecord) -> Fetch:
    sender = None
    if record.node != info.node_of(rank):
        local = info.workers[rank].local_rank
        on_node = [w.rank for w in info.workers if w.node == record.node]
        sender = on_node[local % len(on_node)]
    return Fetch(rank, record.part, record.node, record.slot, sender, record.num_bytes, record.digest)
