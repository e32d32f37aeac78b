"""live_body: the same bytes as in a slot, of one instant, however slowly they are read."""

from __future__ import annotations

import threading

import pytest
import torch

from p2pstate.live_body import LiveBody
from p2pstate.state import Layout, Leaf

DEADLINE_S = 30.0
TAIL = b"the tail, of an odd length"


def leaves() -> list[Leaf]:
    tensors = [
        torch.arange(1000.0),
        torch.arange(12.0).reshape(3, 4).t(),  # not contiguous
        torch.tensor(7, dtype=torch.int8),
        torch.empty(0, 5),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.arange(999, dtype=torch.bfloat16),
        torch.tensor([True, False, True]),
    ]
    return [Leaf(f"leaf{number}", tensor, (0,)) for number, tensor in enumerate(tensors)]


def expected(of: list[Leaf]) -> bytes:
    layout = Layout.build(of)
    region = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.write(of, region)
    return bytes(region.numpy()) + TAIL


def read(body: LiveBody, piece_bytes: int) -> bytes:
    return b"".join(body[start : start + piece_bytes] for start in range(0, len(body), piece_bytes))


@pytest.mark.parametrize("piece_bytes", [1, 63, 64, 1000, 1 << 20])
def test_any_pieces_are_the_bytes_that_a_slot_has(piece_bytes: int) -> None:
    of = leaves()
    body = LiveBody(Layout.build(of), of, TAIL, 1)
    assert read(body, piece_bytes) == expected(of)
    assert body.settle(0.0, lambda: False), "all was read, so nothing had to be copied"


def test_reader_that_is_slow_reads_on_from_a_copy_of_the_instant() -> None:
    of = leaves()
    before, body = expected(of), LiveBody(Layout.build(of), of, TAIL, 2)
    first = body[0:777]
    assert read(body, 256) == before, "the other one"
    assert not body.settle(0.0, lambda: False)
    for leaf in of:
        leaf.tensor.zero_()  # the next optimizer step
    assert bytes(first) + b"".join(body[start : start + 256] for start in range(777, len(body), 256)) == before


def test_step_waits_for_the_last_reader_and_not_for_one_that_gave_up() -> None:
    of = leaves()
    body = LiveBody(Layout.build(of), of, TAIL, 1)
    thread = threading.Thread(target=read, args=(body, 512))
    thread.start()
    assert body.settle(DEADLINE_S, lambda: False)
    thread.join()
    lost = LiveBody(Layout.build(of), of, TAIL, 1)
    lost.give_up()
    assert lost.settle(DEADLINE_S, lambda: False)


def test_step_does_not_wait_when_the_round_is_over() -> None:
    of = leaves()
    assert not LiveBody(Layout.build(of), of, TAIL, 1).settle(DEADLINE_S, lambda: True)
