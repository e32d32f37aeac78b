"""The events of a run directory, of all nodes and all attempts, in order of time.

In: a directory with ``events-*.jsonl``. Out: events. A line that is cut off (its node died) is passed over. A node's
own events stay in the order in which it wrote them, whatever its clock did.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["DAMAGED", "read_events", "read_run"]

DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)  # raised by whoever trusts such an event
MOST_S = 2e11  # the year 8307


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Of one file, which may be larger than memory. Raises OSError when it cannot be read."""
    with path.open("rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and "event" in event and _is_time(event.get("t")):
                yield event


def _is_time(t: object) -> bool:
    """Seconds since 1970 that a calendar knows."""
    return isinstance(t, int | float) and abs(t) < MOST_S


def read_run(directory: str | Path) -> list[dict[str, Any]]:
    """Raises ValueError with a sentence when the directory holds no events."""
    folder = Path(directory)
    paths = sorted(folder.glob("events-*.jsonl"))
    nodes = [_dated(read_events(path)) for path in paths]
    events = [event for _, event in heapq.merge(*nodes, key=lambda dated: dated[0])]
    if not events:
        what = "is no directory" if not folder.is_dir() else "holds no events (events-NODE.jsonl)"
        raise ValueError(f"{folder} {what}: give the --run-dir of a run")
    return events


def _dated(events: Iterable[dict[str, Any]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Each event of one node with its time, or with the one before it where the node's clock was put back since."""
    newest = 0.0
    for event in events:
        newest = max(newest, float(event["t"]))
        yield newest, event
