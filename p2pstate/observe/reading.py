"""The events of a run directory, of all nodes and all attempts, in order of time.

In: a directory with ``events-*.jsonl``. Out: events, one after the other, for together they may be larger than memory.
A line that is cut off (its node died) is passed over. A node's own events stay in the order in which it wrote them,
whatever its clock did.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["DAMAGED", "read_events", "read_run", "span_of_run"]

DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)  # raised by whoever trusts such an event
TAIL_BYTES = 1 << 16
MOST_S = 2e11  # the year 8307


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Of one file, which may be larger than memory. Raises OSError when it cannot be read."""
    with path.open("rb") as file:
        for line in file:
            if (event := _parse(line)) is not None:
                yield event


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "event" in event and _is_time(event.get("t")) else None


def _is_time(t: object) -> bool:
    """Seconds since 1970 that a calendar knows."""
    return isinstance(t, int | float) and abs(t) < MOST_S


def read_run(directory: str | Path) -> Iterator[dict[str, Any]]:
    """Raises ValueError with a sentence when there is no such directory."""
    nodes = [_dated(read_events(path)) for path in _paths(directory)]
    for _, event in heapq.merge(*nodes, key=lambda dated: dated[0]):
        yield event


def span_of_run(directory: str | Path) -> tuple[float, float]:
    """Times of the first and of the last event, without reading what lies between. Raises
    ValueError with a sentence when the directory holds no events."""
    ends = [end for path in _paths(directory) for end in (next(read_events(path), None), _last_event(path))]
    times = [float(event["t"]) for event in ends if event is not None]
    if not times:
        raise ValueError(f"{directory} holds no events (events-NODE.jsonl): give the --run-dir of a run")
    return min(times), max(times)


def _paths(directory: str | Path) -> list[Path]:
    folder = Path(directory)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no directory: give the --run-dir of a run")
    return sorted(folder.glob("events-*.jsonl"))


def _last_event(path: Path) -> dict[str, Any] | None:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for tail in (min(TAIL_BYTES, size), size):  # all of it where the end is damaged
            file.seek(size - tail)
            newest_first = reversed(file.read(tail).splitlines())
            if (event := next(filter(None, map(_parse, newest_first)), None)) is not None:
                return event
    return None


def _dated(events: Iterable[dict[str, Any]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Each event of one node with its time, or with the one before it where the node's clock was put back since."""
    newest = 0.0
    for event in events:
        newest = max(newest, float(event["t"]))
        yield newest, event
