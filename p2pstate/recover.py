"""Joining a round: meet, connect, agree what to resume, fetch it, verify it, restore it.

In: a round (who has which rank), the registry of groups, the live training state. Out: the version everybody resumed,
and what it took. Every rank of the round, survivor and newcomer alike, runs :func:`join` at the same time.

Invariants: no slot is written, so a failure at any point leaves everything as it was and the next round starts from the
same copies; a copy is used only after its bytes matched its digest, and one that did not match is never tried again in
this round; the process's collectives go on echoing until the caller connects them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgpack
import torch
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError, ReduceOp

from p2pstate.capture import read_image
from p2pstate.errors import ConfigError, NotFinite, P2PStateError, Retryable
from p2pstate.groups.registry import Registry
from p2pstate.groups.status import STATUS
from p2pstate.groups.transport import Incoming, Outgoing, Payload
from p2pstate.groups.waiting import call, wait_collective
from p2pstate.observe.meter import METER
from p2pstate.plan_recovery import (
    Fetch,
    Lineage,
    Plan,
    RankReport,
    StartOver,
    StateLost,
    plan_recovery,
    why_unsettled,
)
from p2pstate.resume import Disk
from p2pstate.settings import Asked
from p2pstate.slots import Slot, digest_of
from p2pstate.state import TrainingState
from p2pstate.trace import Row
from p2pstate.types import RoundInfo, SlotRecord, Start, Version
from p2pstate.worker.link import Link

if TYPE_CHECKING:
    from p2pstate.durable.catalog import Found
    from p2pstate.durable.resume import Resolved

__all__ = ["ROUND_FAILED", "Joined", "LostError", "MustStartOver", "Phases", "join"]

ROUND_FAILED = (Retryable, DistStoreError, RuntimeError)  # what join raises when another round has to be joined


class LostError(P2PStateError):
    """The plan says that some part of the state is gone."""


class MustStartOver(Retryable):
    """The plan says that all workers have to begin again."""

    def __init__(self, decision: StartOver) -> None:
        super().__init__(decision.reason)
        self.decision = decision


@dataclass(slots=True)
class Phases:
    """Seconds spent in each phase of one recovery, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            with METER.inside("recovery." + name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


@dataclass(frozen=True, slots=True)
class Joined:
    """``keep``: the version whose slots stay until the resumed state is protected; ``source``: survivor, own vault,
    replicas, buddy or disk; ``num_bytes``: what came over the network."""

    version: Version
    keep: Version
    steps_lost: int
    source: str
    num_bytes: int
    reason: str
    end_step: int | None  # all ranks end here, because the data of one did
    lean: bool = False
    sizes_of_all: list[tuple[int, int]] = field(default_factory=list)  # see Asked
    replicas: list[Any] = field(default_factory=list)  # of each survivor
    num_batches: int = 0  # that must be behind all ranks: what comes before is not trained with again


def join(
    info: RoundInfo,
    link: Link,
    registry: Registry,
    state: TrainingState,
    report: RankReport,
    asked: Asked,
    phases: Phases,
    row: Row,
    join_timeout_s: float,
    connected: bool,
    disk: Disk | None = None,
) -> Joined:
    """Bring this process into ``info``; ``connected``: its groups have this round's connections already; ``row`` shows
    the agent what all ranks do together.

    Raises MustStartOver when no version can be resumed in place, LostError when there is none any more, neither in
    memory nor on ``disk``, NotFinite when all go back behind a step and there is no checkpoint from before; ConfigError
    in a newcomer that asks for other settings than those who are there; Retryable, DistStoreError or RuntimeError when
    the round ends or a member fails meanwhile: join the next round then.
    """
    assert registry.make_store is not None
    store = registry.make_store(info.epoch)

    def is_over() -> bool:
        return link.is_aborted(info.epoch)

    row.begin(info.epoch)
    with phases.phase("spare"), row.inside("meet"):
        reports, lean, sizes_of_all, replicas = _meet(store, info, report, asked, join_timeout_s)
    with phases.phase("groups"), row.inside("connect"):
        if not connected:
            registry.attach(call(lambda: registry.build(info.epoch), is_over, "connecting"))
    spoilt = max(reports.values(), key=lambda each: each.spoilt_step)
    if spoilt.spoilt_step:
        assert disk is not None, "settings that ask for it name a directory"
        back = _behind(spoilt, asked.settings.nan_rollback, disk, store, info, registry, state, reports, phases)
        return replace(back, lean=lean, sizes_of_all=sizes_of_all, replicas=replicas)
    slots = _LocalSlots(link)
    ended_at = min((each.ended_at for each in reports.values() if each.ended_at >= 0), default=None)
    try:
        with row.inside("plan"):
            plan = _agree(store, info, link, report.rank, reports, asked.settings.copies - lean, slots, phases)
    except (LostError, MustStartOver) as error:
        if disk is None or (isinstance(error, MustStartOver) and error.decision.start != Start.FRESH):
            raise
        joined = _from_disk(disk, store, info, registry, state, reports, error, phases, ended_at)
        if joined is None:
            raise
        return replace(joined, sizes_of_all=sizes_of_all, replicas=replicas)
    mine = plan.of(report.rank)
    with phases.phase("pull"), row.inside("pull"):
        images = call(lambda: _move(plan, report.rank, slots, registry), is_over, "pulling")
    with phases.phase("restore"):
        tensors: dict[str, torch.Tensor] = {}
        values = b""
        for image in images:
            found, plain = read_image(image)
            tensors.update(found)
            values = values or plain
        state.restore(tensors, values)
        with row.inside("confirm"):
            _all_done(registry, is_over)
    source = "own vault" if report.newcomer else "survivor"
    if any(fetch.sender is not None for fetch in mine):
        source = "buddy" if any(f.sender is not None and f.part.kind == "own" for f in mine) else "replicas"
    pulled = sum(fetch.num_bytes for fetch in mine if fetch.sender is not None)
    return Joined(
        plan.version, plan.keep, plan.steps_lost, source, pulled, plan.reason, ended_at, lean, sizes_of_all, replicas
    )


def _from_disk(
    disk: Disk,
    store: Store,
    info: RoundInfo,
    registry: Registry,
    state: TrainingState,
    reports: Mapping[int, RankReport],
    in_memory: LostError | MustStartOver,
    phases: Phases,
    ended_at: int | None,
) -> Joined | None:
    """Resume from the newest good checkpoint, all ranks from the same. None: there is none.

    ``in_memory``: what the plan says of the copies in memory.
    """
    with phases.phase("verify"):
        resolved = disk.resolve(store, info, str(in_memory))
    if resolved.choice is None:
        if isinstance(in_memory, LostError):
            seen = "; ".join(resolved.skipped) or "there is none"
            raise LostError(f"{in_memory}; and no checkpoint on disk can be used: {seen}") from in_memory
        return None
    joined = _restore_from_disk(disk, resolved, resolved.choice, info, registry, state, reports, str(in_memory), phases)
    return replace(joined, end_step=ended_at)


def _behind(
    spoilt: RankReport,
    num_back: int,
    disk: Disk,
    store: Store,
    info: RoundInfo,
    registry: Registry,
    state: TrainingState,
    reports: Mapping[int, RankReport],
    phases: Phases,
) -> Joined:
    """Resume a checkpoint from before the step of which gradients were no numbers. Raises NotFinite: there is none."""
    step = spoilt.spoilt_step
    why = f"gradients of step {step} are NaN or infinite"
    with phases.phase("verify"):
        resolved = disk.resolve(store, info, why, before_step=step, num_back=num_back)
    if resolved.choice is None:
        seen = "; ".join(resolved.skipped) or "there is none yet"
        raise NotFinite(f"{why}, and no checkpoint from before can be used: {seen}")
    joined = _restore_from_disk(disk, resolved, resolved.choice, info, registry, state, reports, why, phases)
    return replace(joined, num_batches=max(each.num_batches for each in reports.values() if each.spoilt_step))


def _restore_from_disk(
    disk: Disk,
    resolved: Resolved,
    choice: Found,
    info: RoundInfo,
    registry: Registry,
    state: TrainingState,
    reports: Mapping[int, RankReport],
    why: str,
    phases: Phases,
) -> Joined:
    unsettled = why_unsettled(reports)
    if unsettled:
        reason = f"{unsettled}: all workers start again and resume from disk at step {choice.step}"
        raise MustStartOver(StartOver(Start.RESTART, reason))
    with phases.phase("restore"):
        version = disk.restore(resolved, state, info.world_size)
        _all_done(registry, lambda: STATUS.error is not None)
    seen_step = max([info.progress, *(report.committed_step for report in reports.values())])
    reason = f"{why}; {choice.path} is the newest good checkpoint"
    reason = "; ".join([reason, *(f"skipped {each}" for each in resolved.skipped)])
    lost = max(0, seen_step - version.step)
    assert choice.manifest is not None
    return Joined(version, version, lost, "disk", choice.manifest.num_bytes, reason, None)


def _meet(
    store: Store, info: RoundInfo, report: RankReport, asked: Asked, timeout_s: float
) -> tuple[dict[int, RankReport], bool, list[tuple[int, int]], list[Any]]:
    """Wait until every rank has stopped what it did before: from here on no slot changes.

    Returns the reports, whether the round is lean, what each rank has, and what the ranks that
    were there know of leaves that are not alike (see Asked).
    """
    said = [asked.settings.pack(), asked.sizes, [asked.lean, asked.why_not_full], asked.replicas]
    store.set(f"join/{report.rank}", msgpack.packb([astuple(report), *said]))
    keys = [f"join/{rank}" for rank in range(info.world_size)]
    store.wait(keys, timedelta(seconds=timeout_s))
    reports: dict[int, RankReport] = {}
    modes, sizes, replicas = [], [], []
    for rank, key in enumerate(keys):
        its, theirs, its_sizes, its_mode, its_replicas = msgpack.unpackb(store.get(key))
        modes.append(its_mode)
        sizes.append(tuple(its_sizes))
        reports[rank] = RankReport(*its)
        replicas += [] if reports[rank].newcomer else [its_replicas]
        try:
            asked.settings.check_same(report.rank, theirs, rank)
        except ConfigError as error:
            if report.newcomer:
                raise  # it ends, and all start again together: then its arguments are everybody's
            raise Retryable(str(error)) from None
    lean = _mode(modes, asked.settings.lean is True)
    why_not = next((why_not for _, why_not in modes if why_not), "")
    if why_not and not lean:
        if asked.why_not_full:
            raise ConfigError(f"{why_not}, and the others are not lean: all have to start again")
        raise Retryable(f"a rank joins without memory for its copies: {why_not}")
    return reports, lean, sizes, replicas


def _mode(modes: Sequence[tuple[bool | None, str]], asked_for: bool) -> bool:
    """Whether the round is lean: as it was for those who were there, else as the newcomers' nodes need it.

    ``modes``: see Asked.
    """
    known = [lean for lean, _ in modes if lean is not None]
    return known[0] if known else asked_for or any(why_not for _, why_not in modes)


def _agree(
    store: Store,
    info: RoundInfo,
    link: Link,
    rank: int,
    reports: dict[int, RankReport],
    num_losses: int,
    slots: _LocalSlots,
    phases: Phases,
) -> Plan:
    me = info.workers[rank]
    nodes = sorted({worker.node for worker in info.workers})
    if me.local_rank == 0:
        records, lineage = link.inventory()
        store.set(f"inventory/{me.node}", msgpack.packb([[r.pack() for r in records], lineage]))
    records, turns = [], []
    for node in nodes:
        packed, lineage = msgpack.unpackb(store.get(f"inventory/{node}"))
        records += [SlotRecord.unpack(raw) for raw in packed]
        turns += [Lineage(epoch, Version(*version)) for epoch, version in lineage]
    corrupt: frozenset[tuple[str, int]] = frozenset()
    for attempt in range(len(records) + 1):
        plan = plan_recovery(info, reports, records, turns, corrupt, num_losses=num_losses)
        if isinstance(plan, StartOver):
            raise MustStartOver(plan)
        if isinstance(plan, StateLost):
            raise LostError(plan.reason)
        with phases.phase("verify"):
            bad = _verify(slots, plan, me.rank, me.node)
            for node, slot in bad:  # said before others know: what they conclude may end the run
                link.send("event", kind="corrupt", node=node, slot=slot)
            store.set(f"verified/{attempt}/{me.rank}", msgpack.packb(sorted(bad)))
            found = frozenset(
                (node, slot)
                for rank in range(info.world_size)
                for node, slot in msgpack.unpackb(store.get(f"verified/{attempt}/{rank}"))
            )
        if not found:
            return plan
        corrupt |= found
    raise AssertionError("every attempt removes at least one record")


def _verify(slots: _LocalSlots, plan: Plan, rank: int, node: str) -> set[tuple[str, int]]:
    """Check every local slot that this rank will read or send, once. Returns those whose bytes do not match."""
    bad = set()
    for fetch in plan.fetches:
        reads = fetch.rank == rank and fetch.sender is None
        if fetch.node != node or not (reads or fetch.sender == rank) or fetch.slot in slots:
            continue
        if digest_of(_bytes_of(slots.open(fetch))).hex() != fetch.digest:
            bad.add((fetch.node, fetch.slot))
    return bad


class _LocalSlots:
    """Slots of this node's vault, each mapped once: verified, then read or sent from the same mapping."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._bodies: dict[int, torch.Tensor] = {}

    def __contains__(self, slot_id: int) -> bool:
        return slot_id in self._bodies

    def open(self, fetch: Fetch) -> torch.Tensor:
        """The bytes that the slot holds. Raises Retryable when it is gone or too small."""
        body = self._bodies.get(fetch.slot)
        if body is None:
            fd = self._link.open_slot(fetch.slot)
            try:
                slot = Slot(fd)
            finally:
                os.close(fd)
            if slot.capacity < fetch.num_bytes:
                raise Retryable(f"slot {fetch.slot} of {fetch.node} is smaller than what it is said to hold")
            body = self._bodies[fetch.slot] = torch.frombuffer(slot.body(fetch.num_bytes), dtype=torch.uint8)
        return body


def _move(plan: Plan, rank: int, slots: _LocalSlots, registry: Registry) -> list[torch.Tensor]:
    """Take part in all transfers of the plan, in its order; returns the images of this rank's own state."""
    assert registry.replication is not None
    images: list[torch.Tensor] = []
    outgoing: list[Outgoing] = []
    incoming: list[Incoming] = []
    for fetch in plan.fetches:
        digest = bytes.fromhex(fetch.digest)
        if fetch.rank == rank and fetch.sender is None:
            images.append(slots.open(fetch))
        elif fetch.rank == rank:
            arrival = _Arrival(fetch)
            images.append(arrival.body)
            incoming.append(arrival.expected)
        elif fetch.sender == rank:
            outgoing.append(Outgoing(fetch.rank, digest, Payload(_bytes_of(slots.open(fetch)), digest)))
    registry.replication.exchange(outgoing, incoming)
    return images


class _Arrival:
    """One part on its way from another node into new memory. The head of its message is its digest."""

    def __init__(self, fetch: Fetch) -> None:
        assert fetch.sender is not None
        self._fetch = fetch
        self.body = torch.empty(fetch.num_bytes, dtype=torch.uint8)
        self.expected = Incoming(fetch.sender, self._accept, self._arrived)

    def _accept(self, head: bytes, num_bytes: int) -> memoryview:
        fetch = self._fetch
        if head.hex() != fetch.digest or num_bytes != fetch.num_bytes:
            raise Retryable(f"{fetch.node} sends {num_bytes} bytes that are not {fetch.part} as the plan has it")
        return _bytes_of(self.body)

    def _arrived(self, computed: bytes, announced: bytes) -> None:
        fetch = self._fetch
        if computed.hex() != fetch.digest:
            raise Retryable(f"{fetch.part} arrived from {fetch.node} with another digest than it was captured with")


def _bytes_of(body: torch.Tensor) -> memoryview:
    """The memory of a 1-D uint8 tensor."""
    return memoryview(body.numpy())  # type: ignore[arg-type]


def _all_done(registry: Registry, is_over: Callable[[], bool]) -> None:
    assert registry.gate is not None
    done = torch.ones(1, dtype=torch.int64)
    wait_collective(registry.gate.group.allreduce([done], ReduceOp.MIN), is_over)
