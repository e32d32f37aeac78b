"""What a node is told at start, checked once.

Flows in: arguments and, through `Config.from_env`, P2PSTATE_* variables (arguments win). Flows out: a frozen `Config`
and `Timing`, the ladder of every timeout, derived from two numbers. Invariants: a `Config` that exists is consistent.
"""

from __future__ import annotations

import ipaddress
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rendezvous.interfaces import interface_host
from rendezvous.keys import HOW_TO_MAKE_ONE, check_key, key_from_hex, read_key_file
from rendezvous.plain import MAX_NAME_CHARS
from rendezvous.types import Role, join_address

PRESETS: dict[str, tuple[float, float]] = {"default": (0.5, 5.0), "local": (0.15, 1.8)}
_ENV_PREFIX = "P2PSTATE_"
_KINDS = {"dir": "dir:/path, with an absolute path", "slurm": "slurm:PORT"}  # of contacts that are no addresses


@dataclass(frozen=True, slots=True)
class Timing:
    """Every timeout of the protocol. `failure_s` bounds how long a silent member counts as alive."""

    probe_interval_s: float
    failure_s: float

    def __post_init__(self) -> None:
        if not self.probe_interval_s >= 0.01 or not self.failure_s >= 5 * self.probe_interval_s:
            raise ValueError(
                f"probe_interval_s={self.probe_interval_s} and failure_s={self.failure_s} leave no time to judge: "
                "probe_interval_s must be at least 0.01 and failure_s at least five times as long"
            )

    @property
    def probe_timeout_s(self) -> float:
        """Direct answer expected within; then indirect probes."""
        return 0.4 * self.probe_interval_s

    @property
    def suspicion_max_s(self) -> float:
        """One interval until the probe, one for it to fail, one of margin."""
        return self.failure_s - 3 * self.probe_interval_s

    @property
    def suspicion_min_s(self) -> float:
        """With enough confirmations by others, a suspect is dead after this time."""
        return 0.75 * self.suspicion_max_s

    @property
    def stagger_s(self) -> float:
        """The n-th member in line proposes n times this later than the first."""
        return 1.5 * self.probe_interval_s

    @property
    def collect_s(self) -> float:
        """A proposer with a quorum waits this long for the ballots of the other live members."""
        return self.probe_interval_s

    @property
    def attempt_s(self) -> float:
        """A ballot without a quorum is given up after this."""
        return 3 * self.probe_interval_s

    @property
    def resend_s(self) -> float:
        """What was not answered is sent again after this time."""
        return 0.5 * self.probe_interval_s

    @property
    def rumour_s(self) -> float:
        """In a large group, news is handed on this often."""
        return 0.1 * self.probe_interval_s

    @property
    def sync_interval_s(self) -> float:
        """The table is compared with that of one member this often, whatever gossip lost."""
        return 8 * self.probe_interval_s

    @property
    def stall_s(self) -> float:
        """A loop that was away for longer than this judges nobody by the time it missed."""
        return 1.5 * self.probe_interval_s

    @property
    def dial_s(self) -> float:
        """A connection check without an answer says nothing after this."""
        return self.failure_s


