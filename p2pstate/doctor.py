"""``p2pstate doctor``: is this host ready for a run, and what to do where it is not.

In: the network options a node would get. Out: findings, each with what it means and how to put it right.
Invariants: nothing is left behind, on this host or on others; every look at the network has a deadline; one check that
fails does not keep the others from being made.
Known limits: other hosts are only asked whether somebody listens at a contact; whether their clocks, keys or versions
fit shows when they join.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import importlib.metadata
import ipaddress
import json
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from p2pstate.groups.nccl_settings import conflicts
from p2pstate.memory import Bound, room
from p2pstate.options import add_network, contacts_of, operator_config
from p2pstate.sizes import size_text
from rendezvous.config import Config, split_endpoint
from rendezvous.discovery import names_loopback, read_contacts
from rendezvous.interfaces import interface_host
from rendezvous.types import RendezvousError, split_address
from rendezvous.zmq_transport import ZmqTransport, has_curve

__all__ = ["Finding", "Level", "add_commands"]

MIN_OPEN_FILES = 4096
MIN_LOCKED_BYTES = 1 << 30
MIN_SHM_BYTES = 1 << 30
MIN_FREE_SHARE = 0.1
CONNECT_S = 2.0
NOBODY = "127.0.0.1:1"  # a contact for a look at this host alone
_ENTRY_POINTS = {"torchrun.handlers": "p2p", "torch.backends": "p2pstate", "rendezvous.agents": "p2pstate"}


class Level(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """`fix` is empty where nothing is to be done."""

    subject: str
    level: Level
    text: str
    fix: str = ""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        description="Look whether this host is ready for a run: plug-ins, key, addresses, ports, limits, memory. Give "
        "it the options that the node gets. Exit code: 0 ready (perhaps with warnings), 1 something must be fixed.",
    )
    parser.add_argument("--run-id", default="doctor", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_network(parser)
    parser.set_defaults(run=run_command)


def run_command(options: argparse.Namespace) -> int:
    findings = examine(options)
    if options.json:
        print(json.dumps({"ready": is_ready(findings), "findings": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            fix = f"\n{'':25}-> {finding.fix}" if finding.fix else ""
            print(f"{finding.level:<10}{finding.subject:<15}{finding.text}{fix}")
        print(summary(findings))
    return 0 if is_ready(findings) else 1


def summary(findings: list[Finding]) -> str:
    num_problems, num_warnings = (
        sum(finding.level is level for finding in findings) for level in (Level.PROBLEM, Level.WARNING)
    )
    if num_problems:
        return f"not ready: mend what is called a problem ({num_problems}), then look again"
    return "ready" + (f"; look at the warnings ({num_warnings})" if num_warnings else "")


def is_ready(findings: list[Finding]) -> bool:
    return not any(finding.level is Level.PROBLEM for finding in findings)


def examine(options: argparse.Namespace) -> list[Finding]:
    """Everything there is to say about this host."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("plug-ins", check_plugins),
        ("encryption", check_encryption),
        ("network", lambda: check_network(options)),
        ("interfaces", lambda: check_interfaces(os.environ, several_hosts=_spans_hosts(options))),
        ("NCCL", lambda: check_nccl(os.environ, has_card())),
        ("kernel", check_kernel),
        ("open files", lambda: check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))),
        ("locked memory", lambda: check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_card())),
        ("memory", lambda: check_memory(psutil.virtual_memory().total, room())),
        ("/dev/shm", lambda: check_shared_memory(shutil.disk_usage("/dev/shm").free)),
    ]
    findings: list[Finding] = []
    for subject, check in checks:
        try:
            findings += check()
        except Exception as error:  # whatever this host has in store: the other checks are made all the same
            findings.append(Finding(subject, Level.PROBLEM, f"this could not be looked at: {error!r}"))
    return findings


