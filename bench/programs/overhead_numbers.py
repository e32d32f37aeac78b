"""From raw times to the figures of the overhead benchmark. Pure.

In: what every rank recorded (see overhead_rank.py): times of windows of steps, of saves, of floors; sizes. Out: the
figures, each with the definition below, and how far they spread.

Steps are timed in windows, windows of every kind taken in turns, so that what else the machine does hits all kinds
alike. A window counts with the mean of its steps (a cost that only every second step has is not lost); what something
costs is the median, over the rounds of windows, of the difference to the unprotected window of the same round.

Definitions, all times in seconds:
    payload_bytes               shipped to another node per step, by the rank that ships most
    unique_bytes                the state of the whole job with every leaf counted once, however many ranks hold it
    step_s                      a step without protection: no gate, no capture, no shipping
    exposed_s, exposed_pct      what protection adds to a step, whatever part of it makes the step longer
    protected_share             of all steps, those whose version was complete in both places on all ranks before the
                                next step's vote; a skipped step has no version
    protected_s                 from the end of a step until its version was complete in both places; the slowest rank
    host_bytes_per_unique_byte  memory of all vaults over unique_bytes
    floor_memcpy_s              all ranks at once copy as many bytes as they capture, once
    floor_socket_s              all ranks at once send what they ship over plain TCP to the same receivers
    ship_vs_socket              floor_socket_s over what shipping takes while nothing else runs: all ranks at once send
                                what they have captured again; 1 is as fast as plain sockets
    torch_save_s, dcp_save_s,   what saving at every step adds to a step, measured like exposed_s: rank 0 saves what
    dcp_async_s,                it has gathered; every rank saves its part; the same in the background, with a copy
    dcp_async_cached_s          made anew each time; with one that is kept
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

FORMS = ("ddp", "fsdp2", "hsdp", "fsdp_tp")
SAVES = ("torch_save", "dcp_save", "dcp_async", "dcp_async_cached")
KEYS = (
    "payload_bytes",
    "unique_bytes",
    "step_s",
    "exposed_s",
    "exposed_pct",
    "protected_share",
    "protected_s",
    "host_bytes_per_unique_byte",
    "floor_memcpy_s",
    "floor_socket_s",
    "ship_vs_socket",
    *(f"{save}_s" for save in SAVES),
)
DEPTH = 10
MIN_ROUNDS = 4

# Targets on two cores
MAX_DDP_PAYLOAD_BYTES = 64 << 10
MAX_DDP_EXPOSED_IN_MEMCPYS = 1.3
MAX_PROTECTED_IN_FLOORS = 1.5
MIN_SHIP_VS_SOCKET = 0.8
MAX_HOST_BYTES_PER_UNIQUE_BYTE = 4.25  # own 2, ward 2, and room to grow


@dataclass(frozen=True, slots=True)
class Settings:
    """What every rank is told."""

    num_parameters: int
    batch: int
    num_rounds: int  # an unprotected and a protected window each
    num_save_rounds: int  # an unprotected window and one per kind of saving each
    num_steps: int  # counted per window
    num_save_steps: int
    num_uncounted: int  # at the beginning of a window in which something is saved: nothing is under way yet
    rounds_end: float  # in monotonic seconds; no further round of windows begins after it, once there are a few
    saves_end: float  # the same for saves
    deadline_s: float  # of any single wait


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several measurements, and the middle half of them."""

    median: float
    low: float
    high: float


def width_for(num_parameters: int) -> int:
    """The width at which DEPTH blocks (8 w² + 7 w parameters each) have about so many parameters: a multiple of 16."""
    return max(16, round((num_parameters / (8 * DEPTH)) ** 0.5 / 16) * 16)