@dataclass(frozen=True, slots=True)
class Config:
    """One node's settings.

    `bind` is "host:port" (port 0: any); `advertise` is the address others reach it at where that differs. `contacts`
    may name this node itself. `host_owned=None` means: yes, unless `advertise` names another host than `bind`.
    The first view needs the votes of a majority of num_nodes_max + num_spares_expected + num_witnesses_expected
    members.
    `rejoin` says that this agent replaces one that was in the run before: it waits to be taken in and has no vote in a
    first view, because its predecessor may have given it already.
    `fence` is the command that tells whether a silent node is gone (fence_command.py).
    `proof_suffices` lets any survivor go on when all other members are proven dead, also when they were more than half
    of the view and died at once. It is for networks that do not partition (one host, one switch): a survivor that was
    cut off before would not know what the others decided meanwhile.
    Raises ValueError, naming the field, for what cannot work.
    """

    run_id: str
    name: str
    bind: str
    contacts: tuple[str, ...] = ()
    advertise: str | None = None
    role: Role = Role.NODE
    num_workers: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    num_nodes_min: int = 1
    num_nodes_max: int = 1
    num_spares_expected: int = 0
    num_witnesses_expected: int = 0
    first_view_last_call_s: float = 30.0
    probe_interval_s: float = PRESETS["default"][0]
    failure_s: float = PRESETS["default"][1]
    key: bytes | None = field(default=None, repr=False)
    insecure: bool = False
    rejoin: bool = False
    proof_suffices: bool = False
    host_owned: bool | None = None
    fence: str | None = None
    incarnation: int | None = None

    def __post_init__(self) -> None:
        for what, text in (("run_id", self.run_id), ("name", self.name)):
            if not text or len(text) > MAX_NAME_CHARS:
                raise ValueError(f"{what} must have 1 to {MAX_NAME_CHARS} characters, not {text!r}")
        split_endpoint(self.bind, "bind", any_port=True)
        if self.advertise is not None:
            split_endpoint(self.advertise, "advertise", any_port=True)
        for contact in self.contacts:
            check_contact(contact)
        if not 1 <= self.num_nodes_min <= self.num_nodes_max:
            raise ValueError(
                f"1 <= num_nodes_min <= num_nodes_max must hold, not {self.num_nodes_min} and {self.num_nodes_max}"
            )
        for what, number in (
            ("num_workers", self.num_workers - (self.role is Role.NODE)),
            ("num_spares_expected", self.num_spares_expected),
            ("num_witnesses_expected", self.num_witnesses_expected),
        ):
            if number < 0:
                raise ValueError(f"{what} is too small for a {self.role}")
        if self.first_view_last_call_s < 0:
            raise ValueError("first_view_last_call_s must not be negative")
        if self.fence is not None:
            split_command(self.fence)
        if self.key is not None:
            check_key(self.key, "key")
        Timing(self.probe_interval_s, self.failure_s)

    @property
    def timing(self) -> Timing:
        """Every timeout, from `probe_interval_s` and `failure_s`."""
        return Timing(self.probe_interval_s, self.failure_s)

    @property
    def max_size(self) -> int:
        """Votes of a full run: more than half of them decide the first view."""
        return self.num_nodes_max + self.num_spares_expected + self.num_witnesses_expected

    @staticmethod
    def from_env(env: Mapping[str, str] | None = None, **arguments: Any) -> Config:
        """`arguments` completed by P2PSTATE_RUN_ID, _NAME, _BIND, _ADVERTISE, _FENCE, _CONTACTS (commas), _KEY (hex),
        _KEY_FILE, _LABELS ("rack=r1,zone=z2"), _IFACE and _PRESET.

        OSError if a key file cannot be read. `iface` (also an argument) is the network interface whose address the
        others are told; without `bind`, the node listens only there. `preset` ("default" or "local") may also be an
        argument; probe_interval_s and failure_s win over it.
        """
        source = os.environ if env is None else env
        for name in ("run_id", "name", "bind", "advertise", "fence"):
            text = source.get(_ENV_PREFIX + name.upper())
            if text is not None and arguments.get(name) is None:
                arguments[name] = text
        if arguments.get("contacts") is None and (listed := source.get(_ENV_PREFIX + "CONTACTS")) is not None:
            arguments["contacts"] = tuple(part.strip() for part in listed.split(",") if part.strip())
        if arguments.get("key") is None:
            arguments["key"] = _key_from(source)
        if arguments.get("labels") is None:
            arguments["labels"] = _labels_from(source.get(_ENV_PREFIX + "LABELS", ""))
        iface = arguments.pop("iface", None) or source.get(_ENV_PREFIX + "IFACE")
        if iface:
            arguments |= _at_interface(iface, arguments.get("bind"), arguments.get("advertise"))
        preset = arguments.pop("preset", None) or source.get(_ENV_PREFIX + "PRESET", "default")
        if preset not in PRESETS:
            raise ValueError(f"preset must be one of {sorted(PRESETS)}, not {preset!r}")
        probe_interval_s, failure_s = PRESETS[preset]
        arguments.setdefault("probe_interval_s", probe_interval_s)
        arguments.setdefault("failure_s", failure_s)
        missing = [name for name in ("run_id", "name", "bind") if arguments.get(name) is None]
        if missing:
            variables = ", ".join(_ENV_PREFIX + name.upper() for name in missing)
            raise ValueError(f"{', '.join(missing)} must be given, as arguments or as {variables}")
        return Config(**arguments)


