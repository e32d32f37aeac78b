"""How a run ended, read from its run directory: ``p2pstate verdict``.

In: the events and verdicts that the nodes left (``p2prun --run-dir``). Out: an exit code and a sentence. A launcher
such as srun reports the worst of its tasks, also when a node died and was replaced; the run's own verdict was written
by every node that lived to hear it.
Limits: one run per directory; a node that was killed, or whose disk was full when it started, tells nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pstate.arguments import path
from p2pstate.errors import EXIT_CONFIG, EXIT_RETRY

__all__ = ["RunVerdict", "add_commands", "read_verdict"]


def add_commands(commands: Any) -> None:
    """Adds ``verdict`` to the subparsers of ``p2pstate``."""
    verdict = commands.add_parser(
        "verdict",
        description="Say how a run ended, and exit with the run's exit code: 75 while no node has told an end.",
    )
    verdict.add_argument("run_dir", type=path, metavar="RUN_DIR", help="p2prun's --run-dir, of this run only")
    verdict.set_defaults(run=run_command)


def run_command(options: argparse.Namespace) -> int:
    run_dir: Path = options.run_dir
    try:
        verdict = read_verdict(run_dir)
    except OSError as error:
        print(f"p2pstate verdict: {run_dir} cannot be read: {error.strerror}", file=sys.stderr)
        return EXIT_CONFIG
    print(f"{verdict.text} (exit code {verdict.code})")
    return verdict.code


@dataclass(frozen=True, slots=True)
class RunVerdict:
    code: int  # p2prun's exit codes; 128 + signal when every node was asked to end
    text: str


def read_verdict(run_dir: Path) -> RunVerdict:
    """The run's verdict if a node heard one, else the last node's own end. OSError if the directory cannot be read."""
    paths = sorted(run_dir.iterdir())
    files = [path for path in paths if path.match("events-*.jsonl")]
    if not files:
        return RunVerdict(EXIT_CONFIG, f"no node has started: there are no events in {run_dir}")
    kept_room = [path for path in paths if path.match("verdict-*.json")]  # see agent/events.py
    verdicts = [event for path in files + kept_room for event in _verdicts(path)]
    if not verdicts:
        return RunVerdict(EXIT_RETRY, f"none of {len(files)} nodes lived to tell how the run ended")
    last = max(verdicts, key=lambda event: (event.get("scope") == "run", event["t"]))
    return RunVerdict(last["code"], f"node {last['node']}: {last['text']}")


def _verdicts(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            if b'"event": "verdict"' in line:
                try:
                    yield json.loads(line)
                except ValueError:
                    continue  # a node died while it wrote, or its disk was full
