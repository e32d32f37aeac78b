"""``p2pstate report``: the command around ``report.py`` and ``perfetto.py``.

In: arguments. Out: an exit code (0, or 1 with a sentence), one HTML file, a trace if one was asked for, and the goodput
on standard output.
"""

from __future__ import annotations

import argparse
import errno
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2pstate.arguments import path

if TYPE_CHECKING:
    from p2pstate.observe.history import History

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Adds ``report`` to the subparsers of ``p2pstate``."""
    report = commands.add_parser(
        "report",
        description="Read what the nodes of a run wrote into their run directory (--run-dir, or the directory of a "
        "RunMeter; copy the files of all nodes together if they have none in common), and make one HTML page of it.",
    )
    report.add_argument("run_dir", metavar="RUN_DIR", type=path)
    report.add_argument("--output", metavar="FILE", type=path, help="the page (default: RUN_DIR/report.html)")
    report.add_argument("--trace", metavar="FILE", type=path, help="also a trace for ui.perfetto.dev, as JSON")
    report.add_argument("--json", action="store_true", help="the goodput as one JSON object instead of text")
    report.set_defaults(run=run_command)


def run_command(options: argparse.Namespace) -> int:
    from p2pstate.observe.history import read_history
    from p2pstate.observe.report import as_html

    output = options.output or options.run_dir / "report.html"
    try:
        history = read_history(options.run_dir) if options.trace is None else _traced(options.run_dir, options.trace)
        output.write_text(as_html(history, f"Run {options.run_dir.resolve().name}"), encoding="utf-8")
    except (ValueError, OSError) as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        where = ": the report cannot be written; give --output and --trace places with room" if full else ""
        print(f"p2pstate report: {error}{where}", file=sys.stderr)
        return 1
    total = history.total
    if options.json:
        print(
            json.dumps(
                {
                    "goodput": total.ratio,
                    "wall_s": total.wall_s,
                    "seconds": dict(total.seconds),
                    "failures": history.num_failures,
                    "steps_lost": history.steps_lost,
                    "report": str(output),
                }
            )
        )
        return 0
    print(f"goodput {100 * total.ratio:.1f} % of {total.wall_s:.1f} s of {len(history.ranks)} ranks")
    print("\n".join(total.table()))
    for number, incident in enumerate(history.incidents, start=1):
        took = "is not over" if incident.seconds is None else f"took {incident.seconds:.2f} s"
        print(f"failure {number} ({incident.cause}) {took}: {incident.reason}")
    print(f"report: {output}")
    return 0


def _traced(run_dir: Path, path: Path) -> History:
    """The run's history, and its trace."""
    from p2pstate.observe.history import read_history
    from p2pstate.observe.perfetto import TraceWriter
    from p2pstate.observe.reading import span_of_run

    begin, end = span_of_run(run_dir)
    with path.open("w", encoding="utf-8") as file:
        trace = TraceWriter(file, begin)
        history = read_history(run_dir, trace.add)
        trace.finish(history.incidents, end)
    return history
