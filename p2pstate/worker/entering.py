"""A process becomes a worker: what its agent assigned, made ready for the user's script.

In: the line to the agent, its assignment. Out: the process's context, its groups and its store; torch makes no TCPStore
from here on.
"""

from __future__ import annotations

import faulthandler
import os
from typing import Any

from torch._C._distributed_c10d import HashStore, Store

from p2pstate.groups.install import install
from p2pstate.groups.journal import Recording, Replay
from p2pstate.groups.registry import REGISTRY
from p2pstate.groups.status import STATUS
from p2pstate.observe.meter import METER
from p2pstate.trace import STACKS_SIGNAL, Trace, map_page
from p2pstate.types import LoopEnds, RoundInfo
from p2pstate.worker.context import WorkerContext, enter
from p2pstate.worker.link import Link
from rendezvous.store import EpochStore, raise_or_return

__all__ = ["prepare"]


class LinkStoreChannel:
    """rendezvous.store.StoreChannel over the line to the agent."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def request(self, epoch: int, op: str, args: list[Any], deadline_s: float) -> Any:
        reply = self._link.store_request(epoch, op, args, deadline_s)
        return raise_or_return(reply)


def prepare(link: Link, assignment: dict[str, Any]) -> WorkerContext:
    """Called once in a process, before any process group exists."""
    os.environ.update(assignment["environ"])
    rank, world_size = assignment["rank"], assignment["world_size"]
    epoch = assignment["epoch"]
    context = WorkerContext(
        link=link,
        rank=rank,
        local_rank=assignment["local_rank"],
        num_local=assignment["num_local"],
        world_size=world_size,
        fresh=assignment["fresh"],
        restore=assignment["restore"],
        info=RoundInfo.unpack(assignment["round"]) if assignment["fresh"] else None,
        raised=tuple(assignment["raised"]) if assignment["raised"] is not None else None,
        ends=LoopEnds.unpack(assignment["ends"]),
    )
    METER.restart("startup", assignment["seconds"])
    if not context.fresh or context.restore:
        METER.hold("recovery.start")
    channel = LinkStoreChannel(link)

    def make_store(of_epoch: int) -> Store:
        store: Store = EpochStore(channel, of_epoch)
        return store

    def default_store() -> Store:
        if STATUS.solo:
            return HashStore()
        return make_store(STATUS.epoch)

    if assignment["page"] is not None:
        STATUS.trace = Trace(map_page(assignment["page"]))
        os.close(assignment["page"])
        # For an agent that ends a hung process. In C: it works while the GIL is held.
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    REGISTRY.make_store = make_store
    REGISTRY.rank, REGISTRY.world_size, REGISTRY.host = rank, world_size, assignment["host"]
    REGISTRY.local_rank = assignment["local_rank"]
    if context.fresh:
        STATUS.connect(epoch)
        STATUS.journal = Recording()
    else:
        STATUS.solo = True
        STATUS.journal = Replay(assignment["journal"])
    context.watch(REGISTRY, STATUS)
    install(REGISTRY, default_store)
    enter(context)
    return context
