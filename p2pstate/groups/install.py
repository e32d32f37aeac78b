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
    def helper(
        group_size: int, group_rank: int, ranks: Any, backend: Any, *args: Any, device_id: Any = None, **kwargs: Any
    ) -> Any:
        # torch would connect NCCL to that card at once, past the registry.
        registry.told_card = device_id or registry.told_card
        return stock(group_size, group_rank, ranks, _ours(backend), *args, **kwargs)

    distributed_c10d._new_process_group_helper = helper  # type: ignore[assignment]
    for module in (dist, distributed_c10d):
        batch_on_cards(module)
        objects_without_peers(module)


def batch_on_cards(module: Any) -> None:
    """torch groups the messages of ``batch_isend_irecv`` for its own classes alone; on a card they block one another
    otherwise."""
    stock = module.batch_isend_irecv

    @functools.wraps(stock)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        group = (p2p_op_list[0].group or dist.group.WORLD) if p2p_op_list else None
        if not isinstance(group, P2PGroup) or p2p_op_list[0].tensor.device.type != "cuda":
            return stock(p2p_op_list)  # type: ignore[no-any-return]
        distributed_c10d._check_p2p_op_list(p2p_op_list)
        with distributed_c10d._coalescing_manager(group, p2p_op_list[0].tensor.device, async_ops=True) as batch:
            for each in p2p_op_list:
                peer = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
                each.op(each.tensor, group=each.group, tag=each.tag, **peer)
        return batch.works  # type: ignore[no-any-return]

    module.batch_isend_irecv = batch_isend_irecv


def objects_without_peers(module: Any) -> None:
    """``broadcast_object_list`` allocates as many bytes as the sizes say that it receives, also where these are what
    happened to be in memory because a peer is lost: then there are none, and it raises."""
    stock = module.broadcast_object_list

    @functools.wraps(stock)
    def broadcast_object_list(
        object_list: list[Any], src: int | None = None, group: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        carrier = group or dist.group.WORLD
        if isinstance(carrier, P2PGroup):
            carrier.broadcasts_objects = True
        try:
            stock(object_list, src, group, *args, **kwargs)
        finally:
            if isinstance(carrier, P2PGroup):
                carrier.broadcasts_objects = False

    module.broadcast_object_list = broadcast_object_list


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
