"""What a running node knows of its run, as numbers: fed by its own events, asked by pages and metrics. Pure.

In: events, in order of time. Out: counters that only grow, the goodput of the last minute, of the last hour and of the
run, the newest incidents. Everything is of this node's ranks; whoever asks puts nodes together.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from p2pstate.observe.incidents import Incident, IncidentFinder
from p2pstate.observe.ledger import Ledger
from p2pstate.observe.skew import Windows

__all__ = ["FETCH_BUCKETS_S", "LiveRun"]

FETCH_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)
NOW_S, HOUR_S = 60.0, 3600.0
RECENT_S = 1.0
MAX_INCIDENTS = 20  # that are told; all are counted
MAX_FETCHES = 1000


class LiveRun:
    def __init__(self, ledger: Ledger) -> None:
        """``ledger`` is fed by whoever owns it."""
        self.ledger = ledger
        self.recoveries: Counter[str] = Counter()  # by source
        self.recovery_s: defaultdict[tuple[str, str], float] = defaultdict(float)  # by source and phase
        self.transfer_bytes: Counter[str] = Counter()  # by source
        self.verification_failures: Counter[str] = Counter()  # by kind
        self.copy_bytes = 0
        self.fetch_counts = [0] * (len(FETCH_BUCKETS_S) + 1)
        self.fetch_s = 0.0
        self._finder = IncidentFinder()
        self._shipped: dict[int, int] = {}  # by rank: what its process has told of so far
        self._saved: tuple[int, float] | None = None  # the newest step on disk, and since when
        self._slow: dict[int, tuple[float, str]] = {}  # by rank: when it was said to be slow, and why
        # By rank: when recent steps were committed.
        self._commits: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._lags_s: dict[int, float] = {}  # by rank
        self._windows = Windows()
        self._fetches: deque[float] = deque(maxlen=MAX_FETCHES)
        self._recent: deque[tuple[float, Counter[str]]] = deque()  # of the last hour: sums of each RECENT_S

    def add(self, event: Mapping[str, Any]) -> None:
        self._finder.add(event)
        self._windows.add(event)
        kind = event["event"]
        if "clock" in event:
            self._on_clock(float(event["t"]), event["clock"]["seconds"])
        if kind == "step" and "step" in event:
            self._on_step(event)
        elif kind == "recovery":
            source = str(event["source"])
            self.recoveries[source] += 1
            self.transfer_bytes[source] += int(event["bytes"])
            for phase, seconds in event["phases"].items():
                self.recovery_s[source, str(phase)] += float(seconds)
        elif kind in ("corrupt", "replicas_differ"):
            self.verification_failures[kind] += 1
        elif kind == "saved":
            self._saved = (int(event["step"]), float(event["t"]))
        elif kind == "straggler":
            self._slow[event["rank"]] = (float(event["t"]), str(event["reason"]))
        elif kind == "worker_started":
            self._shipped.pop(event["rank"], None)

    def _on_clock(self, t: float, seconds: Mapping[str, float]) -> None:
        if not self._recent or t >= self._recent[-1][0] + RECENT_S:
            self._recent.append((t, Counter()))
        self._recent[-1][1].update(seconds)
        while self._recent[0][0] < t - HOUR_S:
            self._recent.popleft()

    def _on_step(self, event: Mapping[str, Any]) -> None:
        self._on_protected(event)
        rank, shipped = event["rank"], int(event.get("shipped_bytes", 0))
        self.copy_bytes += shipped - self._shipped.get(rank, 0)
        self._shipped[rank] = shipped
        fetch_s = float(event.get("clock", {}).get("seconds", {}).get("data", 0.0))
        self.fetch_s += fetch_s
        self._fetches.append(fetch_s)
        self.fetch_counts[sum(fetch_s > bound for bound in FETCH_BUCKETS_S)] += 1

    def _on_protected(self, event: Mapping[str, Any]) -> None:
        """How long ago, at this step, what is protected was committed."""
        commits, protected = self._commits[event["rank"]], event.get("protected")
        commits[event["step"]] = float(event["t"])
        if protected is None:
            return
        for step in [step for step in commits if step < protected or step > event["step"]]:
            del commits[step]
        if protected in commits:
            self._lags_s[event["rank"]] = float(event["t"]) - commits[protected]

    @property
    def protected_lag_s(self) -> float | None:
        """Of the rank that is furthest behind: between its newest step and its newest protected one."""
        return max(self._lags_s.values(), default=None)

    @property
    def own_step_s(self) -> Mapping[tuple[str, ...], float]:
        """Of the slowest and the fastest rank, in the newest window of steps; empty: not known yet."""
        loads = self._windows.loads.get(max(self._windows.loads, default=0), {})
        means = [load.own_s / load.num_steps for load in loads.values()]
        return {("slowest",): max(means), ("fastest",): min(means)} if means else {}

    @property
    def incidents(self) -> Sequence[Incident]:
        return self._finder.incidents

    def cause_of(self, round_: int) -> str:
        """What this node takes the failure for that ended a round; empty if it knows of none."""
        newest = self.incidents[-1] if self.incidents else None
        return newest.cause if newest is not None and newest.round == round_ else ""

    @property
    def failures(self) -> Counter[str]:
        """By cause."""
        return Counter(incident.cause for incident in self.incidents)

    @property
    def lost_steps(self) -> int:
        return sum(incident.steps_lost for incident in self.incidents)

    def summary(self, now: float) -> dict[str, Any]:
        """Plain values, for other nodes and pages. ``now``: seconds since 1970."""
        fetches = sorted(self._fetches)
        return {
            "seconds": {
                "now": self._since(now - NOW_S),
                "hour": self._since(now - HOUR_S),
                "run": dict(self.ledger.total().seconds),
            },
            "fetch_p95_s": fetches[int(0.95 * (len(fetches) - 1))] if fetches else None,
            "on_disk": None if self._saved is None else {"step": self._saved[0], "s_ago": now - self._saved[1]},
            "slow": [[rank, reason] for rank, (t, reason) in sorted(self._slow.items()) if t >= now - NOW_S],
            "loads": [
                [first, rank, *astuple(load)]
                for first, loads in self._windows.loads.items()
                for rank, load in loads.items()
            ],
            "incidents": [_told(incident, now) for incident in self.incidents[-MAX_INCIDENTS:]],
            "num_incidents": len(self.incidents),
        }

    def _since(self, t: float) -> dict[str, float]:
        sums: Counter[str] = Counter()
        for at, seconds in self._recent:
            if at >= t:
                sums.update(seconds)
        return dict(sums)


def _told(incident: Incident, now: float) -> dict[str, Any]:
    return {
        "round": incident.round,
        "s_ago": now - incident.t,
        "cause": incident.cause,
        "reason": incident.reason,
        "replaced": sorted(incident.replaced),
        "ranks": sorted(incident.recoveries),
        "looked_on": incident.looked_on,
        "source": incident.source,
        "bytes": incident.num_bytes,
        "steps_lost": incident.steps_lost,
        "seconds": incident.seconds,
        "protected_s": incident.protected_s,
        "phases": incident.phases(),
    }
