"""What torchrun was told, as a node's configuration.

Flows in: torchrun's parameters and P2PSTATE_* variables. Flows out: `Settings`.
Invariants: an option that has no meaning here is refused, with a list of those that have one; an argument wins over the
environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rendezvous.config import Config
from rendezvous.keys import read_key_file

DEFAULT_PORT = 29400  # as torchrun's own backends
# --rdzv-conf: what has a meaning here, and what torchrun's own backends understand and p2p does not need.
_OPTIONS = {
    "timeout": "seconds to wait for enough nodes (600); join_timeout is the same",
    "join_timeout": "see timeout",
    "last_call_timeout": "seconds to wait for further nodes once there are enough (30)",
    "close_timeout": "seconds to wait for the other nodes' workers to finish (600)",
    "spares": "surplus nodes the first view waits for (0)",
    "witnesses": "witnesses the first view waits for (0)",
    "bind": "HOST:PORT this node listens at (found from the endpoint)",
    "advertise": "HOST:PORT others reach it at, if not at bind",
    "iface": "network interface whose address others are told (P2PSTATE_IFACE)",
    "name": "this node's name, unique in the run (the host's)",
    "key_file": "file with the run's secret (P2PSTATE_KEY_FILE)",
    "preset": "timeouts: default or local",
    "fence": "command that tells whether a silent node is gone (P2PSTATE_FENCE)",
    "insecure": "true: no key off loopback",
}
_IGNORED = {"rank", "is_host", "store_type", "use_libuv", "read_timeout", "heartbeat_timeout", "keep_alive_interval"}
_IGNORED |= {"heartbeat", "keep_alive_max_attempt", "rdzv_id", "keepalive_interval", "keepalive_max_attempt"}


class Parameters(Protocol):
    """What is read of torch's RendezvousParameters."""

    endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    config: dict[str, Any]

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None: ...


@dataclass(frozen=True, slots=True)
class Settings:
    """What one torchrun was told. `config.name` may be empty (the agent finds one), `binds` too."""

    config: Config
    binds: tuple[str, ...]
    join_timeout_s: float
    close_timeout_s: float


def read_settings(params: Parameters, env: Mapping[str, str] | None = None) -> Settings:
    """Raises ValueError, naming the parameter, for what cannot work; OSError if a key file cannot be read."""
    source = os.environ if env is None else env
    given = {name: value for name, value in params.config.items() if value not in (None, "")}
    unknown = set(given) - set(_OPTIONS) - _IGNORED
    if unknown:
        known = "\n".join(f"  {name}: {text}" for name, text in _OPTIONS.items())
        raise ValueError(f"--rdzv-conf: the p2p backend knows no {', '.join(sorted(unknown))}. It knows\n{known}")
    contacts = _contacts(params.endpoint, source)
    if not contacts and params.max_nodes > 1:
        raise ValueError(
            "--rdzv-endpoint is missing: list some nodes of this run as host:port,host:port (this one may be among "
            "them; any one that answers suffices, and it may die afterwards), or set P2PSTATE_CONTACTS"
        )
    bind = given.get("bind") or source.get("P2PSTATE_BIND")
    config = Config.from_env(
        source,
        run_id=params.run_id,
        name=given.get("name") or source.get("P2PSTATE_NAME") or "unnamed",
        bind=bind or "127.0.0.1:0",
        iface=given.get("iface"),
        advertise=given.get("advertise"),
        contacts=contacts,
        num_workers=1,  # torchrun deals out ranks: a place is a node, whatever it starts
        num_nodes_min=params.min_nodes,
        num_nodes_max=params.max_nodes,
        num_spares_expected=_number(given, "spares", 0, int),
        num_witnesses_expected=_number(given, "witnesses", 0, int),
        first_view_last_call_s=_number(given, "last_call_timeout", 30.0, float),
        preset=given.get("preset"),
        fence=given.get("fence"),
        key=read_key_file(given["key_file"]) if "key_file" in given else None,
        insecure=bool(params.get_as_bool("insecure", False)),
    )
    return Settings(
        config=config,
        binds=(bind,) if bind else (),
        join_timeout_s=_number(given, "timeout", _number(given, "join_timeout", 600.0, float), float),
        close_timeout_s=_number(given, "close_timeout", 600.0, float),
    )


def _contacts(endpoint: str, source: Mapping[str, str]) -> tuple[str, ...]:
    listed = [part.strip() for part in (endpoint or "").split(",") if part.strip()]
    listed += [part.strip() for part in source.get("P2PSTATE_CONTACTS", "").split(",") if part.strip()]
    return tuple(dict.fromkeys(_with_port(contact) for contact in listed))


def _with_port(contact: str) -> str:
    """torchrun's endpoints may leave the port out."""
    if contact.startswith(("dir:", "slurm:")):
        return contact
    if contact.endswith("]") or ":" not in contact:
        return f"{contact}:{DEFAULT_PORT}"
    return contact


def _number(given: Mapping[str, Any], name: str, default: Any, kind: type[Any]) -> Any:
    try:
        number = kind(given.get(name, default))
    except ValueError:
        raise ValueError(f"--rdzv-conf {name}={given[name]}: not a number") from None
    if not 0 <= number < 1e9:
        raise ValueError(f"--rdzv-conf {name}={given[name]}: must be at least 0, and below 1e9")
    return number
