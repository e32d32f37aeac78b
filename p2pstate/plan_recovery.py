"""From what the vaults hold to what every rank does next. Pure: every rank computes the same plan.

In: the slot records of every live node's vault, who has which rank, what each rank says of itself, and which versions
were resumed before. Out: a :class:`Plan` (the version, and for every rank where each part of its state comes from),
:class:`StartOver` or :class:`StateLost`. Each carries a sentence that says why.

Invariants: the version of a plan is whole (every shard has a complete copy on a live node that was not found corrupt,
and, of every set of leaves that ranks share, some live node has all pieces, and the ranks were alike in them); it is
the newest such version; a version that an earlier round decided to go back behind is never used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from p2pstate.types import NO_ENDS, LoopEnds, Part, RoundInfo, SlotRecord, Start, Version
from p2pstate.versions import version_to_keep

__all__ = ["Fetch", "Lineage", "Plan", "RankReport", "StartOver", "StateLost", "plan_recovery", "why_unsettled"]

WRAPPER_CHANGES = 1  # in RankReport.wrappers: this one calls for another collective at its next use
NUM_WARM_STEPS = 2
NOTHING_TO_LOSE_STEP = 1  # a run that has not got further than this starts anew without asking


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank says of itself when it joins a round."""

    rank: int
    newcomer: bool
    num_warm_steps: int  # whole iterations this process has done (rehearsals count)
    committed_step: int  # newest step it has committed in this process
    ended_at: int = -1  # its data ended after this step; -1: it has data
    wrappers: bytes = b""  # how far each wrapper has come that changes its collectives (see rehearsal.py)
    spoilt_step: int = 0  # its gradients were no numbers, and all go back behind it; 0: they were
    num_batches: int = 0  # that its loop has taken until then
    loop: int = 1  # in which of the script's training loops it is
    ends: LoopEnds = NO_ENDS  # of the loops before, as far as it knows

    def pack(self) -> list[Any]:
        return [*astuple(self)[:-1], self.ends.pack()]

    @staticmethod
    def unpack(raw: list[Any]) -> RankReport:
        *plain, ends = raw
        return replace(RankReport(*plain), ends=LoopEnds.unpack(ends))


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
    num_warm_steps_needed: int = NUM_WARM_STEPS,
    num_losses: int = 1,
) -> Plan | StartOver | StateLost:
    """Decide what all ranks of ``info`` resume from.

    ``corrupt`` names (node, slot) pairs whose bytes did not match their digest: they are never used. ``num_losses``:
    how many nodes a protected version outlives when they are lost at once.
    """
    by_version = _by_version(_usable(info, records, lineage, corrupt))
    seen = [report.committed_step for report in reports.values()] + [version.step for version in by_version]
    newest = max([*seen, info.progress])
    missing = ""
    for version, found in sorted(by_version.items(), key=lambda item: item[0], reverse=True):
        why_not = _why_not_whole(info, found)
        if why_not:
            missing = missing or f"version {version.step} of round {version.epoch} is not whole: {why_not}"
            continue
        if version.step == 0:
            return StartOver(Start.FRESH, "no step was protected yet, so training starts anew")
        unsettled = why_unsettled(reports, num_warm_steps_needed)
        if unsettled:
            return StartOver(
                Start.RESTART, f"{unsettled}: all workers start again and resume from memory at step {version.step}"
            )
        fetches = tuple(_fetches(info, found))
        reason = f"step {version.step} of round {version.epoch} is the newest that is whole"
        reason = f"{reason}; {missing}" if missing else reason
        return Plan(version, _keep(info, by_version, num_losses), fetches, max(0, max(seen) - version.step), reason)
    missing = missing or "no version of the training state is complete anywhere"
    if newest > NOTHING_TO_LOSE_STEP:
        return StateLost(f"training had come to step {newest}, and {missing}")
    return StartOver(Start.FRESH, f"{missing}; training starts anew")


def why_unsettled(reports: Mapping[int, RankReport], num_warm_steps_needed: int = NUM_WARM_STEPS) -> str:
    """Why survivors and newcomers cannot go on together; empty when they can, or when there are no survivors."""
    survivors = [report for report in reports.values() if not report.newcomer]
    for report in survivors:
        if report.num_warm_steps < num_warm_steps_needed:
            return (
                f"rank {report.rank} has done fewer than {num_warm_steps_needed} steps in its process, so wrappers "
                "such as DDP still change their layout"
            )
    for report in reports.values() if survivors else ():
        if report.wrappers != survivors[0].wrappers or WRAPPER_CHANGES in report.wrappers:
            return (
                f"a DistributedDataParallel of rank {report.rank} changes its layout soon, or has done so and that of "
                f"rank {survivors[0].rank} has not"
            )
    return ""


