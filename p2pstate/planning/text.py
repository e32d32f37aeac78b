"""A plan for people (a page of text) and for programs (a JSON object).

In: a `Plan`. Out: text, or plain values whose names carry their units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from p2pstate.planning.plan import Placement, Plan
from p2pstate.planning.units import bytes_text, duration_text, percent_text, quantity_text

__all__ = ["as_json", "as_text"]

TITLES = {"checkpoint": "checkpointing", "async_checkpoint": "async checkpointing", "p2pstate": "p2pstate"}


def as_json(plan: Plan) -> dict[str, Any]:
    inputs = {name: value for name, value in asdict(plan.inputs).items() if value is not None}
    return {
        "inputs": inputs
        | {
            "num_nodes": plan.inputs.num_nodes,
            "state_bytes": plan.inputs.state_bytes,
            "save_s": plan.inputs.save_s,
            "load_s": plan.inputs.load_s,
        },
        "job_mtbf_s": plan.job_mtbf_s,
        "job_mtbf_h": plan.job_mtbf_s / 3600,
        "failures_per_day": plan.failures_per_day,
        "chance_of_failure": [
            {"within_s": time_s, "chance": chance} for time_s, chance in plan.chance_of_failure.items()
        ],
        "optimal_interval_s": {"young": plan.young_interval_s, "daly": plan.daly_interval_s},
        "goodput": {policy.name: policy.goodput for policy in plan.policies},
        "policies": {policy.name: asdict(policy) for policy in plan.policies},
        "rules_of_thumb": asdict(plan.thumb),
        "host_bytes_per_node": plan.host_bytes_per_node,
        "pod_memory": quantity_text(plan.host_bytes_per_node),
        "copies": {
            "bytes_per_step_per_node": plan.copy_bytes_per_step,
            "link_bytes_per_s_needed": plan.link_bytes_per_s_needed,
            "link_bytes_per_s": plan.inputs.link_bytes_per_s,
            "seconds_per_version": plan.inputs.copy_s,
            "every_step_fits": plan.copy_every_steps == 1,
            "every_steps": plan.copy_every_steps,
        },
        "break_even_overhead": plan.break_even_overhead,
        "losses_of_all_copies_per_year": plan.losses_per_year,
        "spares_needed": plan.spares_needed,
        "simulated_s": plan.simulated_s,
        "simulation": [
            {"copies": each.copies, "partners_apart": each.apart, **asdict(each.outcome)} for each in plan.placements
        ],
        "recommendation": {"policy": plan.recommended, "reason": plan.reason},
        "notes": list(plan.notes),
    }


def as_text(plan: Plan) -> str:
    inputs = plan.inputs
    chances = ", ".join(
        f"{percent_text(chance)} within {duration_text(time_s)}" for time_s, chance in plan.chance_of_failure.items()
    )
    fits = "every step fits" if plan.copy_every_steps == 1 else f"one step in {plan.copy_every_steps} fits"
    lines = [
        f"{inputs.num_gpus:,} GPUs on {_count(inputs.num_nodes, 'node')}, state {bytes_text(inputs.state_bytes)} "
        f"({bytes_text(inputs.node_bytes)} per node), step {duration_text(inputs.step_s)}",
        "",
        *_aligned(
            [
                (
                    "interrupted",
                    f"every {duration_text(plan.job_mtbf_s)} on average, {plan.failures_per_day:.3g} times a day",
                ),
                ("a failure comes with", chances),
                (
                    f"a checkpoint ({inputs.storage})",
                    f"{duration_text(inputs.save_s)} to write, {duration_text(inputs.load_s)} to read; best every "
                    f"{duration_text(plan.young_interval_s)} (Young), {duration_text(plan.daly_interval_s)} (Daly)",
                ),
            ]
        ),
        "",
        *_policies(plan),
        "",
        *_aligned(
            [
                (
                    "copies",
                    f"{bytes_text(plan.copy_bytes_per_step)} per step from each node, {duration_text(inputs.copy_s)} "
                    f"at {bytes_text(inputs.link_bytes_per_s)}/s: {fits}",
                ),
                (
                    "host memory",
                    f"{bytes_text(plan.host_bytes_per_node)} per node; as the request of a pod: "
                    f"{quantity_text(plan.host_bytes_per_node)}, and what the script needs",
                ),
                ("break-even", _break_even(plan)),
                ("rules of thumb", _rules_of_thumb(plan)),
                (
                    "spares",
                    f"{plan.spares_needed} for 99 of 100 runs of {duration_text(plan.simulated_s)} never to wait for a "
                    f"node (a repair takes {duration_text(inputs.repair_s)})",
                ),
                (
                    "all copies lost",
                    f"{plan.losses_per_year:.2g} times a year, if nodes fail independently; then the newest checkpoint "
                    "is loaded",
                ),
            ]
        ),
        "",
        *_simulation(plan),
        "",
        f"take {TITLES[plan.recommended]}: {plan.reason}.",
        *(f"note: {note}." for note in plan.notes),
    ]
    return "\n".join(lines)


def _rules_of_thumb(plan: Plan) -> str:
    thumb = plan.thumb
    return (
        f"{duration_text(thumb.lost_work_s)} lost per failure leave "
        f"{percent_text(max(0.0, thumb.goodput_lost_work_only))}; a restart costs ${thumb.cost_per_restart:,.0f}, all "
        f"of a month ${thumb.restarts_cost_per_month:,.0f}"
    )


def _break_even(plan: Plan) -> str:
    if plan.break_even_overhead < 0:
        return "copies do not pay, even if they cost nothing"
    return f"copies pay while they lengthen a step by less than {percent_text(plan.break_even_overhead)}"


def _policies(plan: Plan) -> list[str]:
    rows = [("", "goodput", "saves every", "stalls", "recovers in", "lost per failure", "cost per failure, day, month")]
    for policy in plan.policies:
        costs = (policy.cost_per_failure, policy.cost_per_day, policy.cost_per_month)
        rows.append(
            (
                TITLES[policy.name],
                percent_text(policy.goodput),
                duration_text(policy.interval_s),
                duration_text(policy.stall_s),
                duration_text(policy.recovery_s),
                duration_text(policy.lost_per_failure_s),
                "  ".join(f"${cost:,.0f}" for cost in costs),
            )
        )
    return _aligned(rows)


def _simulation(plan: Plan) -> list[str]:
    outcome = plan.simulated
    inputs = plan.inputs
    spares = inputs.num_spares if inputs.num_spares is not None else plan.spares_needed
    runs = f"{_count(outcome.num_runs, 'run')} of {duration_text(plan.simulated_s)}"
    racks = f"{percent_text(inputs.rack_share)} of failures take a rack of {_count(inputs.rack_nodes, 'node')}"
    head = f"simulated: {runs}, {_count(spares, 'spare')}, {racks}"
    rows = [("copies", "partners", "goodput", "runs that lose all copies of a shard", "runs that wait for a node")]
    for each in plan.placements:
        rows.append(
            (
                str(each.copies),
                "in other racks" if each.apart else "side by side",
                percent_text(each.outcome.goodput),
                _chance(each, each.outcome.chance_of_loss),
                _chance(each, each.outcome.chance_of_waiting),
            )
        )
    return [head, *_aligned(rows)]


def _chance(placement: Placement, chance: float) -> str:
    """None seen in n runs: less than 3/n, with 95 % confidence (the rule of three)."""
    if chance > 0:
        return percent_text(chance)
    return f"< {percent_text(min(1.0, 3 / placement.outcome.num_runs))}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
