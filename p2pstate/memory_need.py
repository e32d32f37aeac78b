"""How much host memory the copies of a run need on each node, and whether it is there. Pure.

In: what each rank has that is unique, what each node's vault can take, the number of copies. Out: a :class:`Decision`.

Per unique byte a rank's node keeps two versions (the one to fall back to, and the next), and so does every node that
has a copy: ``2 + 2 * copies`` bytes of host memory on the average node, four by default; one more while a version is
being written to disk. What several ranks hold alike takes two bytes per byte and node, divided over its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2pstate.memory import Bound
from p2pstate.placement import Labels, partners, wards
from p2pstate.slots import slot_bytes

__all__ = ["Decision", "RankNeed", "bytes_on_nodes", "decide"]


@dataclass(frozen=True, slots=True)
class RankNeed:
    """``unique_bytes``: of the rank's shard. ``alike_bytes``: the rank's piece of what its node keeps of leaves that
    others hold as well. ``live_bytes``: of training state that does not exist yet, and will be in host memory.
    ``address_space``: what is left of the process's own limit, None without one."""

    unique_bytes: int
    alike_bytes: int
    live_bytes: int = 0
    address_space: Bound | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """``refused``: why the run cannot be protected here; empty when it can."""

    refused: str = ""


def decide(
    needs: Sequence[RankNeed],
    nodes: Sequence[str],
    rooms: Mapping[str, Bound],
    *,
    copies: int = 1,
    labels: Labels | None = None,
    writes_to_disk: bool = False,
) -> Decision:
    """``needs`` and ``nodes`` are of every rank, ``rooms`` of every node: what its vault may hold in all."""
    per_rank = _bytes_of_ranks(needs, nodes, copies, labels, writes_to_disk)
    on_nodes = _sums(per_rank, nodes)
    for node, room in rooms.items():
        live = sum(need.live_bytes for need, where in zip(needs, nodes, strict=True) if where == node)
        if on_nodes[node] + live > room.left_bytes:
            growth = f" and {_mib(live)} for optimizer state that is yet to come" if live else ""
            return Decision(_sentence(node, on_nodes[node], growth, copies, room))
    for rank, (need, num_bytes) in enumerate(zip(needs, per_rank, strict=True)):
        own = need.address_space
        if own is not None and num_bytes + need.live_bytes > own.left_bytes:
            return Decision(_sentence(f"rank {rank} ({nodes[rank]})", num_bytes, "", copies, own))
    return Decision()


def bytes_on_nodes(
    needs: Sequence[RankNeed],
    nodes: Sequence[str],
    *,
    copies: int = 1,
    labels: Labels | None = None,
    writes_to_disk: bool = False,
) -> dict[str, int]:
    """Host memory that the copies take on every node, in bytes."""
    return _sums(_bytes_of_ranks(needs, nodes, copies, labels, writes_to_disk), nodes)


def _bytes_of_ranks(
    needs: Sequence[RankNeed], nodes: Sequence[str], copies: int, labels: Labels | None, writes_to_disk: bool
) -> list[int]:
    """Of every rank: the memory that it maps and writes, in its node's vault."""
    kept_for = wards(partners(nodes, copies, labels))
    out = []
    for need, its in zip(needs, kept_for, strict=True):
        own = [need.unique_bytes, need.alike_bytes] if need.alike_bytes else [need.unique_bytes]
        num_own, num_wards = sum(map(slot_bytes, own)), sum(slot_bytes(needs[ward].unique_bytes) for ward in its)
        out.append((3 if writes_to_disk else 2) * num_own + 2 * num_wards)
    return out


def _sums(per_rank: Sequence[int], nodes: Sequence[str]) -> dict[str, int]:
    sums = dict.fromkeys(nodes, 0)
    for num_bytes, node in zip(per_rank, nodes, strict=True):
        sums[node] += num_bytes
    return sums


def _sentence(who: str, num_bytes: int, growth: str, copies: int, room: Bound) -> str:
    return (
        f"{who} needs {_mib(num_bytes)} of host memory to keep {2 + 2 * copies} bytes per byte of unique state "
        f"(copies={copies}){growth}, and {_mib(room.left_bytes)} are left ({room.what}): give the run more memory or "
        "more nodes, or divide the state over more ranks"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
