"""Runs of scripts/mishaps.py on two nodes of two workers, from their start to their end."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster

SCRIPT = str(Path(__file__).with_name("scripts") / "mishaps.py")
DEADLINE_S = 120.0  # only what never ends takes this long
NUM_STEPS = 40


@dataclass(frozen=True, slots=True)
class Outcome:
    """``pids``: the process that committed each step last, by rank. ``seen``: what its last process
    saw in hooks, without repetitions."""

    codes: Mapping[str, int | None]
    digests: list[str]
    seen: list[list[tuple[int, float, float]]]
    pids: list[dict[int, int]]
    events: list[dict[str, Any]]
    folder: Path
    log_tails: str

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def replaced(self) -> list[int]:
        """Ranks that got another process, in order."""
        return [event["rank"] for event in self.all("worker_started")][4:]

    def log(self, rank: int) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"run/logs/*/{rank}.*.log")))


def train(
    folder: Path,
    environ: dict[str, str],
    *mishaps: str,
    args: tuple[str, ...] = (),
    options: tuple[str, ...] = ("--hang-floor", "0.6"),
) -> Outcome:
    """Fails unless the run ends, with nothing left behind."""
    out = folder / "out"
    out.mkdir(parents=True)
    specs = [part for mishap in mishaps for part in ("--mishap", mishap)]
    script = [*options, SCRIPT, "--out", str(out), "--steps", str(NUM_STEPS), *specs, *args]
    with Cluster(folder / "run", script, num_training=2, num_spares=0, num_workers=2, environ=environ) as cluster:
        cluster.wait_end(DEADLINE_S)
        assert [left for left in cluster.leftovers() if "/dev/shm" not in left] == []
        found = [out / f"digest-{rank}" for rank in range(4)]
        return Outcome(
            cluster.exit_codes(),
            [path.read_text() for path in found if path.exists()],
            [ast.literal_eval(path.read_text()) for path in sorted(out.glob("seen-*"))],
            [_pids(out / f"steps-{rank}") for rank in range(4)],
            cluster.events.new(),
            folder,
            cluster.log_tails(),
        )


def _pids(path: Path) -> dict[int, int]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(step): int(pid) for step, pid in (line.split() for line in lines)}
