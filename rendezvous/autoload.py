"""What `import torch` runs in a worker of a p2p run (see p2pstate/autoload.py): env:// without a TCPStore.

Flows in: variables that `torchrun --rdzv-backend=p2p` set for its workers. Flows out: in such a worker, and only there,
`init_process_group()` gets its store from the node's agent.
Invariants: `import torch` never fails because of this file: it imports nothing but the standard library's os and sys,
and whatever goes wrong becomes a warning; elsewhere it does nothing.
Two groups of processes that env:// tells different addresses (MASTER_ADDR, MASTER_PORT) never meet, as with TCPStore.
Limits: `TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns it off: workers then make a TCPStore at MASTER_ADDR, as without us.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

ENV_AGENT = "P2PSTATE_AGENT_SOCKET"  # where the node's agent listens
ENV_ROUND = "P2PSTATE_ROUND"  # the round that this process belongs to
ENV_LAUNCHER = "P2PSTATE_LAUNCHER_PID"  # the torchrun that started it

_num_inits = 0


def autoload() -> None:
    """Called by torch. Replaces the env:// handler in workers of a p2p run."""
    if ENV_AGENT not in os.environ:
        return
    try:
        _end_with_launcher()
        # The function torch.distributed.rendezvous hides the module of the same name.
        sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers["env"] = _env_handler
    except Exception as error:
        print(
            f"rendezvous: init_process_group() will make a TCPStore in this process, because env:// could not be "
            f"replaced: {type(error).__name__}: {error}",
            file=sys.stderr,
        )


def _end_with_launcher() -> None:
    """torchrun leaves its workers behind when it is killed. Only for its own children, not for theirs."""
    launcher = int(os.environ.get(ENV_LAUNCHER, "0"))
    if launcher == os.getppid():
        from rendezvous.processes import die_with_parent

        die_with_parent(launcher)


def _env_handler(url: str, timeout: Any = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """In place of torch's handler of the same signature: the store of this process's round, and its rank."""
    global _num_inits
    from urllib.parse import parse_qsl, urlparse

    from rendezvous.store import worker_store

    asked = dict(parse_qsl(urlparse(url).query))
    rank, world_size = (int(asked.get(name.lower()) or _variable(name)) for name in ("RANK", "WORLD_SIZE"))
    if rank == 0 and _num_inits == 0 and os.environ.get("TORCHELASTIC_MAX_RESTARTS") == "0":
        print(
            "rendezvous: torchrun runs with --max-restarts 0 (its default): the first worker or node that dies ends "
            "the job, although the others could go on. Give --max-restarts N to let it survive N faults",
            file=sys.stderr,
        )
    # All ranks count alike, so a group made after destroy_process_group() never finds the addresses of the old one.
    # A group of processes that workers have started (DCP's for asynchronous saves) is told another address than theirs.
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    prefix = f"init {address} {_num_inits}"
    store = worker_store(os.environ[ENV_AGENT], int(os.environ[ENV_ROUND]), prefix, timeout)
    _num_inits += 1
    yield store, rank, world_size


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"env:// rendezvous: the environment variable {name} is not set")
    return value
