"""Whose nodes keep copies of which rank's shard. Pure.

In: the node of every rank, how many copies are wanted besides the own node's, the labels of the nodes. Out: for every
rank its partners (the ranks whose nodes keep a copy of its shard), and the inverse.

Invariants: partners are on different nodes, none of them the own one; every rank has as many wards as partners, so
every node keeps equally much; whatever ``copies`` nodes die, every shard is still on one. Nodes are taken in groups of
``copies + 1``, pairs by default, in which each keeps what all others have: more nodes may die at once as long as no
whole group does. Nodes that are left over make some groups larger: there partners follow in a ring. Members of a group
are in different zones, in different racks, and far apart in the order of ranks (parallel groups are mostly of
neighbours), in this order of preference and as far as numbers allow.
Known limits: every node has the same number of workers. Balance comes before labels: a rack that holds more nodes than
there are groups has partners within itself (:func:`weaknesses` says so).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

__all__ = ["MAX_COPIES", "Labels", "partners", "wards", "weaknesses"]

MAX_COPIES = 3

Labels = Mapping[str, Mapping[str, str]]  # of every node its labels; ``zone`` and ``rack`` say what fails together


def partners(nodes: Sequence[str], copies: int = 1, labels: Labels | None = None) -> list[tuple[int, ...]]:
    """``nodes[rank]`` -> the ranks whose nodes keep the copies of ``rank``'s shard, ``copies`` of them.

    Fewer where there are fewer other nodes, none where there is no other. Raises ValueError when nodes have different
    numbers of workers, or ``copies`` is not 1 to ``MAX_COPIES``.
    """
    ranks = _ranks_of_nodes(nodes)
    num_copies = _num_copies(copies, len(ranks))
    out: list[tuple[int, ...]] = [()] * len(nodes)
    for ring in _rings(list(ranks), num_copies, labels or {}):
        for position, node in enumerate(ring):
            following = [ring[(position + ahead) % len(ring)] for ahead in range(1, num_copies + 1)]
            for local, rank in enumerate(ranks[node]):
                out[rank] = tuple(ranks[other][local] for other in following)
    return out


def wards(partners_of: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The inverse: for every rank, the ranks whose copies its node keeps for it, in the order of ranks."""
    out: list[tuple[int, ...]] = [()] * len(partners_of)
    for rank, keepers in enumerate(partners_of):
        for keeper in keepers:
            out[keeper] = (*out[keeper], rank)
    return out


def weaknesses(nodes: Sequence[str], copies: int = 1, labels: Labels | None = None, *, lean: bool = False) -> list[str]:
    """What these nodes cannot give, in sentences; nothing when every wish is met."""
    order = list(_ranks_of_nodes(nodes))
    num_copies = _num_copies(copies, len(order))
    if num_copies == 0:
        return [
            f"{order[0]} is the only node, so every copy is in its memory: that outlives its processes, not the node "
            "itself; start another node to be safe from that"
        ]
    out = []
    if num_copies < copies:
        out.append(
            f"copies={copies} needs {copies + 1} nodes and there are {len(order)}: each shard has {num_copies} besides "
            "its own node's"
        )
    if lean:
        out.append(
            f"in lean mode each shard is kept on {num_copies} other node{'s' * (num_copies > 1)} only: dead processes "
            f"are replaced, and the loss of {f'{num_copies} nodes at once' if num_copies > 1 else 'a node'} may lose "
            "the state"
        )
    labels = labels or {}
    holders = [keepers if lean else (rank, *keepers) for rank, keepers in enumerate(partners(nodes, copies, labels))]
    for level, depth in (("zone", 1), ("rack", 2)):
        inside = [{_domain(nodes[rank], labels)[:depth] for rank in ranks} for ranks in holders]
        labelled = {_domain(node, labels)[:depth] for node in order if level in labels.get(node, {})}
        alone = {domain[-1] for domains in inside if len(domains) == 1 for domain in domains & labelled}
        out += [
            f"{level} {name} holds so many of the nodes that all copies of some shards are in it: its loss would lose "
            "them"
            for name in sorted(alone)
        ]
    return out


def _ranks_of_nodes(nodes: Sequence[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    counts = {node: len(local) for node, local in ranks.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{node} has {count}" for node, count in counts.items())
        raise ValueError(f"every node needs the same number of workers, and {listed}: give all the same number")
    return ranks


def _num_copies(copies: int, num_nodes: int) -> int:
    if not 1 <= copies <= MAX_COPIES:
        raise ValueError(f"copies={copies}: 1 to {MAX_COPIES} copies besides the own node's can be kept")
    return min(copies, num_nodes - 1)


def _rings(order: Sequence[str], num_copies: int, labels: Labels) -> list[list[str]]:
    """Nodes in groups of ``num_copies + 1`` or, where they do not come out even, more."""
    num_groups = max(1, len(order) // (num_copies + 1))
    # Who fails together stands together: dealt out in turns, they come into different groups.
    domains = [_domain(node, labels) for node in order]
    zones = {zone: index for index, (zone, _) in reversed(list(enumerate(domains)))}
    racks = {domain: index for index, domain in reversed(list(enumerate(domains)))}
    standing = sorted(range(len(order)), key=lambda i: (zones[domains[i][0]], racks[domains[i]], i))
    return [_interleaved([order[i] for i in standing[group::num_groups]], labels) for group in range(num_groups)]


def _interleaved(group: Sequence[str], labels: Labels) -> list[str]:
    """The same nodes, those of one zone and one rack apart from each other in the ring."""
    in_zone: Counter[str] = Counter()
    in_rack: Counter[tuple[str, str]] = Counter()
    keys = {}
    for node in group:
        rack = _domain(node, labels)
        zone = rack[0]
        keys[node] = (in_rack[rack], in_zone[zone])
        in_rack[rack] += 1
        in_zone[zone] += 1
    return sorted(group, key=keys.__getitem__)


def _domain(node: str, labels: Labels) -> tuple[str, str]:
    """(zone, rack) of a node. One without a label fails alone, as far as is known."""
    own = labels.get(node, {})
    alone = f"node {node}"
    zone = own.get("zone", f"rack {own['rack']}" if "rack" in own else alone)
    return zone, own.get("rack", alone)
