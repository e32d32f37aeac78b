"""Before anything is captured: all ranks ask for the same, and every node has the memory that it takes.

In: what each rank was asked for and has, what each node's vault may hold. Out: the mode, or ConfigError with the same
sentence on every rank. Ranks that start together meet; one that joins a running job looks at its own node alone, for
the others have what they need.

Invariants: rank 0 decides, from what every rank says, so that no two ranks come to different ends.
"""

from __future__ import annotations

from dataclasses import astuple
from datetime import timedelta
from typing import Any

import msgpack
from torch._C._distributed_c10d import Store

from p2pstate.errors import ConfigError
from p2pstate.memory import Bound
from p2pstate.memory_need import Decision, RankNeed, decide
from p2pstate.settings import Settings
from p2pstate.types import RoundInfo

__all__ = ["look_alone", "meet"]


def meet(
    store: Store, info: RoundInfo, rank: int, settings: Settings, need: RankNeed, room: Bound | None, timeout_s: float
) -> tuple[Decision, list[tuple[int, int]]]:
    """All ranks of ``info`` call this once for each ``store``; ``room``: from one rank of every node.

    Returns the decision, and what every rank has (see RankNeed.sizes).

    Raises ConfigError when the run cannot be protected as it is asked for; what the store raises.
    """
    own = need.address_space
    said = [need.unique_bytes, need.alike_bytes, need.live_bytes, own and _packed(own)]
    store.set(f"rank/{rank}", msgpack.packb([settings.pack(), said, room and _packed(room)]))
    if rank == 0:
        keys = [f"rank/{each}" for each in range(info.world_size)]
        store.wait(keys, timedelta(seconds=timeout_s))
        decision, needs = _decide(info, settings, [msgpack.unpackb(store.get(key)) for key in keys])
        store.set("decision", msgpack.packb([astuple(decision), [each.sizes for each in needs]]))
    store.wait(["decision"], timedelta(seconds=timeout_s))
    decided, sizes = msgpack.unpackb(store.get("decision"))
    decision = Decision(*decided)
    if decision.refused:
        raise ConfigError(decision.refused)
    return decision, [(unique, alike) for unique, alike in sizes]


def look_alone(places: list[int], place: int, settings: Settings, need: RankNeed, room: Bound) -> str:
    """A rank that joins at ``place``: has its node memory for as many ranks like it?

    Returns why it has not for the full mode (empty: it has). Raises ConfigError when it has for no mode asked for.
    """
    nodes = ["this node" if each == place else f"place {each}" for each in places]
    rooms, disk = {"this node": room}, settings.checkpoint is not None
    decision = decide(
        [need] * len(places), nodes, rooms, copies=settings.copies, lean=settings.lean, writes_to_disk=disk
    )
    if decision.refused:
        raise ConfigError(decision.refused)
    return decision.said


def _decide(info: RoundInfo, settings: Settings, said: list[Any]) -> tuple[Decision, list[RankNeed]]:
    needs: list[RankNeed] = []
    rooms = {}
    for rank, (theirs, (unique, alike, live, own), room) in enumerate(said):
        try:
            settings.check_same(0, theirs, rank)
        except ConfigError as error:
            return Decision(str(error)), []
        needs.append(RankNeed(unique, alike, live, own and Bound(*own)))
        if room:
            rooms[info.node_of(rank)] = Bound(*room)
    decision = decide(
        needs,
        [worker.node for worker in info.workers],
        rooms,
        copies=settings.copies,
        lean=settings.lean,
        labels=info.labels,
        writes_to_disk=settings.checkpoint is not None,
    )
    return decision, needs


def _packed(bound: Bound) -> list[Any]:
    return [bound.left_bytes, bound.what]
