"""The commands: ``p2prun`` (one node of a run) and ``p2pstate`` (tools).

In: command-line arguments. Out: exit codes: 0 finished, 1 failed in user code, 75 retry on this node, 76 replace this
node, 77 state lost, 78 bad configuration.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pstate.agent.hang import DEFAULT_FLOOR_S
from p2pstate.agent.job import Job
from p2pstate.arguments import Parser, path
from p2pstate.errors import EXIT_CONFIG
from p2pstate.options import HelpFormatter, add_detection, add_network, add_run, make_config, read_labels
from rendezvous.config import Config
from rendezvous.types import RendezvousError, Role

if TYPE_CHECKING:  # each command imports what it runs, and no other has to wait for that
    from p2pstate.agent.agent import Agent
    from p2pstate.witness import Witness

__all__ = ["main", "p2prun"]

MAX_ROUNDS_WITHOUT_PROGRESS = 5
USAGE = """p2prun [OPTION ...] SCRIPT [ARGUMENT ...]
       p2prun status | stop | assume-dead | witness --help"""
INSTEAD_OF_TORCHRUNS = {
    "--rdzv-backend": "p2prun needs none: --contacts lists some nodes",
    "--rdzv-conf": "p2prun has options of its own for that",
    "--node-rank": "nodes need no numbers: --name tells them apart",
    "--master-addr": "there is no master: --contacts lists some nodes",
    "--master-port": "there is no master: --contacts lists some nodes",
    "--local-addr": "--advertise HOST:PORT says how others reach this node",
    "--redirects": "output of all ranks goes to the console and to --log-dir",
    "--tee": "output of all ranks goes to the console and to --log-dir",
    "--no-python": "the script has to be Python",
}
EPILOG = """\
A run on three hosts, one of them spare; the same on each but for --bind and --name:
  p2pstate keygen run.key    # once; copy it to every host
  p2prun --nnodes 2 --spares 1 --nproc-per-node 8 --contacts hostA:7000,hostB:7000,hostC:7000 \\
         --bind hostA:7000 --name hostA --key-file run.key --run-id my-run train.py

Exit codes: 0 finished, 1 the script failed, 75 no going on here (start again), 76 replace this node,
77 state lost, 78 wrong options or nobody to train with, 143 stopped.
"""


def p2prun(argv: Sequence[str] | None = None) -> int:
    """Run one node: its agent is this process, its workers are this process's descendants."""
    from p2pstate.operating import OPERATING

    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["witness"]:
        return _witness(arguments[1:])
    if arguments and arguments[0] in OPERATING:
        return OPERATING[arguments[0]](arguments[1:])
    options = _parser().parse_args(arguments)
    from p2pstate.agent.agent import Agent

    try:
        config, job = _configure(options)
        agent = Agent(config, job)
    except (ValueError, RendezvousError, OSError) as error:
        print(f"p2prun: {error}", file=sys.stderr)
        return EXIT_CONFIG

    _end_on_signals(agent, f"node {config.name}")
    code = agent.run()
    if code != 0 and job.quiet and agent.verdict is not None:
        print(f"p2prun: {agent.verdict.text}", file=sys.stderr)
    return code