def check_plugins() -> Iterator[Finding]:
    """What torchrun and `import torch` find installed, loaded as they load it."""
    for group, name in _ENTRY_POINTS.items():
        found = [entry for entry in importlib.metadata.entry_points(group=group) if entry.name == name]
        if not found:
            fix = "install the package (pip install p2pstate); a checkout on PYTHONPATH alone declares none"
            yield Finding("plug-ins", Level.PROBLEM, f"no entry point {name!r} is installed for {group}", fix)
            continue
        try:
            if group == "torchrun.handlers":  # torch loads it at the end of this import; loaded before, it warns
                importlib.import_module("torch.distributed.elastic.rendezvous")
            found[0].load()
        except Exception as error:  # anything an import can raise
            fix = "install the package's dependencies again (pip install --force-reinstall p2pstate)"
            yield Finding("plug-ins", Level.PROBLEM, f"{group}: {name!r} cannot be loaded: {error!r}", fix)
        else:
            yield Finding("plug-ins", Level.OK, f"{group}: {name!r} loads")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        text = "TORCH_DEVICE_BACKEND_AUTOLOAD=0: under torchrun, workers make a TCPStore at MASTER_ADDR"
        yield Finding("plug-ins", Level.WARNING, text, "unset it")


def check_encryption() -> Iterator[Finding]:
    if has_curve():
        yield Finding("encryption", Level.OK, "ZeroMQ has CURVE")
    else:
        yield Finding("encryption", Level.PROBLEM, "this ZeroMQ has no CURVE", "install pyzmq from its wheels")


def check_network(options: argparse.Namespace) -> Iterator[Finding]:
    """The key, the contacts, the address this node would listen at, and the one it would tell."""
    contacts = contacts_of(options)
    if not contacts:
        text = "none were given: only this host is looked at; give the options of the node for more"
        yield Finding("contacts", Level.OK, text)
    try:
        config = operator_config(argparse.Namespace(**{**vars(options), "contacts": options.contacts or NOBODY}))
        transport = ZmqTransport(config)
    except (ValueError, RendezvousError, OSError) as error:
        yield Finding("address", Level.PROBLEM, str(error), "change the option that this is about")
        return
    if not config.key and config.insecure:
        text = "--insecure: whoever reaches this node can join or end the run"
        yield Finding("key", Level.WARNING, text, "make a key: p2pstate keygen FILE, and --key-file FILE on every node")
    else:
        yield Finding("key", Level.OK, "a key was read" if config.key else "none, and none is needed on loopback")
    try:
        yield Finding("address", Level.OK, f"listens at {config.bind}; others are told {transport.address}")
        yield from check_port(config)
        yield from check_contacts(contacts, transport.address)
    finally:
        transport.close(0.0)


def check_port(config: Config, ports: str | None = None) -> Iterator[Finding]:
    """A fixed port that the kernel also gives to others may be taken when an agent is started again."""
    _, port = split_endpoint(config.bind, "bind", any_port=True)
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text() if ports is None else ports
    low, high = (int(word) for word in text.split())
    if port and low <= port <= high:
        what = f"port {port} is among those that the kernel gives to outgoing connections ({low} to {high})"
        yield Finding("port", Level.WARNING, what, f"choose one below {low}, or it may be taken after a restart")


def check_contacts(contacts: tuple[str, ...], own: str) -> Iterator[Finding]:
    addresses, problems = read_contacts(contacts)
    for problem in problems:
        yield Finding("contacts", Level.WARNING, problem, "any other contact is enough; this one is read again later")
    if contacts and not addresses:
        yield Finding("contacts", Level.PROBLEM, "no contact gives an address", "check the names, or list addresses")
    own_is_loopback = ipaddress.ip_address(split_address(own)[0]).is_loopback
    for address in addresses:
        loopback = ipaddress.ip_address(split_address(address)[0]).is_loopback
        if own_is_loopback and not loopback:
            text = f"others are told the loopback address {own}, but the contact {address} is on another host"
            yield Finding("contacts", Level.PROBLEM, text, "give --bind, --iface or --advertise")
            return
        if address != own:
            yield Finding("contacts", Level.OK, f"{address}: {reach(address)}")


def reach(address: str) -> str:
    """Whether somebody listens at `address`, in words. Before a run starts, nobody need."""
    try:
        with socket.create_connection(split_address(address), CONNECT_S):
            return "somebody listens there"
    except ConnectionRefusedError:
        return "the host answers, nobody listens there yet"
    except OSError as error:
        return f"no answer ({error}): the host is down, or a firewall drops the connection"