def _usable(
    info: RoundInfo,
    records: Iterable[SlotRecord],
    lineage: Iterable[Lineage],
    corrupt: frozenset[tuple[str, int]],
) -> list[SlotRecord]:
    live = {worker.node for worker in info.workers}
    turns = list(lineage)

    def void(version: Version) -> bool:
        if version.step == 0:
            return False  # nothing is behind the initial state: all it says is to start anew
        return any(version.epoch < turn.epoch and version > turn.version for turn in turns)

    return sorted(
        (
            r
            for r in records
            if r.version and r.node in live and (r.node, r.slot) not in corrupt and not void(r.version)
        ),
        key=lambda r: (r.node, r.slot),
    )


def _by_version(usable: Iterable[SlotRecord]) -> dict[Version, _Copies]:
    found: dict[Version, list[SlotRecord]] = {}
    for record in usable:
        if record.version:
            found.setdefault(record.version, []).append(record)
    return {version: _copies(records) for version, records in found.items()}


@dataclass(frozen=True, slots=True)
class _Copies:
    """Who holds what of one version: sorted once, asked for every rank."""

    own: Mapping[int, Sequence[SlotRecord]]  # rank -> copies of its shard
    shared: Mapping[tuple[int, ...], Mapping[str, Sequence[SlotRecord]]]  # ranks -> node -> all pieces, by piece


def _copies(found: Iterable[SlotRecord]) -> _Copies:
    own: dict[int, list[SlotRecord]] = {}
    pieces: dict[tuple[tuple[int, ...], str], dict[Part, SlotRecord]] = {}
    for record in found:
        if record.part.kind == "own":
            own.setdefault(record.part.members[0], []).append(record)
        else:
            pieces.setdefault((record.part.members, record.node), {})[record.part] = record
    shared: dict[tuple[int, ...], dict[str, list[SlotRecord]]] = {}
    for (members, node), held in sorted(pieces.items()):
        if len(held) == next(iter(held)).num_pieces:
            shared.setdefault(members, {})[node] = [held[part] for part in sorted(held)]
    return _Copies(own, shared)


def _why_not_whole(info: RoundInfo, copies: _Copies) -> str:
    num_sets = Counter(rank for members in copies.shared for rank in members)
    for rank in range(info.world_size):
        if rank not in copies.own:
            return f"no live node has shard {rank}"
        if num_sets[rank] < copies.own[rank][-1].num_shared_sets:
            return f"no live node has all of what rank {rank} shares with others"
    if sum(copies.own[rank][-1].balance for rank in range(info.world_size)):
        return "ranks differ in what they were to hold alike"
    return ""


def _keep(info: RoundInfo, by_version: Mapping[Version, _Copies], num_losses: int) -> Version:
    fatal_losses = {}
    for version, copies in by_version.items():
        if not _why_not_whole(info, copies):
            holders = {frozenset(record.node for record in records) for records in copies.own.values()}
            holders |= {frozenset(nodes) for nodes in copies.shared.values()}
            fatal_losses[version] = [nodes for nodes in holders if len(nodes) <= num_losses]
    return version_to_keep(fatal_losses)


def _fetches(info: RoundInfo, copies: _Copies) -> list[Fetch]:
    """In the order of ranks; of each rank first its shard, then what it shares."""
    out: list[list[Fetch]] = []
    for rank in range(info.world_size):
        home = info.node_of(rank)
        nearest = min(copies.own[rank], key=lambda record: (record.node != home, record.node, record.slot))
        out.append([_fetch(info, rank, nearest)])
    for members, nodes in copies.shared.items():
        for rank in members:
            home = info.node_of(rank)
            out[rank] += [_fetch(info, rank, record) for record in nodes[home if home in nodes else min(nodes)]]
    return [fetch for fetches in out for fetch in fetches]


def _fetch(info: RoundInfo, rank: int, record: SlotRecord) -> Fetch:
    sender = None
    if record.node != info.node_of(rank):
        local = info.workers[rank].local_rank
        on_node = [w.rank for w in info.workers if w.node == record.node]
        sender = on_node[local % len(on_node)]
    return Fetch(rank, record.part, record.node, record.slot, sender, record.num_bytes, record.digest)
