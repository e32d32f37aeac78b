"""The commands: ``p2prun`` (one node of a run) and ``p2pstate`` (tools).

In: command-line arguments. Out: exit codes: 0 finished, 1 failed in user code, 75 retry on this node, 76 replace this
node, 77 state lost, 78 bad configuration.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Sequence

from p2pstate.agent.agent import Agent, Job
from p2pstate.errors import EXIT_CONFIG
from rendezvous.config import PRESETS, Config, split_endpoint
from rendezvous.types import RendezvousError, Role

__all__ = ["main", "p2prun"]

MAX_ROUNDS_WITHOUT_PROGRESS = 5


def p2prun(argv: Sequence[str] | None = None) -> int:
    """Run one node: its agent is this process, its workers are this process's descendants."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        config, job = _configure(options)
        agent = Agent(config, job)
    except (ValueError, RendezvousError, OSError) as error:
        print(f"p2prun: {error}", file=sys.stderr)
        return EXIT_CONFIG

    def on_signal(number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        agent.node.call_soon_threadsafe(lambda: agent.end(128 + number, f"{name} was sent to node {config.name}"))

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    code = agent.run()
    if code != 0 and job.quiet and agent.verdict is not None:
        print(f"p2prun: {agent.verdict.text}", file=sys.stderr)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """``p2pstate``: tools around a run."""
    parser = argparse.ArgumentParser(prog="p2pstate", description="Tools for p2pstate runs; see also: p2prun --help")
    parser.add_argument("--version", action="version", version=f"p2pstate {importlib.metadata.version('p2pstate')}")
    parser.parse_args(argv)
    parser.print_help()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="p2prun",
        description="Run one node of a training job whose processes and nodes may die. Start it once per node, "
        "with the same arguments except --name and --bind; surplus nodes become spares.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--run-id", default=os.environ.get("P2PSTATE_RUN_ID", "default"), help="the same on every node")
    run.add_argument("--nnodes", default="1", metavar="N or MIN:MAX", help="training nodes")
    run.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="workers per node")
    run.add_argument("--spares", type=int, default=0, metavar="N", help="spare nodes the first view waits for")
    run.add_argument("--run-dir", metavar="DIR", help="where events and logs go (one file per node)")
    net = parser.add_argument_group("the network")
    net.add_argument("--contacts", default="", metavar="LIST", help="host:port,... of nodes to ask; any one suffices")
    net.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT", help="where this node listens")
    net.add_argument("--advertise", metavar="HOST:PORT", help="how others reach this node, if not at --bind")
    net.add_argument("--key-file", metavar="FILE", help="file with the run's secret (hex); needed off loopback")
    net.add_argument("--insecure", action="store_true", help="listen off loopback without a key")
    net.add_argument("--preset", choices=sorted(PRESETS), default="default", help="timeouts")
    node = parser.add_argument_group("this node")
    node.add_argument("--name", default=socket.gethostname(), help="unique within the run")
    node.add_argument("--max-restarts", type=int, default=1000, metavar="N", help="workers replaced before giving up")
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
    node.add_argument("--quiet", action="store_true", help="workers' output and events go to --run-dir only")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name, as in python -m")
    parser.add_argument("script", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _configure(options: argparse.Namespace) -> tuple[Config, Job]:
    """Raises ValueError or OSError, saying what is wrong with which option and what to do."""
    low, _, high = options.nnodes.partition(":")
    if not (low.isdigit() and (high or low).isdigit()):
        raise ValueError(f"--nnodes {options.nnodes}: give a number, or MIN:MAX")
    if int(low) != int(high or low):
        raise ValueError(f"--nnodes {options.nnodes}: the number of training nodes is fixed so far, give one number")
    if options.nproc_per_node < 1:
        raise ValueError(f"--nproc-per-node {options.nproc_per_node}: at least one worker is needed")
    if not options.module and not os.path.isfile(options.script):
        raise ValueError(f"there is no script {options.script!r} here ({os.getcwd()}); -m runs a module")
    contacts = tuple(part.strip() for part in options.contacts.split(",") if part.strip())
    num_nodes = int(low)
    if not contacts and num_nodes + options.spares > 1:
        raise ValueError("--contacts is missing: list host:port of some nodes of this run (this one may be among them)")
    config = Config.from_env(
        run_id=options.run_id,
        name=options.name,
        bind=options.bind,
        advertise=options.advertise,
        contacts=contacts,
        role=Role.NODE,
        num_workers=options.nproc_per_node,
        num_nodes_min=num_nodes,
        num_nodes_max=num_nodes,
        num_spares_expected=options.spares,
        preset=options.preset,
        key=_read_key(options.key_file),
        insecure=options.insecure,
    )
    host, _ = split_endpoint(config.bind, "--bind", any_port=True)
    if config.key is None and not config.insecure and not _is_loopback(host):
        raise ValueError(
            f"--bind {options.bind} can be reached from other machines, and whoever reaches it without a key could "
            "join or end the run: give every node the same --key-file (openssl rand -hex 32 > FILE; chmod 600 FILE) or "
            "P2PSTATE_KEY, or pass --insecure in a network where everybody may"
        )
    job = Job(
        script=options.script,
        args=tuple(options.args),
        module=options.module,
        num_workers=options.nproc_per_node,
        run_dir=os.path.abspath(options.run_dir) if options.run_dir else None,
        quiet=options.quiet and options.run_dir is not None,
        max_restarts=options.max_restarts,
        max_rounds_without_progress=MAX_ROUNDS_WITHOUT_PROGRESS,
        give_up_s=options.give_up_after,
        join_timeout_s=options.join_timeout,
        spare_wait_s=options.spare_wait,
    )
    return config, job


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_key(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path) as file:
            return bytes.fromhex(file.read().strip())
    except ValueError:
        raise ValueError(f"--key-file {path}: the file must hold hexadecimal digits (openssl rand -hex 32)") from None


if __name__ == "__main__":
    sys.exit(p2prun())
