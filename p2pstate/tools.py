"""``p2pstate``: tools around a run, each of which says of itself what it takes and what it tells.

In: command-line arguments. Out: exit codes, as in :mod:`p2pstate.cli`. Only the module of the tool that was named is
imported: the others' would make it wait.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Collection, Sequence

from p2pstate.arguments import Parser, nearest

__all__ = ["run_tool"]

TOOLS = {  # name -> what it is for, the module that adds it
    "keygen": ("make the secret that the nodes of a run share", "p2pstate.keygen"),
    "doctor": ("look whether this host is ready for a run", "p2pstate.doctor"),
    "top": ("watch a run in the terminal", "p2pstate.observe.top"),
    "verdict": ("say how a run ended, and exit with the run's exit code", "p2pstate.verdict"),
    "report": ("what happened in a run, as one HTML page", "p2pstate.observe.command"),
    "checkpoints": ("list, verify, show or delete the checkpoints of a run", "p2pstate.durable.command"),
    "export": ("write the weights of a checkpoint as safetensors", "p2pstate.durable.command"),
    "chaos": ("inject faults into a running job (p2prun --chaos)", "p2pstate.chaos"),
    "data": ("prepare training data", "p2pstate.data.command"),
    "plan": ("how often a cluster fails, and what checkpoints and copies are worth there", "p2pstate.planning.command"),
}


def run_tool(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog="p2pstate", description="Tools around a run, which p2prun starts: see p2prun --help")
    parser.add_argument("--version", action="version", version=f"p2pstate {importlib.metadata.version('p2pstate')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    if arguments and arguments[0] in TOOLS:
        tool = importlib.import_module(TOOLS[arguments[0]][1])
        tool.add_commands(commands)
        arguments = _with_flags_first(arguments, getattr(tool, "FLAGS", frozenset()))
    else:
        for name, (purpose, _) in TOOLS.items():
            commands.add_parser(name, help=purpose)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in TOOLS:
        parser.error(
            f"there is no command {arguments[0]!r}{nearest(arguments[0], TOOLS)} Commands are {', '.join(TOOLS)}"
        )
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands.choices.get(options.command, parser).refuse(unknown)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has read enough, such as head
        _say_no_more()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        if error.filename is not None or error.errno != errno.ENOSPC:
            raise
        _say_no_more()
        print(f"p2pstate {options.command}: what it says could not be written: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _say_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_flags_first(arguments: list[str], flags: Collection[str]) -> list[str]:
    """argparse takes words that may be left out only where no flag is between them and the words before."""
    name, *rest = arguments
    return [name, *sorted(rest, key=lambda each: each not in flags)]