def check_interfaces(env: Mapping[str, str], *, several_hosts: bool) -> Iterator[Finding]:
    """Interfaces that gloo and NCCL were told to use exist here (NCCL also knows prefixes, `=` and `^`); others reach
    the address that gloo would choose."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for name in filter(None, env.get(variable, "").split(",")):
            if variable.startswith("NCCL") and not name.startswith("="):
                continue
            try:
                host = interface_host(name.removeprefix("="))
            except ValueError as error:
                yield Finding("interfaces", Level.PROBLEM, f"{variable}: {error}", f"correct or unset {variable}")
            else:
                yield Finding("interfaces", Level.OK, f"{variable}: {name} has {host}")
    name = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError:
        found = []
    if not env.get("GLOO_SOCKET_IFNAME") and all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in found):
        where = ", ".join(found) or "nothing"
        text = (
            f"the host name {name} resolves to {where}, where gloo then listens: ranks of other hosts do not reach it"
        )
        fix = "set GLOO_SOCKET_IFNAME=IFACE, or let the name resolve to this host's address (not on one host alone)"
        if several_hosts:
            yield Finding("interfaces", Level.WARNING, text, fix)
        else:
            yield Finding("interfaces", Level.OK, f"the host name {name} means this host alone, as does this run")


def _spans_hosts(options: argparse.Namespace) -> bool:
    """Whether these are options of a node that nodes on other hosts are to reach."""
    addresses = [*contacts_of(options), *filter(None, (options.bind, options.advertise))]
    return bool(options.iface) or not all(map(names_loopback, addresses))


def check_nccl(env: Mapping[str, str], card: bool) -> Iterator[Finding]:
    """Whether torch's own handling of NCCL errors is left to p2pstate. Matters on hosts with cards only."""
    for found in conflicts(env):
        level = Level.PROBLEM if card else Level.WARNING
        yield Finding("NCCL", level, f"{found.name}={found.value}: {found.what}", found.fix)


def check_kernel() -> Iterator[Finding]:
    """What the agent needs of the kernel: memory without a file, descriptors of processes."""
    try:
        os.close(os.memfd_create("p2pstate-doctor"))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        text = f"memfd_create or pidfd_open is refused: {error}"
        yield Finding(
            "kernel", Level.PROBLEM, text, "allow both in the container's seccomp profile (Linux 5.3 or newer)"
        )
    else:
        yield Finding("kernel", Level.OK, f"Linux {os.uname().release}: memfd_create and pidfd_open work")


def check_open_files(soft: int, hard: int) -> Iterator[Finding]:
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        yield Finding("open files", Level.OK, f"{_number(soft)} allowed")
        return
    level = Level.WARNING if soft >= MIN_OPEN_FILES // 8 else Level.PROBLEM
    fix = f"ulimit -n {MIN_OPEN_FILES}" if hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES else ""
    fix = fix or f"raise the hard limit ({_number(hard)}) in limits.conf, the service's LimitNOFILE or the container"
    text = f"{soft} allowed: agents and workers hold some for each other node and rank, and loaders many more"
    yield Finding("open files", level, text, fix)


def check_locked_memory(limit: int, card: bool) -> Iterator[Finding]:
    if limit == resource.RLIM_INFINITY or limit >= MIN_LOCKED_BYTES:
        yield Finding("locked memory", Level.OK, f"{_bytes(limit)} allowed")
    else:
        level = Level.WARNING if card else Level.OK
        text = f"{_bytes(limit)} allowed; RDMA needs more, TCP does not"
        yield Finding("locked memory", level, text, "ulimit -l unlimited (limits.conf, LimitMEMLOCK)" if card else "")


def check_memory(total_bytes: int, room: Bound) -> Iterator[Finding]:
    """`room`: what can still be taken, and what stops it then (memory.py)."""
    text = f"{_bytes(room.left_bytes)} of {_bytes(total_bytes)} can be taken before {room.what} stops it"
    if room.left_bytes < MIN_FREE_SHARE * total_bytes:
        fix = "end what else runs here; the vault keeps up to four copies of what is unique to each rank of this node"
        yield Finding("memory", Level.WARNING, text, fix)
    else:
        yield Finding("memory", Level.OK, text)


def check_shared_memory(free: int) -> Iterator[Finding]:
    if free >= MIN_SHM_BYTES:
        yield Finding("/dev/shm", Level.OK, f"{_bytes(free)} free")
    else:
        text = f"{_bytes(free)} free: the vault does not use it, NCCL and data loaders with worker processes do"
        yield Finding("/dev/shm", Level.WARNING, text, "docker --shm-size=8g; Kubernetes: an emptyDir of medium Memory")


def has_card() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _number(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else str(limit)


def _bytes(number: int) -> str:
    return "any amount" if number == resource.RLIM_INFINITY else size_text(number)
