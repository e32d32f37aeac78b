"""Inputs -> a plan: how often it fails, what three ways to survive that are worth, and which one to take. Pure.

In: `Inputs`. Out: a `Plan`, every number of which carries its unit in its name. The three ways: *checkpoint* (training
stops while all ranks save), *async_checkpoint* (it stops for the copy to host memory), *p2pstate* (copies in the memory
of other nodes after every step). Invariant: the same inputs give the same plan; simulations are seeded.
Known limit: reading a checkpoint from local NVMe counts as if another node had it as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from p2pstate.placement import partners
from p2pstate.planning import formulas
from p2pstate.planning.inputs import STORAGE, Inputs
from p2pstate.planning.simulation import Cluster, Outcome, neighbours, simulate_runs
from p2pstate.planning.units import DAY_S, HOUR_S, MONTH_S, YEAR_S, bytes_text, duration_text, percent_text

__all__ = ["DEFAULT_HORIZONS_S", "Placement", "Plan", "Policy", "RulesOfThumb", "goodputs", "make_plan"]

DEFAULT_HORIZONS_S = (HOUR_S, DAY_S, 7 * DAY_S, MONTH_S)
UNLIMITED = 1 << 30
HOPELESS = 0.05  # a goodput at which no way is worth recommending
SIMULATED_FAILURES = 60_000  # per question: about half a second
MIN_RUNS, MAX_RUNS = 20, 2000


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to survive failures. Costs are of nodes that do no useful work."""

    name: str
    interval_s: float  # of work between two versions
    stall_s: float  # for which each version stops training
    recovery_s: float
    goodput: float
    lost_per_failure_s: float
    cost_per_failure: float
    cost_per_day: float
    cost_per_month: float


@dataclass(frozen=True, slots=True)
class Placement:
    """What the simulation says about one way to place so many copies."""

    copies: int
    apart: bool  # partners stand in different racks
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class RulesOfThumb:
    """What is often quoted of checkpointing: first-order figures, each of one part of the loss only."""

    lost_work_s: float  # per failure: half an interval
    goodput_lost_work_only: float  # neither saves nor restarts are in it; below 0: more than all is lost
    restart_s: float  # per failure, for which all nodes are paid
    cost_per_restart: float
    restarts_cost_per_day: float
    restarts_cost_per_month: float


@dataclass(frozen=True, slots=True)
class Plan:
    inputs: Inputs
    job_mtbf_s: float
    failures_per_day: float
    chance_of_failure: dict[float, float]  # within so many seconds
    young_interval_s: float
    daly_interval_s: float
    policies: tuple[Policy, ...]  # checkpoint, async_checkpoint, p2pstate
    thumb: RulesOfThumb
    host_bytes_per_node: float
    copy_bytes_per_step: float  # that a node sends, and receives
    link_bytes_per_s_needed: float  # for every step to be copied within one step
    copy_every_steps: int  # 1: every step fits
    break_even_overhead: float
    losses_per_year: float  # of all copies of some shard, failures being independent
    spares_needed: int  # for 99 of 100 runs never to wait for a node
    simulated_s: float  # the length of each run
    placements: tuple[Placement, ...]
    recommended: str
    reason: str
    notes: tuple[str, ...]

    def policy(self, name: str) -> Policy:
        return next(policy for policy in self.policies if policy.name == name)

    @property
    def simulated(self) -> Outcome:
        """Of the placement that p2pstate uses."""
        wanted = self.inputs.copies
        return next(each.outcome for each in self.placements if each.copies == wanted and each.apart)


