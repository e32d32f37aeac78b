"""What a training script of another system tells of itself, in the form of a p2prun run's events.

In: a folder, a rank; the command line of examples/train_gpt.py and --events. Out: a file of events per rank, which the
processes that are this rank one after the other go on with, so that one timeline measures all systems.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any


class Events:
    """Appended to by every process that has been this rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"events-rank{rank}.jsonl"
        self._rank = rank
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        steps = [json.loads(line) for line in lines if '"step"' in line]
        self.newest_step = max((event["step"] for event in steps if event["event"] == "step"), default=0)
        self._file = self._path.open("a")

    def emit(self, event: str, *, t: float | None = None, **fields: Any) -> None:
        line = {"t": t or time.time(), "node": "node", "event": event, "rank": self._rank, **fields}
        print(json.dumps(line), file=self._file, flush=True)


def process_age_s() -> float:
    """Psutil's times of creation are up to a second too early: the kernel tells when it booted in whole seconds."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def arguments(what: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(what or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--events", type=Path, required=True, help="folder for the events")
    parser.add_argument("--num-replicas", type=int, help="of torchft")
    for name in ("num-layers", "width", "context", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.set_defaults(ddp=False, batch_norm=False)
    return parser.parse_args()
