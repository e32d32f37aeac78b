"""Bytes of a rank that differ from those of most, put right from a rank that holds what most hold.

In: which ranks differ in which leaves (see replicas.py), the live leaves, the bulk connections. Out: live leaves that
hold the majority's bytes, in place.
Invariants: who sends what to whom follows from what all members of a set know alike; bytes are written into live
leaves only when their digest is the sender's, and all of a message or none of it.
Known limit: what was computed from the wrong bytes since they changed (other ranks' gradients among it) stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from p2pstate.errors import P2PStateError
from p2pstate.groups.transport import Incoming, Outgoing, Payload, Transport
from p2pstate.live_body import flat_bytes, memory_of
from p2pstate.replicas import Difference
from p2pstate.state import Leaf, write_into

__all__ = ["Repair", "carry_out", "repairs"]


@dataclass(frozen=True, slots=True)
class Repair:
    """``leaves`` of rank ``target`` get the bytes that rank ``source`` has."""

    source: int
    target: int
    leaves: tuple[str, ...]


def repairs(found: Iterable[Difference]) -> list[Repair]:
    """Pure. Of all differences in which most ranks agree; the lowest of these is the source."""
    return [
        Repair(min(set(each.members) - set(each.ranks)), target, each.leaves)
        for each in found
        if each.majority
        for target in each.ranks
    ]


def carry_out(wanted: Sequence[Repair], rank: int, leaves: Iterable[Leaf], transport: Transport) -> int:
    """This rank's part; every rank that ``wanted`` names calls this with the same. Returns the bytes that came.

    Raises P2PStateError when a leaf is not there, or the bytes that came are not those that were sent; what the
    transport raises.
    """
    mine = [each for each in wanted if rank in (each.source, each.target)]
    if not mine:
        return 0
    by_name = {leaf.name: leaf.tensor for leaf in leaves}
    arrivals = [_Arrival(each, by_name) for each in mine if each.target == rank]
    outgoing = [
        Outgoing(each.target, b"", Payload(memory_of(_joined(_of(each, by_name)))))
        for each in mine
        if each.source == rank
    ]
    transport.exchange(outgoing, [Incoming(each.source, each.accept, each.arrived) for each in arrivals])
    return sum(each.put_right() for each in arrivals)


def _of(repair: Repair, by_name: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    missing = [name for name in repair.leaves if name not in by_name]
    if missing:
        raise P2PStateError(
            f"{missing[0]} is to be put right and does not exist here: ranks have built different models"
        )
    return [by_name[name] for name in repair.leaves]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([flat_bytes(tensor).cpu() for tensor in tensors])


class _Arrival:
    def __init__(self, repair: Repair, by_name: Mapping[str, torch.Tensor]) -> None:
        self.source = repair.source
        self._tensors = _of(repair, by_name)
        self._body = torch.empty(sum(tensor.nbytes for tensor in self._tensors), dtype=torch.uint8)

    def accept(self, _head: bytes, num_bytes: int) -> memoryview:
        if num_bytes != self._body.numel():
            raise P2PStateError(f"rank {self.source} has {num_bytes} bytes of what are {self._body.numel()} here")
        return memory_of(self._body)

    def arrived(self, computed: bytes, announced: bytes) -> None:
        if computed != announced:
            raise P2PStateError(f"what rank {self.source} sent arrived with another digest")

    @torch.no_grad()
    def put_right(self) -> int:
        start = 0
        for tensor in self._tensors:
            piece = self._body[start : start + tensor.nbytes].clone()  # at an address that suits every type
            write_into(tensor, piece.view(tensor.dtype).view(tensor.shape).to(tensor.device))
            start += tensor.nbytes
        return start
