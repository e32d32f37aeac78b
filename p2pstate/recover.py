"""Joining a round: meet, connect, agree what to resume, fetch it, verify it, restore it.

In: a round (who has which rank), the registry of groups, the live training state. Out: the version everybody resumed,
and what it took. Every rank of the round, survivor and newcomer alike, runs :func:`join` at the same time.

Invariants: no slot is written, so a failure at any point leaves everything as it was and the next round starts from the
same copies; a copy is used only after its bytes matched its digest, and one that did not match is never tried again in
this round; the process's collectives go on echoing until the caller connects them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import msgpack
import torch

from p2pstate.errors import ConfigError, Retryable
from p2pstate.groups.registry import Registry
from p2pstate.groups.transport import Incoming, Outgoing, Payload
from p2pstate.groups.waiting import call
from p2pstate.image_format import is_image_of, read_image
from p2pstate.joined import Attempt, Joined, LostError, MustStartOver, all_done
from p2pstate.live_body import memory_of
from p2pstate.loops import check_meeting, check_version, without_loop
from p2pstate.plan_recovery import (
    Fetch,
    Lineage,
    Plan,
    RankReport,
    StartOver,
    StateLost,
    plan_recovery,
)
from p2pstate.recover_disk import DiskRecovery
from p2pstate.resume import Disk
from p2pstate.settings import Asked
from p2pstate.slots import Slot, digest_of
from p2pstate.state import TrainingState
from p2pstate.types import SlotRecord, Start, Version
from p2pstate.worker.link import Link

__all__ = ["join"]


def join(attempt: Attempt, asked: Asked, disk: Disk | None, *, connected: bool, timeout_s: float) -> Joined:
    """Bring this process into the round of ``attempt``; ``connected``: its groups have the round's connections already;
    ``timeout_s``: how long the ranks wait for each other.

    Raises MustStartOver when no version can be resumed in place, LostError when there is none any more, neither in
    memory nor on ``disk``, NotFinite when all go back behind a step and there is no checkpoint from before; ConfigError
    in a newcomer that asks for other settings than those who are there; OtherLoop where the version is of a training
    loop that this process has yet to come to; Retryable, DistStoreError or RuntimeError when the round ends or a member
    fails meanwhile: join the next round then.
    """
    info, report, registry = attempt.info, attempt.report, attempt.registry
    phases, row = attempt.phases, attempt.row
    row.begin(info.epoch)
    with phases.phase("spare"), row.inside("meet"):
        met = _meet(attempt, asked, timeout_s)
    reports = met.reports
    ends = max([info.ends, *(each.ends for each in reports.values())])
    check_meeting(report, reports, ends)
    with phases.phase("groups"), row.inside("connect"):
        if not connected:
            registry.attach(call(lambda: registry.build(info.epoch), attempt.is_over, "connecting"))
    on_disk = None if disk is None else DiskRecovery(disk, attempt, reports)
    spoilt_step = max(each.spoilt_step for each in reports.values())
    if spoilt_step:
        assert on_disk is not None, "settings that ask for it name a directory"
        return met.complete(on_disk.behind(spoilt_step, asked.settings.nan_rollback))
    slots = _LocalSlots(attempt.link)
    ended_at = min((each.ended_at for each in reports.values() if each.ended_at >= 0), default=None)
    try:
        with row.inside("plan"):
            plan = _agree(attempt, reports, slots, num_losses=asked.settings.copies - met.lean)
        step = plan.version.step
        check_version(report, reports, ends, ends.loop_of(step), step, info.epoch)
    except (LostError, MustStartOver) as error:
        may_read = isinstance(error, LostError) or error.decision.start == Start.FRESH
        joined = on_disk.newest(error, ended_at) if on_disk is not None and may_read else None
        if joined is not None:
            return met.complete(joined)
        if ended_at == 0:
            raise without_loop(error, info.epoch, report.loop, ends) from None
        raise
    _carry_out(plan, attempt, slots)
    source, num_bytes = _source(plan, report)
    end_step = step if step in ends.left else ended_at
    resumed = ends.resumed(info.epoch, step)
    return met.complete(
        Joined(plan.version, plan.keep, plan.steps_lost, source, num_bytes, plan.reason, end_step, resumed)
    )


@dataclass(frozen=True, slots=True)
class _Met:
    """What the ranks told each other, and whether the round is lean. ``sizes_of_all``: what each rank has;
    ``replicas``: what the ranks that were there know of leaves that are not alike (see Asked)."""

    reports: dict[int, RankReport]
    lean: bool
    sizes_of_all: list[tuple[int, int]]
    replicas: list[Any]

    def complete(self, joined: Joined) -> Joined:
        return replace(joined, lean=self.lean, sizes_of_all=self.sizes_of_all, replicas=self.replicas)


def _meet(attempt: Attempt, asked: Asked, timeout_s: float) -> _Met:
    """Wait until every rank has stopped what it did before: from here on no slot changes."""
    store, report = attempt.store, attempt.report
    said = [asked.settings.pack(), asked.sizes, [asked.lean, asked.why_not_full], asked.replicas]
    store.set(f"join/{report.rank}", msgpack.packb([report.pack(), *said]))
    keys = [f"join/{rank}" for rank in range(attempt.info.world_size)]
    store.wait(keys, timedelta(seconds=timeout_s))
    reports: dict[int, RankReport] = {}
    modes, sizes, replicas = [], [], []
    for rank, key in enumerate(keys):
        its, theirs, its_sizes, its_mode, its_replicas = msgpack.unpackb(store.get(key))
        modes.append(its_mode)
        sizes.append(tuple(its_sizes))
        reports[rank] = RankReport.unpack(its)
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
    return _Met(reports, lean, sizes, replicas)


def _mode(modes: Sequence[tuple[bool | None, str]], asked_for: bool) -> bool:
    """Whether the round is lean: as it was for those who were there, else as the newcomers' nodes need it.

    ``modes``: see Asked.
    """
    known = [lean for lean, _ in modes if lean is not None]
    return known[0] if known else asked_for or any(why_not for _, why_not in modes)


def _agree(attempt: Attempt, reports: Mapping[int, RankReport], slots: _LocalSlots, *, num_losses: int) -> Plan:
    """The newest version of which every copy that is to be used was found good, by the rank that is to read it.

    Raises MustStartOver or LostError, on all ranks alike, where the plan says so.
    """
    store, info, link = attempt.store, attempt.info, attempt.link
    me = info.workers[attempt.report.rank]
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
    for number in range(len(records) + 1):
        plan = plan_recovery(info, reports, records, turns, corrupt, num_losses=num_losses)
        if isinstance(plan, StartOver):
            raise MustStartOver(plan)
        if isinstance(plan, StateLost):
            raise LostError(plan.reason)
        with attempt.phases.phase("verify"):
            bad = _verify(slots, plan, me.rank, me.node)
            for node, slot in bad:  # said before others know: what they conclude may end the run
                link.send("event", kind="corrupt", node=node, slot=slot)
            store.set(f"verified/{number}/{me.rank}", msgpack.packb(sorted(bad)))
            found = frozenset(
                (node, slot)
                for rank in range(info.world_size)
                for node, slot in msgpack.unpackb(store.get(f"verified/{number}/{rank}"))
            )
        if not found:
            return plan
        corrupt |= found
    raise AssertionError("every attempt removes at least one record")


def _verify(slots: _LocalSlots, plan: Plan, rank: int, node: str) -> set[tuple[str, int]]:
    """Check every local slot that this rank will read or send, once. Returns those whose bytes do not match, or are of
    another shard or version."""
    bad = set()
    for fetch in plan.fetches:
        reads = fetch.rank == rank and fetch.sender is None
        if fetch.node != node or not (reads or fetch.sender == rank) or fetch.slot in slots:
            continue
        body = slots.open(fetch)
        if digest_of(memory_of(body)).hex() != fetch.digest or not is_image_of(body, plan.version, fetch.part):
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


def _carry_out(plan: Plan, attempt: Attempt, slots: _LocalSlots) -> None:
    """Returns when every rank has restored the version of ``plan``."""
    with attempt.phases.phase("pull"), attempt.row.inside("pull"):
        images = call(lambda: _move(plan, attempt.report.rank, slots, attempt.registry), attempt.is_over, "pulling")
    with attempt.phases.phase("restore"):
        _restore(attempt.state, images)
        with attempt.row.inside("confirm"):
            all_done(attempt.registry, attempt.is_over)


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
            arrival = _Arrival(fetch, plan.version)
            images.append(arrival.body)
            incoming.append(arrival.expected)
        elif fetch.sender == rank:
            outgoing.append(Outgoing(fetch.rank, digest, Payload(memory_of(slots.open(fetch)), digest)))
    registry.replication.exchange(outgoing, incoming)
    return images


def _restore(state: TrainingState, images: list[torch.Tensor]) -> None:
    """The live objects, from all that ``images`` hold together."""
    tensors: dict[str, torch.Tensor] = {}
    values = b""
    for image in images:
        found, plain = read_image(image)
        tensors.update(found)
        values = values or plain
    state.restore(tensors, values)


def _source(plan: Plan, report: RankReport) -> tuple[str, int]:
    """Where this rank has its state from (see Joined), and how many bytes of it came over the network."""
    pulled = [fetch for fetch in plan.of(report.rank) if fetch.sender is not None]
    if pulled:
        source = "buddy" if any(fetch.part.kind == "own" for fetch in pulled) else "replicas"
    else:
        source = "own vault" if report.newcomer else "survivor"
    return source, sum(fetch.num_bytes for fetch in pulled)


class _Arrival:
    """One part on its way from another node into new memory. The head of its message is its digest."""

    def __init__(self, fetch: Fetch, version: Version) -> None:
        assert fetch.sender is not None
        self._fetch, self._version = fetch, version
        self.body = torch.empty(fetch.num_bytes, dtype=torch.uint8)
        self.expected = Incoming(fetch.sender, self._accept, self._arrived)

    def _accept(self, head: bytes, num_bytes: int) -> memoryview:
        fetch = self._fetch
        if head.hex() != fetch.digest or num_bytes != fetch.num_bytes:
            raise Retryable(f"{fetch.node} sends {num_bytes} bytes that are not {fetch.part} as the plan has it")
        return memory_of(self.body)

    def _arrived(self, computed: bytes, announced: bytes) -> None:
        fetch = self._fetch
        if computed.hex() != fetch.digest:
            raise Retryable(f"{fetch.part} arrived from {fetch.node} with another digest than it was captured with")
        if not is_image_of(self.body, self._version, fetch.part):
            raise Retryable(f"what {fetch.node} sent as {fetch.part} is of another shard or version")
