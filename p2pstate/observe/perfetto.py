"""A run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

In: a `History`. Out: the trace-event format: a process per node, a thread per rank, a slice per category, and incidents
with their phases on a track of their own. Times are microseconds since the run's first event.
"""

from __future__ import annotations

from typing import Any

from p2pstate.observe.history import History
from p2pstate.observe.incidents import Incident

__all__ = ["as_trace"]

INCIDENTS_PID = 0


def as_trace(history: History) -> dict[str, Any]:
    def at(t: float) -> float:
        return round((t - history.begin) * 1e6, 1)

    nodes = {node: pid for pid, node in enumerate(sorted({part.node for part in history.slices}), start=1)}
    events: list[dict[str, Any]] = [_named("process_name", INCIDENTS_PID, 0, "incidents")]
    events += [_named("process_name", pid, 0, node) for node, pid in nodes.items()]
    threads = sorted({(part.node, part.rank) for part in history.slices})
    events += [_named("thread_name", nodes[node], rank, f"rank {rank}") for node, rank in threads]
    for part in history.slices:
        begin, duration = at(part.begin), round(part.seconds * 1e6, 1)
        events.append(_slice(part.category, nodes[part.node], part.rank, begin, duration, {}))
    for number, incident in enumerate(history.incidents, start=1):
        over_at = history.end if incident.over_at is None else incident.over_at
        begin, duration = at(incident.t), round((over_at - incident.t) * 1e6, 1)
        arguments = {"reason": incident.reason, "source": incident.source, "steps lost": incident.steps_lost}
        events.append(_slice(f"incident {number}: {incident.cause}", INCIDENTS_PID, 0, begin, duration, arguments))
        events += _phases(incident, begin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _phases(incident: Incident, begin_us: float) -> list[dict[str, Any]]:
    out = []
    for name, seconds in incident.phases().items():
        duration = round(seconds * 1e6, 1)
        out.append(_slice(name, INCIDENTS_PID, 1, begin_us, duration, {}))
        begin_us += duration
    return out


def _slice(name: str, pid: int, tid: int, ts: float, dur: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "cat": name.partition(".")[0], "ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur} | (
        {"args": args} if args else {}
    )


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
