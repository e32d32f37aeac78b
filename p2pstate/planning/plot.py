"""A plan as a picture: goodput of the three ways over the size of the cluster, and over the checkpoint interval.

In: a `Plan`. Out: an image file, in the format of its suffix (PNG, SVG, PDF). Needs matplotlib: ``p2pstate[plot]``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from p2pstate.planning import formulas
from p2pstate.planning.inputs import Inputs
from p2pstate.planning.plan import Plan, goodputs
from p2pstate.planning.text import TITLES

__all__ = ["save_plot"]

NUM_SIZES = 24
LINES = {"checkpoint": "--", "async_checkpoint": "-.", "p2pstate": "-"}  # told apart without colour, too
COLOURS = {"checkpoint": "#0072b2", "async_checkpoint": "#e69f00", "p2pstate": "#009e73"}


def save_plot(plan: Plan, path: Path) -> None:
    """Raises ValueError when matplotlib is missing or does not know the suffix, OSError when nothing can be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("it needs matplotlib: pip install 'p2pstate[plot]'") from error

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_size, by_interval = figure.subplots(1, 2)
    sizes = _sizes(plan.inputs)
    found = [goodputs(dataclasses.replace(plan.inputs, num_gpus=size)) for size in sizes]
    for name, style in LINES.items():
        by_size.plot(sizes, [100 * each[name] for each in found], style, color=COLOURS[name], label=TITLES[name])
    by_size.axvline(plan.inputs.num_gpus, color="grey", linewidth=0.8)
    by_size.set(
        xscale="log", xlabel="GPUs", ylabel="goodput, %", title="at each size, at its best interval", ylim=(0, 101)
    )
    by_size.legend(loc="lower left")

    checkpoint = plan.policy("checkpoint")
    intervals_s = np.geomspace(checkpoint.interval_s / 20, checkpoint.interval_s * 20, 200)
    values = [
        100 * formulas.goodput(interval_s, checkpoint.stall_s, 0.0, checkpoint.recovery_s, plan.job_mtbf_s)
        for interval_s in intervals_s
    ]
    by_interval.plot(
        intervals_s / 60, values, LINES["checkpoint"], color=COLOURS["checkpoint"], label=TITLES["checkpoint"]
    )
    ours = {"linestyle": LINES["p2pstate"], "color": COLOURS["p2pstate"], "label": TITLES["p2pstate"]}
    by_interval.axhline(100 * plan.policy("p2pstate").goodput, **ours)
    by_interval.plot([checkpoint.interval_s / 60], [100 * checkpoint.goodput], "o", color="black", label="this plan")
    title = f"{plan.inputs.num_gpus:,} GPUs, by checkpoint interval"
    by_interval.set(xscale="log", xlabel="minutes of work between two checkpoints", title=title, ylim=(0, 101))
    by_interval.legend(loc="lower left")
    figure.savefig(path)


def _sizes(inputs: Inputs) -> list[int]:
    """Numbers of GPUs around the planned one, whole nodes each."""
    nodes = np.unique(np.geomspace(max(1, inputs.num_nodes / 32), max(32, inputs.num_nodes * 8), NUM_SIZES).round())
    per_node = min(inputs.gpus_per_node, inputs.num_gpus)
    return [int(count) * per_node for count in nodes]
