"""Capture from a card and restore to it, on a real one."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable

import torch
from state_zoo import bits
from torch import nn

from p2pstate.cards.card import CudaCard
from p2pstate.cards.gather import Gatherer
from p2pstate.cards.pinning import Pinner
from p2pstate.slots import HEADER_BYTES, Slot
from p2pstate.state import Layout, Leaf, TrainingState

DEADLINE_S = 60.0
LONG_CYCLES = 2_000_000_000  # about a second of a card's time


def slot_of(num_bytes: int) -> Slot:
    fd = os.memfd_create("test")
    os.ftruncate(fd, num_bytes + HEADER_BYTES)
    try:
        return Slot(fd)
    finally:
        os.close(fd)


def wait_for(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def zoo(device: torch.device) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {f"s{i}": torch.randn(1000 + i, device=device) for i in range(100)}
    made |= {f"s{i}-step": torch.tensor(float(i)) for i in range(100)}  # as Adam keeps them
    made |= {
        "s-large": torch.randn(40 << 20, device=device),
        "s-large-transposed": torch.randn(2000, 3000, device=device).t(),
        "s-bfloat16": torch.randn(77, device=device).bfloat16(),
        "s-float8": torch.randn(64, device=device).to(torch.float8_e4m3fn),
        "b-bool": torch.rand(33, device=device) > 0.5,
        "b-strided": torch.randn(70, 9, device=device)[:, 2],
        "b-empty": torch.empty(0, 5, device=device),
    }
    return made


def change(tensors: dict[str, torch.Tensor], first: str) -> None:
    for name, tensor in tensors.items():
        if name.startswith(first) and tensor.dtype is not torch.float8_e4m3fn:
            tensor.logical_not_() if tensor.dtype is torch.bool else tensor.mul_(-3).add_(1)


def test_capture_beside_training_has_the_state_of_its_instant_and_the_host_does_not_wait() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = zoo(device)
    leaves = [Leaf(name, tensor, (0,)) for name, tensor in sorted(tensors.items())]
    layout = Layout.build(leaves)
    slot = slot_of(layout.num_bytes)
    card = CudaCard(device)
    pinner = Pinner(card)
    pinner._pin(slot)
    region = torch.frombuffer(slot.body(), dtype=torch.uint8)
    assert region.is_pinned()
    gatherer = Gatherer(card, lambda name: name.startswith("s"))
    for _ in range(2):
        expected = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        layout.write(leaves, expected)
        torch.cuda._sleep(LONG_CYCLES)  # training is not done yet
        gatherer.begin()
        gatherer.write(layout, leaves, region, slot)
        landing = gatherer.start()
        assert not landing.is_there(), "the host waited"
        change(tensors, "b")  # as the next forward does
        assert gatherer.fence() == []
        change(tensors, "s")  # as the next optimizer.step() does
        wait_for(landing.is_there)
        landing.finish()
        assert torch.equal(region[: layout.num_bytes], expected)
    address = region.data_ptr()
    del region, landing, gatherer, slot
    gc.collect()
    assert torch.cuda.cudart().cudaHostUnregister(address) != 0, "the slot was unmapped while it was pinned"


def test_restore_to_a_card_is_in_place_and_exact() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Dropout(0.5)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(8, 300, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = TrainingState([model], [optimizer], {})
    collected = state.collect()
    layout = Layout.build(collected.leaves)
    region = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.write(collected.leaves, region)
    live = {leaf.name: leaf.tensor for leaf in collected.leaves}
    before = {name: (tensor.data_ptr(), bits(tensor.cpu())) for name, tensor in live.items()}
    drawn = torch.rand(5, device="cuda").tolist()
    step()
    state.restore(layout.read(region), collected.values)
    after = {leaf.name: (leaf.tensor.data_ptr(), bits(leaf.tensor.cpu())) for leaf in state.collect().leaves}
    assert after == before
    assert torch.rand(5, device="cuda").tolist() == drawn
    assert {leaf.name: leaf.tensor.device for leaf in state.collect().leaves} == {n: t.device for n, t in live.items()}
