"""Options that several commands share: the run, the network.

In: command-line arguments. Out: a rendezvous.config.Config that may be used, or ValueError with what is wrong.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping, Sequence

from p2pstate.arguments import path
from rendezvous.config import PRESETS, Config, check_exposure
from rendezvous.discovery import is_literal, local_binds, names_loopback
from rendezvous.keys import read_key_file
from rendezvous.types import Role

__all__ = [
    "HelpFormatter",
    "add_detection",
    "add_network",
    "add_run",
    "contacts_of",
    "make_config",
    "operator_config",
    "read_labels",
]


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Says defaults that say something, and leaves texts of several lines as they are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default is False or action.default in (None, "", [])
        return action.help if says_nothing else super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def add_run(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What every member of a run must be told alike."""
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--run-id",
        "--rdzv-id",
        metavar="ID",
        default=os.environ.get("P2PSTATE_RUN_ID", "default"),
        help="the same on every node",
    )
    run.add_argument(
        "--nnodes",
        default="1",
        metavar="N or MIN:MAX",
        help="training nodes; with a checkpoint directory a run goes on with fewer than it began with, down to MIN",
    )
    run.add_argument("--spares", type=int, default=0, metavar="N", help="spare nodes the first view waits for")
    run.add_argument("--witnesses", type=int, default=0, metavar="N", help="witnesses the first view waits for")
    run.add_argument(
        "--last-call", type=float, default=30.0, metavar="S", help="with MIN nodes there, wait this long for the others"
    )
    return run


def add_network(parser: argparse.ArgumentParser) -> None:
    """How members find and reach each other."""
    net = parser.add_argument_group("the network")
    net.add_argument(
        "--contacts",
        "--rdzv-endpoint",
        default="",
        metavar="LIST",
        help="of nodes to ask: host:port,..., slurm:PORT or dir:PATH",
    )
    net.add_argument("--bind", metavar="HOST:PORT", help="where this process listens (any port on loopback)")
    net.add_argument("--iface", metavar="NAME", help="the network interface whose address others are told")
    net.add_argument("--advertise", metavar="HOST:PORT", help="how others reach this node, if not at --bind")
    net.add_argument(
        "--key-file", type=path, metavar="FILE", help="the run's secret (p2pstate keygen); needed off loopback"
    )
    net.add_argument("--insecure", action="store_true", help="listen off loopback without a key")


def add_detection(parser: argparse.ArgumentParser) -> None:
    """How the death of others is noticed."""
    deaths = parser.add_argument_group("deaths of others")
    deaths.add_argument(
        "--preset", choices=sorted(PRESETS), default="default", help="timeouts; local: shorter, one machine"
    )
    deaths.add_argument(
        "--fence", metavar="CMD", help="a command that tells whether a silent node is gone; called as CMD NAME ADDRESS"
    )


def make_config(
    options: argparse.Namespace, role: Role, num_workers: int, labels: Mapping[str, str] | None = None
) -> Config:
    """Raises ValueError or OSError, saying what is wrong with which option and what to do."""
    low, _, high = options.nnodes.partition(":")
    if not (low.isdigit() and (high or low).isdigit()):
        raise ValueError(f"--nnodes {options.nnodes}: give a number, or MIN:MAX")
    if not 1 <= int(low) <= int(high or low):
        raise ValueError(f"--nnodes {options.nnodes}: at least one node is needed, and MIN must not be above MAX")
    contacts = contacts_of(options)
    if not contacts and (role is Role.WITNESS or int(high or low) + options.spares + options.witnesses > 1):
        raise ValueError("--contacts is missing: list host:port of some nodes of this run (this one may be among them)")
    elsewhere = options.iface or any(f"P2PSTATE_{name}" in os.environ for name in ("BIND", "IFACE"))
    if not (options.bind or elsewhere or options.advertise):
        far = [contact for contact in contacts if is_literal(contact) and not names_loopback(contact)]
        if far:
            raise ValueError(
                f"--bind is missing: {far[0]} is on the network, and without --bind (or --iface) this node listens on "
                "loopback, where nobody there reaches it"
            )
    config = Config.from_env(
        run_id=options.run_id,
        name=options.name,
        bind=options.bind or (None if elsewhere else "127.0.0.1:0"),
        iface=options.iface,
        advertise=options.advertise,
        contacts=contacts,
        role=role,
        num_workers=num_workers,
        labels=labels,
        num_nodes_min=int(low),
        num_nodes_max=int(high or low),
        num_spares_expected=options.spares,
        num_witnesses_expected=options.witnesses,
        first_view_last_call_s=options.last_call,
        preset=options.preset,
        key=read_key_file(options.key_file) if options.key_file else None,
        insecure=options.insecure,
        fence=options.fence,
    )
    check_exposure(config)
    return config


def operator_config(options: argparse.Namespace) -> Config:
    """For a command that is no member of the run. Raises as `make_config` does."""
    contacts = contacts_of(options)
    if not contacts:
        raise ValueError("--contacts is missing: list host:port of some nodes of the run")
    config = Config.from_env(
        run_id=options.run_id,
        name=f"operator-{socket.gethostname()}-{os.getpid()}",
        bind=options.bind or (None if options.iface else local_binds(contacts)[-1]),
        iface=options.iface,
        advertise=options.advertise,
        contacts=contacts,
        key=read_key_file(options.key_file) if options.key_file else None,
        insecure=options.insecure,
    )
    check_exposure(config)
    return config


def contacts_of(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(part.strip() for part in options.contacts.split(",") if part.strip())


def read_labels(given: Sequence[str]) -> dict[str, str] | None:
    """None when no option was given: P2PSTATE_LABELS holds then."""
    labels: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals or not value:
            raise ValueError(f"--label {text}: give it as KEY=VALUE, for example rack=r1")
        if labels.setdefault(key, value) != value:
            raise ValueError(f"--label {text}: this node has the label {key}={labels[key]} already")
    return labels or None
