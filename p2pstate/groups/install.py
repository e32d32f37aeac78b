"""Making torch use our groups: the backend ``p2p``, and our store in place of ``env://``.

In: the worker's store factory. Out: ``dist.init_process_group("p2p" | "gloo" | "nccl" | None)`` and ``new_group``,
which create :class:`P2PGroup` objects, without any TCPStore.

Limits: only in worker processes that p2pstate's launcher started; a backend that p2pstate cannot swap (mpi, ucc) is
refused.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from p2pstate.errors import ConfigError
from p2pstate.groups import nccl_settings
from p2pstate.groups.group import P2PGroup
from p2pstate.groups.registry import Registry
from rendezvous.autoload import ENV_AGENT

__all__ = ["install", "installed"]

_OURS = {"", "p2p", "gloo", "nccl", "undefined"}


def installed() -> bool:
    """Whether groups created in this process are ours."""
    return "P2P" in dist.Backend._plugins


def install(registry: Registry, default_store: Callable[[], Store]) -> None:
    """Register the backend and replace the environment rendezvous. Call once, before the user's script."""

    def create(options: Any, _backend_options: Any) -> P2PGroup:
        if torch.cuda.is_available():
            nccl_settings.apply(os.environ, under_torchrun=ENV_AGENT in os.environ)
        return registry.create(options.global_ranks_in_group, options.group_rank, options.timeout)

    dist.Backend.register_backend("p2p", create, extended_api=True, devices=["cpu", "cuda"])

    def env_handler(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Store, int, int]]:
        yield default_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    # The function torch.distributed.rendezvous hides the module of the same name.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    handlers["env"] = env_handler
    stock = distributed_c10d._new_process_group_helper

    @functools.wraps(stock)
    def helper(group_size: int, group_rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(group_size, group_rank, ranks, _ours(backend), *args, **kwargs)

    distributed_c10d._new_process_group_helper = helper  # type: ignore[assignment]


def _ours(backend: Any) -> Any:
    """Translate what was asked for (``gloo``, ``cpu:gloo,cuda:nccl``, nothing) to our backend."""
    names = {part.rpartition(":")[2].strip().lower() for part in str(backend or "").split(",")}
    unknown = names - _OURS
    if unknown:
        raise ConfigError(
            f"process group backend {sorted(unknown)[0]!r} cannot be repaired in place by p2pstate; use "
            f"'gloo', 'nccl' or 'p2p', or leave the backend out"
        )
    return dist.Backend("p2p")