def _end_on_signals(member: Agent | Witness, who: str) -> None:
    def on_signal(number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        member.node.call_soon_threadsafe(lambda: member.interrupt(128 + number, f"{name} was sent to {who}"))

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


def main(argv: Sequence[str] | None = None) -> int:
    """``p2pstate``: tools around a run."""
    from p2pstate.tools import run_tool

    return run_tool(argv)


def _witness(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="p2prun witness",
        description="Add a vote to a run, from any host: with one, a run on two nodes survives the silent loss of a "
        "node. Start the nodes with --witnesses (torchrun: --rdzv-conf witnesses=1).",
        formatter_class=HelpFormatter,
    )
    add_run(parser)
    add_network(parser)
    add_detection(parser)
    parser.add_argument("--name", default=f"witness-{socket.gethostname()}", help="unique within the run")
    options = parser.parse_args(arguments)
    from p2pstate.witness import Witness

    try:
        config = make_config(options, Role.WITNESS, num_workers=0)
        witness = Witness(config)
    except (ValueError, RendezvousError, OSError) as error:
        print(f"p2prun witness: {error}", file=sys.stderr)
        return EXIT_CONFIG

    _end_on_signals(witness, config.name)
    return witness.run()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="p2prun",
        usage=USAGE,
        epilog=EPILOG,
        description="Run one node of a training job whose processes and nodes may die. Start it once per node, "
        "with the same arguments except --name and --bind; surplus nodes become spares.",
        formatter_class=HelpFormatter,
        elsewhere=INSTEAD_OF_TORCHRUNS,
    )
    parser.add_argument("--version", action="version", version=f"p2prun {importlib.metadata.version('p2pstate')}")
    run = add_run(parser)
    run.add_argument(
        "--nproc-per-node",
        type=_num_workers,
        default=1,
        metavar="N",
        help="workers per node; auto: as many as there are cards, or else CPUs (also: gpu, cpu)",
    )
    run.add_argument("--standalone", action="store_true", help="one node, by itself, which is the default")
    run.add_argument("--run-dir", type=path, metavar="DIR", help="where events and logs go (one file per node)")
    run.add_argument("--log-dir", type=path, metavar="DIR", help="where logs of ranks go (default: logs in --run-dir)")
    add_network(parser)
    add_detection(parser)
    node = parser.add_argument_group("this node")
    node.add_argument("--name", default=socket.gethostname(), help="unique within the run")
    node.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="rack=NAME and zone=NAME: what fails together; copies go to other racks and zones (may be repeated)",
    )
    _add_limits(node)
    node.add_argument(
        "--rehearse",
        type=int,
        default=0,
        metavar="N",
        help="keep, for each of the node's first N ranks, a spare that has built its model and rehearsed already; each "
        "takes the memory of a rank, also on its card",
    )
    node.add_argument(
        "--hang-floor",
        type=float,
        default=DEFAULT_FLOOR_S,
        metavar="S",
        help="a worker others wait for is replaced when nothing has happened in it for so long, and for ten times what "
        "its steps take; 0: never",
    )
    _add_views(node)
    node.add_argument("--chaos", action="store_true", help="let p2pstate chaos inject faults into this node")
    node.add_argument("--quiet", action="store_true", help="workers' output and events go to --run-dir only")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name, as in python -m")
    parser.add_argument("script", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False
    return parser


def _num_workers(text: str) -> int:
    """As torchrun reads it."""
    if text not in ("auto", "cpu", "gpu"):
        try:
            return int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is none of: a number, auto, cpu, gpu") from error
    if text != "cpu":
        import torch  # here, so that whoever gives a number does not wait for it

        num_cards = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        if num_cards or text == "gpu":
            return num_cards
    return os.cpu_count() or 1


def _add_limits(node: argparse._ArgumentGroup) -> None:
    """How often and for how long something may go wrong before this node gives up."""
    node.add_argument("--max-restarts", type=int, default=1000, metavar="N", help="workers replaced before giving up")
    node.add_argument(
        "--max-tries-per-step", type=int, default=20, metavar="N", help="end a run that fails so often at one step"
    )
    node.add_argument(
        "--max-faults-per-hour", type=int, default=500, metavar="N", help="end a run that fails more often"
    )
    node.add_argument(
        "--give-up-after",
        type=float,
        default=60.0,
        metavar="S",
        help="end a run that fails again and again at one step",
    )
    node.add_argument(
        "--join-timeout", type=float, default=600.0, metavar="S", help="wait for the first view this long"
    )
    node.add_argument("--spare-wait", type=float, default=600.0, metavar="S", help="wait for a missing node this long")


def _add_views(node: argparse._ArgumentGroup) -> None:
    """Where this node shows what it knows."""
    node.add_argument(
        "--health-file",
        type=path,
        metavar="FILE",
        help="written every second while the agent lives, for probes (docs/kubernetes.md)",
    )
    node.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="serve a page of the whole run, /status.json and /metrics here, such as 127.0.0.1:8600 (read only)",
    )
    node.add_argument(
        "--http-token-file",
        type=path,
        metavar="FILE",
        help="whoever asks over HTTP has to know what is in this file",
    )
    node.add_argument(
        "--otel",
        action="store_true",
        help="send OpenTelemetry spans of failures by OTLP, to where the OTEL_* variables say (p2pstate[otel])",
    )


def _configure(options: argparse.Namespace) -> tuple[Config, Job]:
    """Raises ValueError or OSError, saying what is wrong with which option and what to do."""
    from p2pstate.agent.serving import read_token
    from p2pstate.operating import OPERATING

    if options.nproc_per_node < 1:
        raise ValueError(f"--nproc-per-node {options.nproc_per_node}: at least one worker is needed")
    if options.standalone and (options.nnodes, options.spares, options.witnesses) != ("1", 0, 0):
        raise ValueError("--standalone means one node, without spares and witnesses: leave it out")
    if not 0 <= options.rehearse <= options.nproc_per_node:
        raise ValueError(f"--rehearse {options.rehearse}: from 0 to as many as --nproc-per-node")
    if not 0 <= options.hang_floor < float("inf"):
        raise ValueError(f"--hang-floor {options.hang_floor:g}: give seconds, or 0 to leave hung workers alone")
    if not options.module and not os.path.isfile(options.script):
        commands = "" if "." in options.script else f"; commands are {', '.join([*OPERATING, 'witness'])}"
        raise ValueError(f"there is no script {options.script!r} here ({os.getcwd()}); -m runs a module{commands}")
    config = make_config(options, Role.NODE, options.nproc_per_node, read_labels(options.label))
    log_dir = options.log_dir or (os.path.join(options.run_dir, "logs") if options.run_dir else None)
    job = Job(
        script=options.script,
        args=tuple(options.args),
        module=options.module,
        num_workers=options.nproc_per_node,
        num_rehearsed=options.rehearse,
        run_dir=os.path.abspath(options.run_dir) if options.run_dir else None,
        log_dir=os.path.abspath(log_dir) if log_dir else None,
        quiet=options.quiet and options.run_dir is not None,
        max_restarts=options.max_restarts,
        max_rounds_without_progress=MAX_ROUNDS_WITHOUT_PROGRESS,
        max_tries_per_step=options.max_tries_per_step,
        max_faults_per_hour=options.max_faults_per_hour,
        give_up_s=options.give_up_after,
        join_timeout_s=options.join_timeout,
        spare_wait_s=options.spare_wait,
        health_file=os.path.abspath(options.health_file) if options.health_file else None,
        http=options.http,
        http_token=read_token(options.http_token_file) if options.http_token_file else None,
        otel=options.otel,
        chaos=options.chaos,
        hang_floor_s=options.hang_floor,
    )
    return config, job


if __name__ == "__main__":
    sys.exit(p2prun())
