"""Which rank's node keeps a copy of which rank's shard. Pure.

In: the node of every rank. Out: for every rank its buddy, a permutation, so that every rank has exactly one ward.
Invariants: a buddy is on another node whenever there are two nodes or more; nodes are taken in pairs, so that the loss
of two nodes loses nothing unless they are partners (an odd node out makes one ring of three). Limit: every node has
the same number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["buddies", "wards"]


def buddies(nodes: Sequence[str]) -> list[int | None]:
    """``nodes[rank]`` -> the rank that keeps the second copy of ``rank``'s shard; None where no other node exists.

    Raises ValueError when nodes have different numbers of workers.
    """
    order = list(dict.fromkeys(nodes))
    ranks = {node: [rank for rank, name in enumerate(nodes) if name == node] for node in order}
    if len({len(local) for local in ranks.values()}) > 1:
        raise ValueError(f"every node needs the same number of workers, not { {n: len(r) for n, r in ranks.items()} }")
    out: list[int | None] = [None] * len(nodes)
    for group in _rings(order):
        for position, node in enumerate(group):
            partner = group[(position + 1) % len(group)]
            if partner == node:
                continue
            for local, rank in enumerate(ranks[node]):
                out[rank] = ranks[partner][local]
    return out


def wards(buddy_of: Sequence[int | None]) -> list[int | None]:
    """The inverse: for every rank, the rank whose copy its node keeps."""
    out: list[int | None] = [None] * len(buddy_of)
    for rank, buddy in enumerate(buddy_of):
        if buddy is not None:
            out[buddy] = rank
    return out


def _rings(order: list[str]) -> list[list[str]]:
    rings = [order[i : i + 2] for i in range(0, len(order), 2)]
    if len(rings) > 1 and len(rings[-1]) == 1:
        odd = rings.pop()
        rings[-1] += odd
    return rings
