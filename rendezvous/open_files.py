"""How many open files an agent needs, and asking the kernel for them: systems allow 1,024 unless a program asks.

Flows in: how many members a group may have. Flows out: a soft limit that is enough, or RendezvousError.
Limits: processes that are started afterwards inherit the limit. What others of the same process open is an estimate.
"""

from __future__ import annotations

import resource

from rendezvous.types import RendezvousError

# Measured with 16 and 64 members: a connection each way, and the three descriptors that ZeroMQ has for a peer.
_FILES_PER_PEER = 5
_MARGIN_PER_PEER = 1  # a connection check
_OTHERS = 256  # the process's own: slots, lines to workers, libraries


def num_open_files(max_size: int) -> int:
    """What an agent in a group of `max_size` members may hold at once."""
    return _OTHERS + (_FILES_PER_PEER + _MARGIN_PER_PEER) * max_size


def allow_open_files(max_size: int) -> None:
    """Raise the soft limit as far as needed. RendezvousError if the hard one is lower."""
    needed = num_open_files(max_size)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RendezvousError(
            f"a group of {max_size} nodes needs up to {needed} open files on each, and {hard} are allowed: the agent "
            "would end when they are used up. Raise the hard limit (ulimit -Hn, limits.conf, the service's LimitNOFILE)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
