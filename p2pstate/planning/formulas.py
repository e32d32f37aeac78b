"""The arithmetic of failures and checkpoints. Pure.

In: numbers (seconds, bytes, counts). Out: numbers. M is the mean time between failures of the whole job, τ the work
between two saves, δ what a save stops training for, w how long after that it counts, R what a restart takes. Failures
are independent and exponentially distributed here; what they are not, simulation.py answers.
"""

from __future__ import annotations

import math

__all__ = [
    "HOST_COPIES_WHILE_SAVING",
    "break_even_overhead",
    "chance_of_failure",
    "daly_interval_s",
    "goodput",
    "host_bytes",
    "idle_cost",
    "job_mtbf_s",
    "loss_rate",
    "lost_per_failure_s",
    "mean_lost_s",
    "mtbf_of_yearly_rate_s",
    "work_kept",
    "young_interval_s",
]

_LARGEST_EXPONENT = 700.0  # math.exp overflows above 709
_YEAR_S = 365 * 86400.0
HOST_COPIES_WHILE_SAVING = 1  # one more while a version is being written to disk


def job_mtbf_s(part_mtbf_s: float, num_parts: int) -> float:
    """Rates of independent parts add up: the whole is interrupted ``num_parts`` times as often as one part.

    The minimum of exponential variables is exponential with the sum of their rates (any text on reliability).
    """
    return part_mtbf_s / num_parts


def mtbf_of_yearly_rate_s(failures_per_year: float) -> float:
    """Mean time between failures of a part that fails so often a year (1 %: 0.01)."""
    return _YEAR_S / failures_per_year


def chance_of_failure(mtbf_s: float, time_s: float) -> float:
    """Of at least one failure within ``time_s``: 1 - e^(-t/M), a Poisson process with rate 1/M."""
    return -math.expm1(-time_s / mtbf_s)


def mean_lost_s(interval_s: float) -> float:
    """Work since the last checkpoint, on average: a failure is equally likely at any point of the interval (Young)."""
    return interval_s / 2


def work_kept(failures_per_s: float, interval_s: float) -> float:
    """Part of all work that is not repeated, to first order: 1 - rate x τ/2. Neither saves nor restarts are in it."""
    return 1 - failures_per_s * mean_lost_s(interval_s)


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """Work between two saves that loses least, to first order: sqrt(2 δ M).

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
    """
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Young's with the next terms: sqrt(2δM) (1 + sqrt(δ/2M)/3 + (δ/2M)/9) - δ; M when δ >= 2M.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems 22(3), 2006, equation 37.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return young_interval_s(save_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def goodput(interval_s: float, stall_s: float, durable_after_s: float, restart_s: float, mtbf_s: float) -> float:
    """Part of the wall clock that becomes kept work: τ e^(-(w+R)/M) / (M (e^((τ+δ)/M) - 1)).

    A restart may itself be interrupted. With w = 0 this is Daly's complete model (2006, equation 20, as a part of the
    whole). With w: the k-th save of an exponential life counts with probability e^(-(k(τ+δ)+w+R)/M); the sum of that
    geometric series, times τ, over M.
    """
    exponent = (interval_s + stall_s) / mtbf_s
    if exponent > _LARGEST_EXPONENT:
        return 0.0
    return interval_s / mtbf_s * math.exp(-(durable_after_s + restart_s) / mtbf_s) / math.expm1(exponent)


def lost_per_failure_s(without_failures: float, with_failures: float, mtbf_s: float) -> float:
    """What one failure costs in time of the whole job, from the goodput without any and with one every ``mtbf_s``."""
    return mtbf_s * (without_failures - with_failures)


def break_even_overhead(
    other_goodput: float, interval_s: float, durable_after_s: float, restart_s: float, mtbf_s: float
) -> float:
    """The overhead o at which saving after every ``interval_s`` for o τ is worth exactly ``other_goodput``.

    ``goodput`` with δ = o τ, solved for o: (M/τ) ln(1 + τ e^(-(w+R)/M) / (M G)) - 1. Negative: it never pays.
    """
    if other_goodput <= 0:
        return math.inf
    worth = interval_s / mtbf_s * math.exp(-(durable_after_s + restart_s) / mtbf_s) / other_goodput
    return mtbf_s / interval_s * math.log1p(worth) - 1


def loss_rate(node_mtbf_s: float, num_nodes: int, copies: int, unprotected_s: float) -> float:
    """How often per second all ``copies + 1`` holders of some shard are without it, failures being independent.

    For ``unprotected_s`` after its failure a node holds nothing; its shards are lost when the ``copies`` others of its
    group (placement.py) all fail before that is over: (N/m) (1 - e^(-u/m))^c, for nodes with a mean time m and windows
    that seldom overlap (u << m/N).
    """
    return num_nodes / node_mtbf_s * (-math.expm1(-unprotected_s / node_mtbf_s)) ** copies


def host_bytes(own_bytes: float, copies: int) -> float:
    """Host memory of a node that holds ``own_bytes`` of unique state: two versions of it and of every ward's, and one
    version more while it is written to disk."""
    return own_bytes * (2 + 2 * copies + HOST_COPIES_WHILE_SAVING)


def idle_cost(num_nodes: int, price_per_node_hour: float, idle_s: float) -> float:
    """What nodes cost while they produce nothing."""
    return num_nodes * price_per_node_hour * idle_s / 3600
