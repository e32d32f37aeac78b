"""How much host memory the copies of a run need on each node, and whether it is there. Pure.

In: what each rank has that is unique, what each node's vault can take, the number of copies. Out: a :class:`Decision`.

Per unique byte a rank's node keeps two versions (the one to fall back to, and the next), and so does every node that
has a copy: ``2 + 2 * copies`` bytes of host memory on the average node, four by default; one more while a version is
being written to disk. In lean mode the own node keeps none, where there are others: ``2 * copies``, and one node less
may be lost. What several ranks hold alike takes two bytes per byte and node, divided over its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from p2pstate.memory import Bound
from p2pstate.placement import Labels, partners, wards
from p2pstate.sizes import mib
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

    @property
    def sizes(self) -> tuple[int, int]:
        return self.unique_bytes, self.alike_bytes


@dataclass(frozen=True, slots=True)
class Decision:
    """``refused``: why the run cannot be protected here; empty when it can. ``lean``: the mode to take. ``said``: why
    it is lean although nobody asked for that; empty otherwise."""

    refused: str = ""
    lean: bool = False
    said: str = ""


def decide(
    needs: Sequence[RankNeed],
    nodes: Sequence[str],
    rooms: Mapping[str, Bound],
    *,
    copies: int = 1,
    lean: bool | Literal["auto"] = False,
    labels: Labels | None = None,
    writes_to_disk: bool = False,
) -> Decision:
    """``needs`` and ``nodes`` are of every rank, ``rooms`` of every node: what its vault may hold in all."""
    modes = [False, True] if lean == "auto" and not writes_to_disk and len(set(nodes)) > 1 else [lean is True]
    tried = [_why_not(needs, nodes, rooms, copies, mode, labels, writes_to_disk) for mode in modes]
    for mode, why_not in zip(modes, tried, strict=True):
        if not why_not:
            said = (
                f"{tried[0]}; so each shard is kept on other nodes only (lean mode)" if mode and lean == "auto" else ""
            )
            return Decision(lean=mode, said=said)
    more = "give the run more memory or more nodes, or divide the state over more ranks"
    more += ", or allow lean mode (lean='auto')" if lean is False and len(set(nodes)) > 1 else ""
    return Decision(f"{tried[-1]}: {more}")


def _why_not(
    needs: Sequence[RankNeed],
    nodes: Sequence[str],
    rooms: Mapping[str, Bound],
    copies: int,
    lean: bool,
    labels: Labels | None,
    writes_to_disk: bool,
) -> str:
    """Empty when everything fits."""
    per_rank = _bytes_of_ranks(needs, nodes, copies, lean, labels, writes_to_disk)
    on_nodes = _sums(per_rank, nodes)
    num_others = len(on_nodes) - 1
    for node, room in rooms.items():
        live = sum(need.live_bytes for need, where in zip(needs, nodes, strict=True) if where == node)
        if on_nodes[node] + live > room.left_bytes:
            growth = f" and {mib(live)} for optimizer state that is yet to come" if live else ""
            return _sentence(node, on_nodes[node], growth, copies, lean, num_others, room)
    for rank, (need, num_bytes) in enumerate(zip(needs, per_rank, strict=True)):
        own = need.address_space
        if own is not None and num_bytes + need.live_bytes > own.left_bytes:
            return _sentence(f"rank {rank} ({nodes[rank]})", num_bytes, "", copies, lean, num_others, own)
    return ""


def bytes_on_nodes(
    needs: Sequence[RankNeed],
    nodes: Sequence[str],
    *,
    copies: int = 1,
    lean: bool = False,
    labels: Labels | None = None,
    writes_to_disk: bool = False,
) -> dict[str, int]:
    """Host memory that the copies take on every node, in bytes."""
    return _sums(_bytes_of_ranks(needs, nodes, copies, lean, labels, writes_to_disk), nodes)


def _bytes_of_ranks(
    needs: Sequence[RankNeed],
    nodes: Sequence[str],
    copies: int,
    lean: bool,
    labels: Labels | None,
    writes_to_disk: bool,
) -> list[int]:
    """Of every rank: the memory that it maps and writes, in its node's vault."""
    kept_for = wards(partners(nodes, copies, labels))
    out = []
    for need, its in zip(needs, kept_for, strict=True):
        own = [] if lean and its else [need.unique_bytes]
        own += [need.alike_bytes] if need.alike_bytes else []
        num_own, num_wards = sum(map(slot_bytes, own)), sum(slot_bytes(needs[ward].unique_bytes) for ward in its)
        out.append((3 if writes_to_disk else 2) * num_own + 2 * num_wards)
    return out


def _sums(per_rank: Sequence[int], nodes: Sequence[str]) -> dict[str, int]:
    sums = dict.fromkeys(nodes, 0)
    for num_bytes, node in zip(per_rank, nodes, strict=True):
        sums[node] += num_bytes
    return sums


def _sentence(who: str, num_bytes: int, growth: str, copies: int, lean: bool, num_others: int, room: Bound) -> str:
    factor = 2 * (min(copies, num_others) + (not lean or num_others == 0))
    mode = ", lean" if lean else ""
    return (
        f"{who} needs {mib(num_bytes)} of host memory to keep {factor} bytes per byte of unique state "
        f"(copies={copies}{mode}){growth}, and {mib(room.left_bytes)} are left ({room.what})"
    )
