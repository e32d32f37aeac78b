"""What an operator does with a running run from any host that reaches a node: ``p2prun status``, ``stop``,
``assume-dead``.

In: command-line arguments: contacts and the run's key. Out: what the nodes say, on standard output, and an exit code: 0
done, 1 nobody answered or refused, 78 bad options. Every wait ends at ``--timeout``.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from p2pstate.agent.status import describe
from p2pstate.arguments import Parser
from p2pstate.errors import EXIT_CONFIG
from p2pstate.options import HelpFormatter, add_network, operator_config
from rendezvous.config import Config
from rendezvous.operator import Line, Operator
from rendezvous.types import RendezvousError
from rendezvous.zmq_transport import ZmqTransport

__all__ = ["OPERATING", "CommandRefused", "add_operator", "addresses_of", "operator_line"]

AGAIN_S = 0.5
NUM_SILENT_FOR_END = 2  # questions in a row that nobody answers: the run has ended


class CommandRefused(Exception):
    """The command cannot begin; the message says why."""


def _status(arguments: Sequence[str]) -> int:
    parser = _parser("status", "Show the nodes, ranks, copies and troubles of a run.")
    parser.add_argument("--json", action="store_true", help="what every node answered, by its name")
    options = parser.parse_args(arguments)
    with operator_line(options) as (config, transport):
        answers = Line(config, transport).ask("status", None, options.timeout, addresses_of)
    if not answers:
        return _nobody("status", options, config, transport)
    print(json.dumps(answers, indent=2) if options.json else "\n".join(describe(answers)))
    return 0


def _stop(arguments: Sequence[str]) -> int:
    parser = _parser("stop", "End a run on all nodes, with exit code 143, and wait until it has ended.")
    parser.add_argument("--reason", default="", metavar="TEXT", help="becomes part of the log")
    options = parser.parse_args(arguments)
    reason = f"{getpass.getuser()} on {socket.gethostname()}" + (f": {options.reason}" if options.reason else "")
    with operator_line(options) as (config, transport):
        until_s = time.monotonic() + options.timeout
        answers = Line(config, transport).ask("stop", reason, options.timeout)
        if not any(answer.get("taken") for answer in answers.values()):
            return _nobody("stop", options, config, transport)
        print(f"{', '.join(sorted(answers))}: the run is told to end")
        num_silent = 0
        while num_silent < NUM_SILENT_FOR_END and time.monotonic() < until_s:
            time.sleep(AGAIN_S)
            num_silent = 0 if Line(config, transport).ask("status", None, AGAIN_S, addresses_of) else num_silent + 1
    if num_silent < NUM_SILENT_FOR_END:
        print(f"p2prun stop: some node is still there after {options.timeout:g} s (--timeout)", file=sys.stderr)
        return 1
    print("nobody answers any more: it has ended")
    return 0


def _assume_dead(arguments: Sequence[str]) -> int:
    parser = _parser(
        "assume-dead",
        "Tell a run that waits for a silent node that this node is gone. Say so only if you know that none of its "
        "processes runs any more (the host is off, or was booted anew), and that no other node of the run goes on with "
        "it elsewhere: two groups might train otherwise. A node that comes back is counted out. Refused while any "
        "contact still hears from the node.",
    )
    parser.add_argument("node", metavar="NODE", help="its name in the run")
    parser.add_argument("--reason", default="an operator says so", metavar="TEXT", help="becomes part of the log")
    options = parser.parse_args(arguments)
    with operator_line(options) as (config, transport):
        outcome = Operator(config, transport, options.node, options.reason).assume_dead(options.timeout)
    for name, answer in sorted(outcome.answers.items()):
        print(f"{name}: {answer.text}")
    if not outcome.answers:
        _nobody("assume-dead", options, config, transport, outcome.problems)
    return 0 if outcome.done else 1


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"p2prun {command}",
        description=f"{description} Exit code: 0 done, 1 refused or nobody answered, 78 bad options.",
        formatter_class=HelpFormatter,
    )
    add_operator(parser)
    return parser


def add_operator(parser: argparse.ArgumentParser) -> None:
    """Which run, and how to reach it."""
    parser.add_argument(
        "--run-id", metavar="ID", default=os.environ.get("P2PSTATE_RUN_ID", "default"), help="as on the nodes"
    )
    parser.add_argument("--timeout", type=float, default=15.0, metavar="S", help="give up after this long")
    add_network(parser)


@contextmanager
def operator_line(options: argparse.Namespace) -> Iterator[tuple[Config, ZmqTransport]]:
    """Raises CommandRefused if the options do not make one."""
    try:
        config = operator_config(options)
        transport = ZmqTransport(config)
    except (ValueError, RendezvousError, OSError) as error:
        raise CommandRefused(str(error)) from error
    try:
        yield config, transport
    finally:
        transport.close(0.5)


def addresses_of(answer: Mapping[str, Any]) -> dict[str, str]:
    """Members that are worth asking."""
    members: Mapping[str, Mapping[str, Any]] = answer["members"]
    return {name: str(each["address"]) for name, each in members.items() if each["state"] in ("alive", "suspect")}


def _nobody(
    command: str, options: argparse.Namespace, config: Config, transport: ZmqTransport, problems: Sequence[str] = ()
) -> int:
    tried = "; ".join(problems) or ", ".join(config.contacts)
    print(
        f"p2prun {command}: nobody answered within {options.timeout:g} s ({tried}). Has the run ended? Else "
        f"check --contacts, --run-id and --key-file, and that the nodes can reach {transport.address} (--bind, "
        "--advertise)",
        file=sys.stderr,
    )
    return 1


def _command(name: str, run: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    def command(arguments: Sequence[str]) -> int:
        try:
            return run(arguments)
        except CommandRefused as error:
            print(f"p2prun {name}: {error}", file=sys.stderr)
            return EXIT_CONFIG

    return command


_COMMANDS = {"status": _status, "stop": _stop, "assume-dead": _assume_dead}
OPERATING = {name: _command(name, run) for name, run in _COMMANDS.items()}
