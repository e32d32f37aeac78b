"""A worker that ``torchrun --rdzv-backend=p2p`` started finds its node's agent, and its place in the round.

In: the variables that torchrun's backend set. Out: the process entered like one of p2prun's, started connected.
Invariants: a worker of a round that is over, or whose agent is gone, stands still until torchrun ends it: an exit of
its own would count against ``--max-restarts``.
"""

from __future__ import annotations

import os
import socket
import sys

from p2pstate.errors import ConfigError, Retryable
from p2pstate.worker.context import is_entered
from p2pstate.worker.entering import prepare
from p2pstate.worker.link import Link
from rendezvous.autoload import ENV_AGENT, ENV_ROUND
from rendezvous.channel import Channel

__all__ = ["attach"]

PLACE_WAIT_S = 300.0


def attach() -> None:
    """In a worker of torchrun's, once: get its place. Elsewhere, and when it has one, nothing.

    Raises ConfigError for a run whose copies cannot be kept, Retryable if the agent is gone or gives no place in time.
    """
    if is_entered() or ENV_AGENT not in os.environ:
        return
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect("\0" + os.environ[ENV_AGENT])
    except OSError as error:
        sock.close()
        raise Retryable(f"this node's agent is gone ({error}): torchrun starts the workers anew") from error
    link = Link(Channel(sock, blocking=True), on_lost=_say_lost)
    rank, num_local, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    round_ = int(os.environ[ENV_ROUND])
    link.send("worker", pid=os.getpid(), round=round_, rank=rank, num_local=num_local, world_size=world_size)
    assignment = link.wait_assignment(PLACE_WAIT_S)
    if assignment is None:
        raise Retryable(f"this node's agent gave rank {rank} no place in round {round_} within {PLACE_WAIT_S:g} s")
    if "refused" in assignment:
        raise ConfigError(f"p2pstate cannot protect this run: {assignment['refused']}")
    prepare(link, assignment)


def _say_lost() -> None:
    print("p2pstate: this node's agent is gone; waiting for torchrun to start the workers anew", file=sys.stderr)
