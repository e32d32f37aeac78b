"""Which leaves need no shipping, and who on a node keeps which of them.

In: who holds a leaf, names and sizes. Out: whether another node has it anyway; one part per holder.
Invariants: pure and deterministic, so that every rank computes the same division; every name is in exactly one part;
the largest part is at most 4/3 of the best possible (longest first).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["divide", "is_held_elsewhere"]


def is_held_elsewhere(holders: Sequence[int], places: Sequence[int]) -> bool:
    """Whether ranks on several nodes hold these bytes (or, with one node only, several ranks at all).

    ``places``: the node of every rank, as a number.
    """
    if len(holders) == 1:
        return False
    return len({places[rank] for rank in holders}) > 1 or len(set(places)) == 1


def divide(specs: Sequence[tuple[str, int]], num_parts: int) -> list[list[str]]:
    """Names (each with its size in bytes) in ``num_parts`` parts of about equal size; each part is sorted.

    The order of ``specs`` does not matter. Leaves without bytes are spread like any other. ValueError for fewer than
    one part, a negative size, or a name that is there twice.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, not {num_parts}")
    if len({name for name, _ in specs}) != len(specs):
        raise ValueError("a name is there twice")
    if any(num_bytes < 0 for _, num_bytes in specs):
        raise ValueError("a size is negative")
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    loads = [(0, 0, index) for index in range(num_parts)]  # bytes, then number of names, then index
    for name, num_bytes in sorted(specs, key=lambda spec: (-spec[1], spec[0])):
        load_bytes, num_names, index = loads[0]
        parts[index].append(name)
        heapq.heapreplace(loads, (load_bytes + num_bytes, num_names + 1, index))
    return [sorted(part) for part in parts]
