"""A run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, written while the run is read.

In: slices, incidents. Out: the trace-event format: a process per node, a thread per rank, a slice per category, and
incidents with their phases on a track of their own. Times are microseconds since the run's first event.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TextIO

from p2pstate.observe.incidents import Incident
from p2pstate.observe.timeline import Slice

__all__ = ["TraceWriter"]

INCIDENTS_PID = 0


class TraceWriter:
    def __init__(self, file: TextIO, begin: float) -> None:
        """``begin``: of the run, seconds since 1970."""
        self._file, self._begin = file, begin
        self._pids: dict[str, int] = {}  # by node
        self._threads: set[tuple[int, int]] = set()
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(json.dumps(_named("process_name", INCIDENTS_PID, 0, "incidents")))

    def add(self, part: Slice) -> None:
        pid = self._pids.get(part.node)
        if pid is None:
            pid = self._pids[part.node] = len(self._pids) + 1
            self._put(_named("process_name", pid, 0, part.node))
        if (pid, part.rank) not in self._threads:
            self._threads.add((pid, part.rank))
            self._put(_named("thread_name", pid, part.rank, f"rank {part.rank}"))
        self._put(_slice(part.category, pid, part.rank, self._at(part.begin), round(part.seconds * 1e6, 1), {}))

    def finish(self, incidents: Sequence[Incident], end: float) -> None:
        """``end``: of the run, and of an incident that was not over."""
        for number, incident in enumerate(incidents, start=1):
            over_at = end if incident.over_at is None else incident.over_at
            begin_us, duration = self._at(incident.t), round((over_at - incident.t) * 1e6, 1)
            arguments = {"reason": incident.reason, "source": incident.source, "steps lost": incident.steps_lost}
            self._put(_slice(f"incident {number}: {incident.cause}", INCIDENTS_PID, 0, begin_us, duration, arguments))
            for name, seconds in incident.phases().items():
                duration = round(seconds * 1e6, 1)
                self._put(_slice(name, INCIDENTS_PID, 1, begin_us, duration, {}))
                begin_us += duration
        for place, node in enumerate(sorted(self._pids), start=1):
            pid = self._pids[node]
            self._put({"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": place}})
        self._file.write("\n]}\n")

    def _at(self, t: float) -> float:
        return round((t - self._begin) * 1e6, 1)

    def _put(self, event: dict[str, Any]) -> None:
        self._file.write(",\n" + json.dumps(event))


def _slice(name: str, pid: int, tid: int, ts: float, dur: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "cat": name.partition(".")[0], "ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur} | (
        {"args": args} if args else {}
    )


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
