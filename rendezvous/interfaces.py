"""Addresses of this host's network interfaces.

Flows in: an interface's name. Flows out: one of its addresses, or the host's only one, as an IP literal.
Limits: IPv6 link-local addresses are left out, because they mean nothing without a scope.
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


def only_host(*, only_v4: bool) -> str:
    """The one address that this host has beside loopback, IPv4 if it has such; empty if it has none or several."""
    import psutil

    for family in (socket.AF_INET,) if only_v4 else (socket.AF_INET, socket.AF_INET6):
        entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == family]
        found = [entry.address for entry in entries if _is_global(entry.address)]
        found = [address for address in found if not ipaddress.ip_address(address).is_loopback]
        if found:
            return found[0] if len(found) == 1 else ""
    return ""


def _is_global(address: str) -> bool:
    return not ipaddress.ip_address(address.partition("%")[0]).is_link_local