def make_plan(inputs: Inputs, horizons_s: Sequence[float] = DEFAULT_HORIZONS_S, seed: int = 0) -> Plan:
    """All answers at once. Takes a second or two: the simulations."""
    mtbf_s = formulas.job_mtbf_s(inputs.gpu_mtbf_s, inputs.num_gpus)
    policies, break_even = _policies(inputs, mtbf_s)
    every = _every(inputs)
    redone_s = formulas.mean_lost_s(policies[1].interval_s)
    duration_s, num_runs = _simulated(mtbf_s)
    cluster = _cluster(inputs, mtbf_s, duration_s, redone_s)
    needed = simulate_runs(replace(cluster, num_spares=UNLIMITED), num_runs=num_runs, seed=seed).most_away
    num_spares = needed if inputs.num_spares is None else inputs.num_spares
    placements = _placements(inputs, replace(cluster, num_spares=num_spares), num_runs, seed)
    recommended, reason = _recommend(inputs, policies, break_even)
    return Plan(
        inputs=inputs,
        job_mtbf_s=mtbf_s,
        failures_per_day=DAY_S / mtbf_s,
        chance_of_failure={time_s: formulas.chance_of_failure(mtbf_s, time_s) for time_s in horizons_s},
        young_interval_s=formulas.young_interval_s(inputs.save_s, mtbf_s),
        daly_interval_s=formulas.daly_interval_s(inputs.save_s, mtbf_s),
        policies=policies,
        thumb=_rules_of_thumb(inputs, mtbf_s, policies[0]),
        host_bytes_per_node=formulas.host_bytes(inputs.node_bytes, inputs.copies),
        copy_bytes_per_step=inputs.copies * inputs.node_bytes,
        link_bytes_per_s_needed=inputs.copies * inputs.node_bytes / inputs.step_s,
        copy_every_steps=every,
        break_even_overhead=break_even,
        losses_per_year=_losses_per_s(inputs, mtbf_s) * YEAR_S,
        spares_needed=needed,
        simulated_s=duration_s,
        placements=placements,
        recommended=recommended,
        reason=reason,
        notes=tuple(_notes(inputs, every, needed, duration_s, placements)),
    )


def goodputs(inputs: Inputs) -> dict[str, float]:
    """Of the three ways; the formulas only."""
    policies, _ = _policies(inputs, formulas.job_mtbf_s(inputs.gpu_mtbf_s, inputs.num_gpus))
    return {policy.name: policy.goodput for policy in policies}


def _every(inputs: Inputs) -> int:
    """How many steps pass from one version to the next: as many as one takes to reach its partners."""
    return max(1, math.ceil(inputs.copy_s / inputs.step_s))


def _policies(inputs: Inputs, mtbf_s: float) -> tuple[tuple[Policy, Policy, Policy], float]:
    """And the break-even overhead of the last against the better of the other two."""
    checkpoint = _disk_policy("checkpoint", inputs, mtbf_s, inputs.save_s, 0.0)
    async_checkpoint = _disk_policy("async_checkpoint", inputs, mtbf_s, inputs.snapshot_s, inputs.save_s)
    memory, break_even = _memory_policy(inputs, mtbf_s, checkpoint, async_checkpoint)
    return (checkpoint, async_checkpoint, memory), break_even


def _node_mtbf_s(inputs: Inputs, mtbf_s: float) -> float:
    """Of one node's memory: failures of processes leave it alone, those of racks take several nodes."""
    nodes_per_failure = (1 - inputs.rack_share) * inputs.node_share + inputs.rack_share * min(
        inputs.rack_nodes, inputs.num_nodes
    )
    return mtbf_s * inputs.num_nodes / nodes_per_failure if nodes_per_failure else math.inf


def _losses_per_s(inputs: Inputs, mtbf_s: float) -> float:
    node_mtbf_s = _node_mtbf_s(inputs, mtbf_s)
    if math.isinf(node_mtbf_s):
        return 0.0
    copies = min(inputs.copies, inputs.num_nodes - 1)
    return formulas.loss_rate(node_mtbf_s, inputs.num_nodes, copies, inputs.unprotected_s)


def _policy(
    inputs: Inputs, name: str, interval_s: float, stall_s: float, recovery_s: float, goodput: float, mtbf_s: float
) -> Policy:
    lost_s = formulas.lost_per_failure_s(interval_s / (interval_s + stall_s), goodput, mtbf_s)

    def cost(idle_s: float) -> float:
        return formulas.idle_cost(inputs.num_nodes, inputs.price_per_node_hour, idle_s)

    lost_share = 1 - goodput
    return Policy(
        name=name,
        interval_s=interval_s,
        stall_s=stall_s,
        recovery_s=recovery_s,
        goodput=goodput,
        lost_per_failure_s=lost_s,
        cost_per_failure=cost(lost_s),
        cost_per_day=cost(lost_share * DAY_S),
        cost_per_month=cost(lost_share * MONTH_S),
    )


