"""What is protected, where, at which cost, and what the loss of each node does now. Pure.

In: the leaves of a rank, who is where, how many copies. Out: a :class:`Description`, whose ``str`` a person reads.
Known limit: whether a spare node is ready is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from p2pstate.memory_need import RankNeed, bytes_on_nodes
from p2pstate.placement import Labels, partners
from p2pstate.redundancy import is_held_elsewhere
from p2pstate.sizes import size_text
from p2pstate.state import Collected

__all__ = ["Description", "LeafGroup", "NodeReport", "describe", "leaf_groups"]


@dataclass(frozen=True, slots=True)
class LeafGroup:
    """``num_bytes``: of this rank's leaves of one kind; ``unique_bytes``: of those that no other node holds anyway."""

    name: str
    num_leaves: int
    num_bytes: int
    unique_bytes: int


@dataclass(frozen=True, slots=True)
class NodeReport:
    """``memory_bytes``: what the copies take there. ``if_lost``: what happens if the node dies now; ``survived``:
    whether the state outlives that."""

    name: str
    ranks: tuple[int, ...]
    memory_bytes: int
    survived: bool
    if_lost: str


@dataclass(frozen=True, slots=True)
class Description:
    """Of one rank. ``copies_on``: the nodes that have its shard. ``protected_step``: what the run can go back to.
    ``every``: steps from one version to the next, as of now if that is ``adapting``."""

    rank: int
    node: str
    groups: tuple[LeafGroup, ...]
    copies_on: tuple[str, ...]
    nodes: tuple[NodeReport, ...]
    committed_step: int
    protected_step: int | None
    every: int = 1
    adapting: bool = False

    @property
    def steps_at_risk(self) -> int:
        """Committed steps that a fault would take back."""
        return self.committed_step - (self.protected_step or 0)

    def __str__(self) -> str:
        lines = [f"rank {self.rank} on {self.node}, by kind: bytes, and of these bytes that no other node holds anyway"]
        for group in self.groups:
            leaves = f"{group.num_leaves} {'leaf' if group.num_leaves == 1 else 'leaves'}"
            lines.append(
                f"  {group.name:<16} {size_text(group.num_bytes):>11} {size_text(group.unique_bytes):>11}  {leaves}"
            )
        lines.append(f"copies of shard {self.rank}: {', '.join(self.copies_on)}")
        protected = "no step yet" if self.protected_step is None else f"step {self.protected_step}"
        often = f"every {self.every} steps" if self.every > 1 else "after every step"
        often += ", adapted to what it costs (every='auto')" if self.adapting else ""
        lines.append(f"protected: {protected}; committed: step {self.committed_step}; a version {often}")
        lines.append("nodes: host memory for copies, and what happens if the node dies now")
        lines += [f"  {node.name:<16} {size_text(node.memory_bytes):>11}  {node.if_lost}" for node in self.nodes]
        return "\n".join(lines)


def leaf_groups(collected: Collected, parameters: AbstractSet[str], places: Sequence[int]) -> tuple[LeafGroup, ...]:
    """``parameters``: the names that are parameters (of a model's others are buffers); ``places``: of every rank."""
    found: dict[str, list[tuple[int, bool]]] = {}
    for leaf in collected.leaves:
        kind = _kind(leaf.name, parameters)
        found.setdefault(kind, []).append((leaf.tensor.nbytes, is_held_elsewhere(leaf.holders, places)))
    found.setdefault("plain values", []).append((len(collected.values), False))
    groups = []
    for kind, sizes in found.items():
        unique_bytes = sum(size for size, elsewhere in sizes if not elsewhere)
        groups.append(LeafGroup(kind, len(sizes), sum(size for size, _ in sizes), unique_bytes))
    return tuple(groups)


def describe(
    rank: int,
    groups: Iterable[LeafGroup],
    nodes: Sequence[str],
    needs: Sequence[RankNeed],
    *,
    copies: int,
    lean: bool,
    labels: Labels | None = None,
    writes_to_disk: bool = False,
    committed_step: int = 0,
    protected_step: int | None = None,
    every: int = 1,
    adapting: bool = False,
) -> Description:
    """``nodes`` and ``needs`` are of every rank."""
    pairing = partners(nodes, copies, labels)
    holders = [
        [*([] if lean and keepers else [nodes[owner]]), *(nodes[keeper] for keeper in keepers)]
        for owner, keepers in enumerate(pairing)
    ]
    memory = bytes_on_nodes(needs, nodes, copies=copies, lean=lean, labels=labels, writes_to_disk=writes_to_disk)
    reports = []
    for node in dict.fromkeys(nodes):
        ranks = tuple(each for each, where in enumerate(nodes) if where == node)
        gone = [each for each, its in enumerate(holders) if set(its) <= {node}]
        text = _if_lost(node, ranks, gone, holders, protected_step, writes_to_disk)
        survived = not gone and protected_step is not None
        reports.append(NodeReport(node, ranks, memory[node], survived, text))
    return Description(
        rank,
        nodes[rank],
        tuple(groups),
        tuple(holders[rank]),
        tuple(reports),
        committed_step,
        protected_step,
        every,
        adapting,
    )


def _if_lost(
    node: str,
    ranks: Sequence[int],
    gone: Sequence[int],
    holders: Sequence[Sequence[str]],
    protected_step: int | None,
    writes_to_disk: bool,
) -> str:
    if gone:
        then = "the run resumes from its newest checkpoint" if writes_to_disk else "the run ends"
        return f"every copy of the state of {_ranks(gone)} is lost with it: {then}"
    if protected_step is None:
        return "no step is protected yet: training starts anew"
    sources = dict.fromkeys(holder for rank in ranks for holder in holders[rank] if holder != node)
    return (
        f"a spare node takes over {_ranks(ranks)}, or the run waits for one; step {protected_step} comes from the "
        f"memory of {', '.join(sources)}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _kind(name: str, parameters: AbstractSet[str]) -> str:
    head = name.partition("/")[0]
    if re.fullmatch(r"optimizer\d*", head):
        return "optimizer"
    if not re.fullmatch(r"model\d*", head):
        return head
    while name and name not in parameters:
        name = name.rpartition("/")[0]  # a part of a tensor that is made of several
    return "parameters" if name else "buffers"