def spread(values: Sequence[float]) -> Spread:
    """ValueError without a value."""
    if not values:
        raise ValueError("nothing was measured")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def added(windows: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> list[float]:
    """Per round: how much longer a step was than in the baseline's window of that round."""
    pairs = zip(windows, baseline, strict=True)
    return [statistics.fmean(window) - statistics.fmean(plain) for window, plain in pairs]


def across_ranks(per_rank: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """The same windows as seen by every rank -> the mean over the ranks of every step."""
    return [[statistics.fmean(times) for times in zip(*window, strict=True)] for window in zip(*per_rank, strict=True)]


def protected_share(windows: Sequence[Sequence[bool]]) -> float:
    """``windows``: of consecutive steps, whether the step's version was skipped because an older one was on its way.

    A version was in time if the step after the one it belongs to was not skipped. Of the last step of a window this
    is not known, so it does not count.
    """
    steps = [(now, then) for window in windows for now, then in pairwise(window)]
    if not steps:
        raise ValueError("no two consecutive steps were seen")
    return sum(not now and not then for now, then in steps) / len(steps)


def span(per_rank: Sequence[Sequence[float]]) -> float:
    """``[began, ended, times]`` of every rank -> seconds until all had done it once."""
    began, ended = min(rank[0] for rank in per_rank), max(rank[1] for rank in per_rank)
    return (ended - began) / per_rank[0][2]


def slowest(per_rank: Sequence[Sequence[float]]) -> Spread:
    """The rank with the largest median."""
    return max((spread(values) for values in per_rank), key=lambda each: each.median)


def floor(ranks: Sequence[Mapping[str, Any]], name: str) -> Spread:
    return spread([span(tries) for tries in zip(*(rank[name] for rank in ranks), strict=True)])


def exposed(ranks: Sequence[Mapping[str, Any]]) -> Spread:
    windows = {kind: across_ranks([rank["windows"][kind] for rank in ranks]) for kind in ("plain", "protected")}
    return spread(added(windows["protected"], windows["plain"]))


def saving(ranks: Sequence[Mapping[str, Any]], save: str) -> Spread:
    windows = {kind: across_ranks([rank["saves"][kind] for rank in ranks]) for kind in ("plain", save)}
    return spread(added(windows[save], windows["plain"]))


def processor_time(ranks: Sequence[Mapping[str, Any]]) -> Spread:
    """What protection adds to a step in processor time, all threads of all ranks together.

    Unlike exposed_s it does not depend on what else the machine does; over the number of cores it is what protection
    adds to a step that leaves no core idle.
    """
    per_rank = [
        [protected - plain for protected, plain in zip(rank["cpu_s"]["protected"], rank["cpu_s"]["plain"], strict=True)]
        for rank in ranks
    ]
    return spread([sum(rounds) for rounds in zip(*per_rank, strict=True)])


def step_time(ranks: Sequence[Mapping[str, Any]]) -> Spread:
    plain = across_ranks([rank["windows"]["plain"] for rank in ranks])
    return spread([statistics.fmean(window) for window in plain])


def summarise(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of one parallelism, from what its ranks recorded."""
    unique_bytes = round(sum(rank["unique_bytes"] for rank in ranks))
    socket_s, step_s, exposed_s = floor(ranks, "socket"), step_time(ranks), exposed(ranks)
    return {
        "payload_bytes": max(rank["payload_bytes"] for rank in ranks),
        "unique_bytes": unique_bytes,
        "step_s": step_s.median,
        "exposed_s": exposed_s.median,
        "exposed_pct": 100 * exposed_s.median / step_s.median,
        "protected_share": min(protected_share(rank["skipped"]) for rank in ranks),
        "protected_s": slowest([rank["protected_s"] for rank in ranks]).median,
        "host_bytes_per_unique_byte": sum(rank["vault_bytes"] for rank in ranks) / unique_bytes,
        "floor_memcpy_s": floor(ranks, "memcpy").median,
        "floor_socket_s": socket_s.median,
        "ship_vs_socket": socket_s.median / floor(ranks, "ship").median,
        **{f"{save}_s": saving(ranks, save).median for save in SAVES},
    }


@dataclass(frozen=True, slots=True)
class Target:
    text: str
    met: bool


def targets(form: str, figures: Mapping[str, float]) -> list[Target]:
    """What is to be reached on two cores, and whether it was."""
    share, host = figures["protected_share"], figures["host_bytes_per_unique_byte"]
    found = [
        Target(f"protected share {share:.2f} = 1", share == 1),
        Target(
            f"memory {host:.2f} <= {MAX_HOST_BYTES_PER_UNIQUE_BYTE} bytes per unique byte",
            host <= MAX_HOST_BYTES_PER_UNIQUE_BYTE,
        ),
    ]
    exposed_s, memcpy_s, socket_s = figures["exposed_s"], figures["floor_memcpy_s"], figures["floor_socket_s"]
    if form in ("ddp", "hsdp"):
        payload = figures["payload_bytes"]
        found.append(Target(f"payload {payload} <= {MAX_DDP_PAYLOAD_BYTES} bytes", payload <= MAX_DDP_PAYLOAD_BYTES))
    if form == "ddp":
        limit_s = MAX_DDP_EXPOSED_IN_MEMCPYS * memcpy_s
        text = f"exposed {milli(exposed_s)} <= {MAX_DDP_EXPOSED_IN_MEMCPYS} memcpy = {milli(limit_s)}"
        found.append(Target(text, exposed_s <= limit_s))
    if form in ("fsdp2", "fsdp_tp"):
        limit_s, rival_s = MAX_PROTECTED_IN_FLOORS * (memcpy_s + socket_s), figures["dcp_async_cached_s"]
        ratio = figures["ship_vs_socket"]
        found += [
            Target(
                f"protected after {milli(figures['protected_s'])} <= {MAX_PROTECTED_IN_FLOORS} floors = "
                f"{milli(limit_s)}",
                figures["protected_s"] <= limit_s,
            ),
            Target(f"exposed {milli(exposed_s)} <= dcp.async_save, cached {milli(rival_s)}", exposed_s <= rival_s),
            Target(f"shipping {ratio:.2f} >= {MIN_SHIP_VS_SOCKET} of plain sockets", ratio >= MIN_SHIP_VS_SOCKET),
        ]
    return found


def milli(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