def _rules_of_thumb(inputs: Inputs, mtbf_s: float, checkpoint: Policy) -> RulesOfThumb:
    """Young's first order: 1 - rate x interval / 2; and nodes x price x time."""
    cost = formulas.idle_cost(inputs.num_nodes, inputs.price_per_node_hour, checkpoint.recovery_s)
    return RulesOfThumb(
        lost_work_s=formulas.mean_lost_s(checkpoint.interval_s),
        goodput_lost_work_only=formulas.work_kept(1 / mtbf_s, checkpoint.interval_s),
        restart_s=checkpoint.recovery_s,
        cost_per_restart=cost,
        restarts_cost_per_day=cost * DAY_S / mtbf_s,
        restarts_cost_per_month=cost * MONTH_S / mtbf_s,
    )


def _disk_policy(name: str, inputs: Inputs, mtbf_s: float, stall_s: float, durable_after_s: float) -> Policy:
    """At the given interval, or the one that is best by Daly; one save ends before the next one begins."""
    least_s = max(durable_after_s - stall_s, inputs.step_s)
    best_s = max(least_s, formulas.daly_interval_s(stall_s, mtbf_s))
    interval_s = inputs.interval_s if inputs.interval_s is not None else best_s
    recovery_s = inputs.disk_recovery_s
    goodput = formulas.goodput(interval_s, stall_s, durable_after_s, recovery_s, mtbf_s)
    return _policy(inputs, name, interval_s, stall_s, recovery_s, goodput, mtbf_s)


def _memory_policy(inputs: Inputs, mtbf_s: float, checkpoint: Policy, async_checkpoint: Policy) -> tuple[Policy, float]:
    interval_s, recovery_s = _every(inputs) * inputs.step_s, inputs.memory_recovery_s
    stall_s = inputs.overhead * interval_s
    # When all copies of a shard are gone, the newest durable version is loaded, and half an interval done again.
    fallback_s = inputs.disk_recovery_s + formulas.mean_lost_s(async_checkpoint.interval_s)
    kept = max(0.0, 1 - _losses_per_s(inputs, mtbf_s) * fallback_s)
    goodput = kept * formulas.goodput(interval_s, stall_s, inputs.copy_s, recovery_s, mtbf_s)
    best = max(checkpoint.goodput, async_checkpoint.goodput)
    break_even = -1.0
    if kept > 0:
        break_even = formulas.break_even_overhead(best / kept, interval_s, inputs.copy_s, recovery_s, mtbf_s)
    return _policy(inputs, "p2pstate", interval_s, stall_s, recovery_s, goodput, mtbf_s), break_even


def _simulated(mtbf_s: float) -> tuple[float, int]:
    """How long runs to simulate, and how many: a month each, less where it is full of failures."""
    duration_s = min(MONTH_S, SIMULATED_FAILURES / MIN_RUNS * mtbf_s)
    return duration_s, max(MIN_RUNS, min(MAX_RUNS, round(SIMULATED_FAILURES * mtbf_s / duration_s)))


