"""``p2pstate``: tools around a run, each of which says of itself what it takes and what it tells.

In: command-line arguments. Out: exit codes, as in :mod:`p2pstate.cli`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from p2pstate.chaos import add_command as add_chaos_command
from p2pstate.chaos import run_command as run_chaos_command
from p2pstate.data.command import add_command as add_data_command
from p2pstate.data.command import run_command as run_data_command
from p2pstate.doctor import add_command as add_doctor_command
from p2pstate.doctor import run_command as run_doctor_command
from p2pstate.durable.command import add_commands as add_durable_commands
from p2pstate.durable.command import run_checkpoints, run_export
from p2pstate.errors import EXIT_CONFIG
from p2pstate.observe.command import add_command as add_report_command
from p2pstate.observe.command import run_command as run_report_command
from p2pstate.observe.top import add_command as add_top_command
from p2pstate.observe.top import run_command as run_top_command
from p2pstate.planning.command import add_command as add_plan_command
from p2pstate.planning.command import run_command as run_plan_command
from p2pstate.verdict import read_verdict
from rendezvous.keys import make_key_file

__all__ = ["run_tool"]


def run_tool(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="p2pstate", description="Tools around a run, which p2prun starts: see p2prun --help"
    )
    parser.add_argument("--version", action="version", version=f"p2pstate {importlib.metadata.version('p2pstate')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    keygen = commands.add_parser(
        "keygen",
        help="make the secret that the nodes of a run share",
        description="Make the secret that the nodes of a run share: p2prun --key-file FILE on each of them.",
    )
    keygen.add_argument("file", metavar="FILE", help="a new file; an existing one is never overwritten")
    verdict = commands.add_parser(
        "verdict",
        help="say how a run ended, and exit with the run's exit code",
        description="Say how a run ended, and exit with the run's exit code: 75 while no node has told an end.",
    )
    verdict.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="p2prun's --run-dir, of this run only")
    add_chaos_command(commands)
    add_durable_commands(commands)
    add_doctor_command(commands)
    add_data_command(commands)
    add_plan_command(commands)
    add_report_command(commands)
    add_top_command(commands)
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        code = COMMANDS[options.command](options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has read enough, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def _keygen(options: argparse.Namespace) -> int:
    path = options.file
    try:
        make_key_file(path)
    except FileExistsError:
        print(f"p2pstate keygen: {path} exists and is not overwritten: a run may be using it", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"p2pstate keygen: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{path}: a new secret, readable by its owner only; copy it to every node and name it there (--key-file)")
    return 0


def _verdict(options: argparse.Namespace) -> int:
    run_dir: Path = options.run_dir
    try:
        verdict = read_verdict(run_dir)
    except OSError as error:
        print(f"p2pstate verdict: {run_dir} cannot be read: {error.strerror}", file=sys.stderr)
        return EXIT_CONFIG
    print(f"{verdict.text} (exit code {verdict.code})")
    return verdict.code


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "chaos": run_chaos_command,
    "checkpoints": run_checkpoints,
    "data": run_data_command,
    "doctor": run_doctor_command,
    "export": run_export,
    "keygen": _keygen,
    "plan": run_plan_command,
    "report": run_report_command,
    "top": run_top_command,
    "verdict": _verdict,
}
