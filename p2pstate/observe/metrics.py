"""A node's numbers in Prometheus' text format. Needs prometheus-client: ``p2pstate[metrics]``.

In: a `LiveRun`, the node's status (agent/status.py). Out: the exposition. Base units; no label for ranks, whose number
would multiply the series: the largest of this node's ranks is given where there is one value per rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from p2pstate.observe.live import FETCH_BUCKETS_S, LiveRun
from rendezvous.standing import part_of

__all__ = ["exposition"]


def exposition(live: LiveRun, status: Mapping[str, Any], version: str) -> bytes:
    """Raises ValueError, with what to install, when the library is missing."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise ValueError("metrics need prometheus-client: pip install 'p2pstate[metrics]'") from error

    registry = CollectorRegistry()
    registry.register(_Collector(live, status, version))
    return bytes(generate_latest(registry))


class _Collector:
    def __init__(self, live: LiveRun, status: Mapping[str, Any], version: str) -> None:
        self._live, self._status, self._version = live, status, version

    def collect(self) -> Iterator[Any]:
        live, seconds = self._live, self._live.ledger.total()
        yield _gauge("build_info", "The program's version.", {"version": self._version}, 1)
        yield _counter("failures", "Failures of the run, by cause.", ("cause",), live.failures)
        yield _counter("recoveries", "Ranks of this node that resumed, by source.", ("source",), live.recoveries)
        yield _counter(
            "recovery_seconds", "What ranks of this node spent recovering.", ("source", "phase"), live.recovery_s
        )
        yield _counter(
            "wall_seconds", "Wall clock of this node's ranks, by category.", ("category",), seconds.by_category()
        )
        yield _gauge("goodput_ratio", "Useful part of the wall clock of this node's ranks.", {}, seconds.ratio)
        yield _counter("lost_steps", "Committed steps that failures took back.", (), {(): live.lost_steps})
        yield _counter("copy_bytes", "Sent to the nodes that keep copies.", (), {(): live.copy_bytes})
        yield _counter("transfer_bytes", "Received by recovering ranks.", ("source",), live.transfer_bytes)
        yield _counter(
            "verification_failures",
            "Copies with other bytes than written.",
            ("kind",),
            live.verification_failures,
        )
        if live.own_step_s:
            text = "What a step takes this node's slowest and fastest rank without waiting for others."
            yield _gauges("own_step_seconds", text, ("of",), live.own_step_s)
        yield self._fetches()
        yield from self._of_status()

    def _fetches(self) -> Any:
        from prometheus_client.core import HistogramMetricFamily

        buckets, total = [], 0
        for bound, count in zip((*map(str, FETCH_BUCKETS_S), "+Inf"), self._live.fetch_counts, strict=True):
            total += count
            buckets.append((bound, total))
        text = "Waiting for a batch, per step and rank."
        return HistogramMetricFamily("p2pstate_fetch_seconds", text, buckets=buckets, sum_value=self._live.fetch_s)

    def _of_status(self) -> Iterator[Any]:
        status = self._status
        ranks = [rank for rank in status["ranks"] if rank["step"] is not None and rank["told_s_ago"] is not None]
        yield _gauge("vault_bytes", "Copies in this node's memory.", {}, status["vault_bytes"])
        yield _gauge("warm_processes", "Processes that are ready to take a rank.", {}, status["num_warm"])
        if ranks:
            lags = [rank["step"] - rank["protected"] for rank in ranks if rank["protected"] is not None]
            step, age_s = min(rank["step"] for rank in ranks), max(rank["told_s_ago"] for rank in ranks)
            yield _gauge("committed_step", "The newest step that all of this node's ranks have committed.", {}, step)
            yield _gauge("step_age_seconds", "Since the newest committed step.", {}, age_s)
            if lags:
                yield _gauge("protected_lag_steps", "Committed steps that are not protected yet.", {}, max(lags))
        view = status["view"]
        members = [(part_of(name, view), str(member["state"])) for name, member in status["members"].items()]
        lag_s = self._live.protected_lag_s
        if lag_s is not None:
            yield _gauge("protected_lag_seconds", "From the newest protected step to the newest one.", {}, lag_s)
        states: Counter[tuple[str, ...]] = Counter(members)
        yield _gauges("members", "Members of the run, as this node sees them.", ("part", "state"), states)


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Any:
    return _gauges(name, text, tuple(labels), {tuple(labels.values()): value})


def _gauges(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"p2pstate_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Any:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(f"p2pstate_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key if isinstance(key, tuple) else (key,), value)
    return family
