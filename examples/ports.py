"""Ports for programs that are started a moment later.

Out: ports on which nobody listens, each given once. They lie below those that Linux gives to outgoing connections
(ip_local_port_range), in blocks that belong to one process while it lives: a block is held by a socket in the abstract
namespace, so that tests and demos beside each other do not get the same. Known limit: another program may listen there
before the caller's does.
"""

import random
import socket
from collections.abc import Iterator

__all__ = ["free_ports"]

FIRST, LAST, BLOCK = 20000, 32000, 100


def free_ports(count: int) -> list[int]:
    """Raises OSError when none is left."""
    return [next(_ports) for _ in range(count)]


def _own_ports() -> Iterator[int]:
    blocks = list(range(FIRST, LAST, BLOCK))
    random.SystemRandom().shuffle(blocks)  # a test that sets a seed must not choose the ports of the next
    held = []
    for first in blocks:
        lock = socket.socket(socket.AF_UNIX)
        held.append(lock)
        try:
            lock.bind(f"\0p2pstate-ports-{first}")
        except OSError:
            held.pop().close()
            continue
        for port in range(first, first + BLOCK):
            try:
                socket.create_server(("127.0.0.1", port)).close()
            except OSError:
                continue
            yield port
    raise OSError(f"no port from {FIRST} to {LAST - 1} is free")


_ports = _own_ports()