def _racks(inputs: Inputs) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Names of the nodes, and their labels."""
    names = [f"n{node}" for node in range(inputs.num_nodes)]
    return names, {name: {"rack": f"r{node // inputs.rack_nodes}"} for node, name in enumerate(names)}


def _cluster(inputs: Inputs, mtbf_s: float, duration_s: float, redone_s: float) -> Cluster:
    """With partners in different racks; ``redone_s`` of work is repeated after a return to disk."""
    names, racks = _racks(inputs)
    interval_s = _every(inputs) * inputs.step_s
    return Cluster(
        partners=partners(names, inputs.copies, racks),
        mtbf_s=mtbf_s,
        duration_s=duration_s,
        num_spares=0,
        repair_s=inputs.repair_s,
        node_share=inputs.node_share,
        rack_nodes=inputs.rack_nodes,
        rack_share=inputs.rack_share,
        interval_s=interval_s,
        stall_s=inputs.overhead * interval_s,
        durable_after_s=inputs.copy_s,
        vault_recovery_s=inputs.vault_recovery_s,
        buddy_recovery_s=inputs.buddy_recovery_s + inputs.node_bytes / inputs.link_bytes_per_s,
        unprotected_s=inputs.unprotected_s,
        disk_recovery_s=inputs.disk_recovery_s,
        redone_s=redone_s,
    )


def _placements(inputs: Inputs, cluster: Cluster, num_runs: int, seed: int) -> tuple[Placement, ...]:
    names, racks = _racks(inputs)
    useful = {copies for copies in (1, 2) if copies < inputs.num_nodes} | {inputs.copies}
    ways: list[tuple[int, bool, Sequence[Sequence[int]]]] = [
        (inputs.copies, False, neighbours(inputs.num_nodes, inputs.copies))
    ]
    ways += [(copies, True, partners(names, copies, racks)) for copies in sorted(useful)]
    return tuple(
        Placement(copies, apart, simulate_runs(replace(cluster, partners=keepers), num_runs=num_runs, seed=seed))
        for copies, apart, keepers in ways
    )


def _recommend(inputs: Inputs, policies: tuple[Policy, ...], break_even: float) -> tuple[str, str]:
    checkpoint, async_checkpoint, memory = policies
    other = max(checkpoint, async_checkpoint, key=lambda policy: policy.goodput)
    if max(policy.goodput for policy in policies) < HOPELESS:
        best = max(policies, key=lambda policy: policy.goodput)
        return best.name, (
            f"hardly any work gets done whatever is done about failures, for they come faster than anything recovers "
            f"({duration_text(memory.recovery_s)} from memory): fewer GPUs, or more reliable ones, are needed"
        )
    if inputs.num_nodes == 1:
        return other.name, (
            "there is one node, so no other one can keep copies, and its own memory is lost with it: have a second node"
        )
    needed = formulas.host_bytes(inputs.node_bytes, inputs.copies)
    if inputs.host_bytes_per_node is not None and needed > inputs.host_bytes_per_node:
        return other.name, (
            f"copies need {bytes_text(needed)} of host memory per node and there are "
            f"{bytes_text(inputs.host_bytes_per_node)}: have more nodes, or fewer copies"
        )
    if memory.goodput <= other.goodput:
        return other.name, (
            f"copying after every step costs {percent_text(inputs.overhead)} of each step, and pays only below "
            f"{percent_text(max(0.0, break_even))}: failures are too rare, or recovery from memory is too slow"
        )
    saved = other.cost_per_month - memory.cost_per_month
    return memory.name, (
        f"a failure costs {duration_text(memory.lost_per_failure_s)} instead of "
        f"{duration_text(other.lost_per_failure_s)}, and copying pays below {percent_text(break_even)} of a step (here "
        f"{percent_text(inputs.overhead)}): goodput {percent_text(memory.goodput)} instead of "
        f"{percent_text(other.goodput)}, ${saved:,.0f} a month"
    )


def _notes(inputs: Inputs, every: int, needed: int, duration_s: float, placements: Sequence[Placement]) -> list[str]:
    out = []
    if not STORAGE[inputs.storage].outlives_node:
        out.append(
            f"--storage {inputs.storage}: a checkpoint on a node's own disks is lost with the node; both kinds of "
            "checkpointing are counted as if another node had it as well"
        )
    if every > 1:
        out.append(
            f"a version takes {duration_text(inputs.copy_s)} to reach its partners, longer than a step: one step in "
            f"{every} is copied, and a failure repeats up to {every} of them; more nodes or a faster link help"
        )
    if inputs.num_spares is not None and inputs.num_spares < needed:
        out.append(
            f"{inputs.num_spares} spares are too few: with {needed}, 99 of 100 runs of {duration_text(duration_s)} "
            f"never wait for a node, when a repair takes {duration_text(inputs.repair_s)}"
        )
    side_by_side = next(each.outcome for each in placements if not each.apart)
    apart = next(each.outcome for each in placements if each.apart and each.copies == inputs.copies)
    if side_by_side.chance_of_loss > apart.chance_of_loss + 0.01:
        out.append(
            "label nodes with their racks (p2prun --label rack=NAME): with partners side by side a rack's failure "
            f"takes all copies, and {percent_text(side_by_side.chance_of_loss)} of runs of {duration_text(duration_s)} "
            "fall back to disk"
        )
    return out
