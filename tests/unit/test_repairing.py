"""repairing: who sends what, and bytes that come to live leaves."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from p2pstate.errors import P2PStateError
from p2pstate.groups.transport import Incoming, OnError, Outgoing
from p2pstate.repairing import Repair, carry_out, repairs
from p2pstate.replicas import Difference
from p2pstate.state import Leaf

ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((2,), [Repair(0, 2, ("x", "y"))]),
        ((0,), [Repair(1, 0, ("x", "y"))]),
        ((0, 1, 2), [Repair(3, 0, ("x", "y")), Repair(3, 1, ("x", "y")), Repair(3, 2, ("x", "y"))]),
        (ALL, []),  # nobody knows which is right
    ],
)
def test_ranks_that_differ_get_what_the_lowest_of_the_others_has(
    ranks: tuple[int, ...], expected: list[Repair]
) -> None:
    assert repairs([Difference(ALL, ranks, ("x", "y"))]) == expected


class Wire:
    """Stands for the bulk connections of rank 1: hands it what rank 0 has."""

    name, epoch = "test", 1

    def __init__(self, sent: bytes, announced: bytes = b"right") -> None:
        self._sent, self._announced = sent, announced
        self.outgoing: list[Outgoing] = []

    def exchange(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], on_error: OnError = lambda error: None
    ) -> None:
        self.outgoing += outgoing
        for message in incoming:
            message.accept(b"", len(self._sent))[:] = self._sent
            message.arrived(b"right", self._announced)

    def cut(self) -> None:
        raise AssertionError

    def release(self) -> threading.Event:
        raise AssertionError


def leaves(value: float) -> list[Leaf]:
    strided = torch.full((3, 2), value).t()
    return [
        Leaf("a", torch.full((3,), value, dtype=torch.bfloat16), ALL),
        Leaf("b", strided, ALL),
        Leaf("c", torch.full((), value, dtype=torch.float64), ALL),
    ]


WANTED = [Repair(0, 1, ("a", "b", "c")), Repair(0, 3, ("c",))]


def test_source_sends_each_target_its_leaves_and_target_is_put_right_in_place() -> None:
    wire = Wire(b"")
    assert carry_out(WANTED, 0, leaves(2.0), wire) == 0
    assert [(each.to, len(each.payload.body)) for each in wire.outgoing] == [(1, 6 + 24 + 8), (3, 8)]
    live = leaves(1.0)
    addresses = [(leaf.tensor.data_ptr(), leaf.tensor.stride()) for leaf in live]
    body = wire.outgoing[0].payload.body
    assert carry_out(WANTED, 1, live, Wire(bytes(body[: len(body)]))) == 38
    assert all(torch.equal(found.tensor, right.tensor) for found, right in zip(live, leaves(2.0), strict=True))
    assert [(leaf.tensor.data_ptr(), leaf.tensor.stride()) for leaf in live] == addresses
    assert carry_out(WANTED, 2, [], Wire(b"")) == 0, "nothing concerns it"


@pytest.mark.parametrize(
    ("sent", "announced", "sentence"),
    [
        (bytes(37), b"right", "rank 0 has 37 bytes of what are 38 here"),
        (bytes(38), b"wrong", "arrived with another digest"),
    ],
)
def test_bytes_that_are_not_what_was_sent_change_nothing(sent: bytes, announced: bytes, sentence: str) -> None:
    live = leaves(1.0)
    with pytest.raises(P2PStateError, match=sentence):
        carry_out(WANTED, 1, live, Wire(sent, announced))
    assert all(torch.equal(found.tensor, kept.tensor) for found, kept in zip(live, leaves(1.0), strict=True))


def test_leaf_that_does_not_exist_is_named() -> None:
    with pytest.raises(P2PStateError, match="b is to be put right and does not exist here"):
        carry_out(WANTED, 1, leaves(1.0)[:1], Wire(b""))
