"""Addresses of this host's network interfaces, by their names.

Flows in: an interface's name. Flows out: one of its addresses, as an IP literal. Limits: IPv6 link-local addresses are
left out, because they mean nothing without a scope.
"""

from __future__ import annotations

import ipaddress
import socket


def interface_host(name: str, *, v6: bool = False) -> str:
    """The first IPv4 address of an interface (IPv6 with `v6`, or where it has no other). ValueError if it has none."""
    import psutil  # not needed by processes that name no interface

    table = psutil.net_if_addrs()
    if name not in table:
        raise ValueError(f"there is no network interface {name!r} here, but {', '.join(sorted(table))}")
    found: dict[int, list[str]] = {
        family: [entry.address for entry in table[name] if entry.family == family and _is_global(entry.address)]
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    first, second = (socket.AF_INET6, socket.AF_INET) if v6 else (socket.AF_INET, socket.AF_INET6)
    if not found[first] + found[second]:
        raise ValueError(f"the network interface {name!r} has no address that others can use")
    return (found[first] + found[second])[0]


def _is_global(address: str) -> bool:
    return not ipaddress.ip_address(address.partition("%")[0]).is_link_local