def check_exposure(config: Config) -> None:
    """ValueError unless the bind address is loopback, a key is set, or the caller said `insecure`."""
    host, _ = split_endpoint(config.bind, "bind", any_port=True)
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if config.key is None and not loopback and not config.insecure:
        raise ValueError(
            f"bind {config.bind!r} can be reached from other hosts and no key is set: whoever reaches it could join or "
            f"end the run. Give every node the same key, {HOW_TO_MAKE_ONE} and name it with P2PSTATE_KEY_FILE or "
            "--key-file; or say that everybody in this network may (--insecure, insecure=True). Where all nodes are on "
            "this host, let each bind 127.0.0.1:0"
        )


def _at_interface(iface: str, bind: str | None, advertise: str | None) -> dict[str, Any]:
    if advertise is not None:
        raise ValueError(f"the address for others is given twice: iface {iface!r} and advertise {advertise!r}")
    host = interface_host(iface, v6=bind is not None and bind.startswith("["))
    here = join_address(host, 0)
    # An address of an interface is the host's own, whatever the socket is bound to.
    return {"bind": bind or here, "advertise": here, "host_owned": True}


def _key_from(source: Mapping[str, str]) -> bytes | None:
    secret, path = source.get(_ENV_PREFIX + "KEY"), source.get(_ENV_PREFIX + "KEY_FILE")
    if secret is not None:
        return key_from_hex(secret, _ENV_PREFIX + "KEY")
    return read_key_file(path) if path else None


def _labels_from(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(name.strip() and value.strip() for name, _, value in pairs):
        raise ValueError(f"{_ENV_PREFIX}LABELS {text!r} is not of the form rack=r1,zone=z2")
    return {name.strip(): value.strip() for name, _, value in pairs}


def split_endpoint(text: str, what: str, *, any_port: bool = False) -> tuple[str, int]:
    """'host:port' or '[v6]:port' -> (host, port); ValueError naming `what` and the text."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    lowest = 0 if any_port else 1
    good_port = port.isascii() and port.isdigit() and lowest <= int(port) < 65536
    good_host = bool(host) and not any(c.isspace() or c in "/,@[]" for c in host) and (bracketed or ":" not in host)
    if not colon or not good_port or not good_host:
        raise ValueError(
            f'{what} {text!r} is not "host:port" (or "[IPv6 address]:port") with a port of {lowest}..65535'
        )
    return host, int(port)


def split_command(command: str) -> list[str]:
    """The words of a command line, as a shell divides it; ValueError if there are none or a quote is left open."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"fence {command!r} is no command: {error}") from None
    if not words:
        raise ValueError("fence is empty: name a command, or leave it out")
    return words


def check_contact(contact: str) -> None:
    """ValueError, naming the contact, unless it has one of the forms that discovery.py understands."""
    kind, colon, rest = contact.partition(":")
    if kind == "dir" and rest.startswith("/"):
        return
    if kind == "slurm" and colon and rest.isascii() and rest.isdigit() and 0 < int(rest) < 65536:
        return
    if colon and kind in _KINDS and not rest.isdigit():
        raise ValueError(f"contact {contact!r} is not of the form {_KINDS[kind]}")
    split_endpoint(contact, "contact")
