"""Failures one by one, seeded: what formulas for independent failures cannot say. Pure.

In: rates, partners, racks, spares, a seed. Out: frequencies over many simulated runs. Invariant: the same arguments
give the same answer. Known limits: each kind of recovery takes the same time every time; racks are runs of consecutive
nodes; a save that would be due during a recovery is not made.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Cluster", "Outcome", "neighbours", "simulate_goodput", "simulate_runs"]


def simulate_goodput(
    interval_s: float,
    stall_s: float,
    durable_after_s: float,
    restart_s: float,
    mtbf_s: float,
    *,
    num_failures: int = 200_000,
    seed: int = 0,
) -> tuple[float, float]:
    """`formulas.goodput` by drawing lives between failures: the mean, and its standard error."""
    lives = np.random.default_rng(seed).exponential(mtbf_s, num_failures)
    kept = interval_s * np.floor((lives - restart_s - durable_after_s) / (interval_s + stall_s)).clip(min=0)
    mean = float(kept.sum() / lives.sum())
    error = float(np.std(kept - mean * lives) / math.sqrt(num_failures) / lives.mean())
    return mean, error


def neighbours(num_nodes: int, copies: int) -> list[tuple[int, ...]]:
    """Partners that stand beside each other, as who numbers them gets them: rings of consecutive nodes."""
    num_groups = max(1, num_nodes // (copies + 1))
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    for node in range(num_nodes):
        groups[min(node // (copies + 1), num_groups - 1)].append(node)
    partners: list[tuple[int, ...]] = []
    for group in groups:
        for position in range(len(group)):
            following = range(1, min(copies, len(group) - 1) + 1)
            partners.append(tuple(group[(position + ahead) % len(group)] for ahead in following))
    return partners


@dataclass(frozen=True, slots=True)
class Cluster:
    """What fails, how often, and how long things take after it. ``partners[node]`` keep ``node``'s copies."""

    partners: Sequence[Sequence[int]]
    mtbf_s: float  # of the job
    duration_s: float
    num_spares: int
    repair_s: float
    node_share: float = 1.0
    rack_nodes: int = 8
    rack_share: float = 0.0
    # what a version costs, and what recovering takes
    interval_s: float = 10.0
    stall_s: float = 0.0
    durable_after_s: float = 0.0
    vault_recovery_s: float = 0.0
    buddy_recovery_s: float = 30.0
    unprotected_s: float = 30.0
    disk_recovery_s: float = 600.0  # and, on average, half an interval between durable saves is done again:
    redone_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Over ``num_runs`` simulated runs."""

    num_runs: int
    goodput: float
    goodput_error: float  # standard error of the mean
    failures_per_run: float
    losses_per_run: float  # failures after which some shard had no copy in memory
    chance_of_loss: float  # of a run, to see at least one
    chance_of_waiting: float  # of a run, to be without a spare at least once
    waiting_share: float  # of all time, spent waiting for a node
    most_away: int  # in 99 of 100 runs, no more nodes were away at once


@dataclass(slots=True)
class _Run:
    """One simulated run, failure by failure."""

    cluster: Cluster
    wards: Sequence[Sequence[int]]
    empty_until: list[float]  # of each node: when it holds all its copies again
    away: list[float] = field(default_factory=list)  # heap: when nodes under repair come back
    ready_at: float = 0.0  # every place has a node
    resume_at: float = 0.0  # and training goes on
    recovery_s: float = 0.0
    kept_s: float = 0.0
    waited_s: float = 0.0
    num_losses: int = 0
    most_away: int = 0

    def fail(self, now: float, nodes: range) -> None:
        """``nodes`` lose their memory; none: a process was lost."""
        cluster = self.cluster
        self._count_until(now)
        if now >= self.resume_at:
            self.recovery_s = 0.0
        self.recovery_s = max(self.recovery_s, cluster.buddy_recovery_s if nodes else cluster.vault_recovery_s)
        while self.away and self.away[0] <= now:
            heapq.heappop(self.away)
        ready_at = max(self.ready_at, now)
        for node in nodes:
            heapq.heappush(self.away, now + cluster.repair_s)
            num_without = len(self.away) - cluster.num_spares
            free_at = now if num_without <= 0 else heapq.nsmallest(num_without, self.away)[-1]
            self.empty_until[node] = free_at + cluster.unprotected_s
            ready_at = max(ready_at, free_at)
        self.most_away = max(self.most_away, len(self.away))
        end = cluster.duration_s
        self.waited_s += min(ready_at, end) - min(max(self.ready_at, now), end)
        if any(self._lost(shard, now) for node in nodes for shard in (node, *self.wards[node])):
            self.num_losses += 1
            self.kept_s -= cluster.redone_s
            self.recovery_s = cluster.disk_recovery_s
            self.empty_until = [min(until, now) for until in self.empty_until]
        self.ready_at = ready_at
        self.resume_at = ready_at + self.recovery_s

    def _lost(self, shard: int, now: float) -> bool:
        return all(self.empty_until[holder] > now for holder in (shard, *self.cluster.partners[shard]))

    def _count_until(self, now: float) -> None:
        cluster = self.cluster
        saved = math.floor((now - self.resume_at - cluster.durable_after_s) / (cluster.interval_s + cluster.stall_s))
        self.kept_s += max(0, saved) * cluster.interval_s

    def end(self) -> None:
        """The work of the last life counts, whether or not it was saved."""
        cluster = self.cluster
        running_s = max(0.0, cluster.duration_s - self.resume_at)
        self.kept_s += running_s * cluster.interval_s / (cluster.interval_s + cluster.stall_s)


def simulate_runs(cluster: Cluster, *, num_runs: int = 200, seed: int = 0) -> Outcome:
    """Runs of ``cluster.duration_s``, in which nodes, processes and racks fail. A rack takes all its nodes at once."""
    num_nodes = len(cluster.partners)
    num_racks = -(-num_nodes // cluster.rack_nodes)
    wards: list[list[int]] = [[] for _ in range(num_nodes)]
    for node, keepers in enumerate(cluster.partners):
        for keeper in keepers:
            wards[keeper].append(node)
    draw = np.random.default_rng(seed)
    runs = []
    num_failures = 0
    for _ in range(num_runs):
        run = _Run(cluster, wards, [0.0] * num_nodes)
        times = np.sort(draw.uniform(0, cluster.duration_s, draw.poisson(cluster.duration_s / cluster.mtbf_s)))
        kinds, places = draw.uniform(size=len(times)), draw.uniform(size=len(times))
        num_failures += len(times)
        for now, kind, place in zip(times.tolist(), kinds.tolist(), places.tolist(), strict=True):
            if kind < cluster.rack_share:
                first = int(place * num_racks) * cluster.rack_nodes
                nodes = range(first, min(first + cluster.rack_nodes, num_nodes))
            elif kind < cluster.rack_share + (1 - cluster.rack_share) * cluster.node_share:
                nodes = range(int(place * num_nodes), int(place * num_nodes) + 1)
            else:
                nodes = range(0)
            run.fail(now, nodes)
        run.end()
        runs.append(run)
    shares = np.array([max(0.0, run.kept_s) for run in runs]) / cluster.duration_s
    away = np.array([run.most_away for run in runs])
    return Outcome(
        num_runs=num_runs,
        goodput=float(shares.mean()),
        goodput_error=float(shares.std() / math.sqrt(num_runs)),
        failures_per_run=num_failures / num_runs,
        losses_per_run=sum(run.num_losses for run in runs) / num_runs,
        chance_of_loss=sum(run.num_losses > 0 for run in runs) / num_runs,
        chance_of_waiting=sum(run.waited_s > 0 for run in runs) / num_runs,
        waiting_share=sum(run.waited_s for run in runs) / (num_runs * cluster.duration_s),
        most_away=int(np.quantile(away, 0.99, method="higher")),
    )
