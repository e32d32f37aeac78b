"""cards/: what is read when, what waits for it, and what is pinned, with a card that only records.

``QueuedCard`` runs nothing before it is told to, as a stream may: what a test sees is what the order guarantees.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from state_zoo import bits
from test_replicate import DEADLINE_S, Rank
from torch import nn

from p2pstate.cards import gather
from p2pstate.cards.card import NotPinned, copy_all
from p2pstate.cards.gather import Gatherer, Run, runs_of
from p2pstate.cards.pinning import Pinner
from p2pstate.image_format import read_image
from p2pstate.replicate import Shipper
from p2pstate.slots import Slot
from p2pstate.state import Collected, Layout, Leaf, TrainingState
from p2pstate.types import Version


class Reached:
    def __init__(self, card: QueuedCard, at: int) -> None:
        self.card, self.at = card, at

    def query(self) -> bool:
        return self.card.num_run >= self.at


class QueuedCard:
    """``queued``: functions not run yet; ``log``: the names of all calls, in their order. ``host``: what it does not
    hold."""

    def __init__(self) -> None:
        self.host: list[torch.Tensor] = []
        self.queued: list[Callable[[], Any]] = []
        self.log: list[str] = []
        self.num_run = 0
        self.held: list[Reached] = []
        self.pinned: dict[int, int] = {}
        self.refuses = False
        self.registered = threading.Event()

    def holds(self, tensor: torch.Tensor) -> bool:
        return all(tensor is not each for each in self.host)

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)

    def follow_training(self) -> None:
        self.log.append("follow")

    def pack(self, chunk: torch.Tensor, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self.log.append(f"pack {len(into)}")

        def run() -> None:
            chunk.zero_()
            copy_all(into, sources)

        self.queued.append(run)

    def fetch(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self.log.append("fetch")
        self.queued.append(lambda: into.copy_(source))

    def mark(self) -> Reached:
        return Reached(self, self.num_run + len(self.queued))

    def hold_training(self, mark: Reached) -> None:
        self.log.append("hold")
        self.held.append(mark)

    def mark_training(self) -> Reached:
        return self.mark()

    def pin(self, memory: torch.Tensor) -> None:
        if self.refuses:
            raise NotPinned("the driver says no")
        self.pinned[memory.data_ptr()] = memory.nbytes
        self.log.append("pin")
        self.registered.set()

    def unpin(self, address: int) -> None:
        del self.pinned[address]
        self.log.append("unpin")

    def run(self, until: Reached | None = None) -> None:
        while self.queued and (until is None or self.num_run < until.at):
            self.queued.pop(0)()
            self.num_run += 1


# -- how leaves travel


def layout_of(sizes: Sequence[int]) -> Layout:
    return Layout.build([Leaf(f"{i:03d}", torch.empty(size, dtype=torch.uint8), (0,)) for i, size in enumerate(sizes)])


HERE, CARD, SOON = (False, False), (True, False), (True, True)


@pytest.mark.parametrize(
    ("leaves", "runs", "at_once"),
    [
        ([], [], []),
        ([(8, HERE), (8, HERE)], [], [0, 1]),
        # Adam's step, in host memory, between the moments on the card: one run, and what lies in it comes late
        ([(100, CARD), (4, HERE), (100, CARD), (4, HERE)], [(0, 292, (0, 2), (1,), True, False)], [3]),
        # one leaf that may change at any time makes its run early
        ([(64, CARD), (64, SOON)], [(0, 128, (0, 1), (), True, True)], []),
        # a large leaf, or a large one of the host, ends a run
        (
            [(64, CARD), (1000, CARD), (64, SOON)],
            [(0, 64, (0,), (), True, False), (64, 1064, (1,), (), False, False), (1088, 1152, (2,), (), True, True)],
            [],
        ),
        (
            [(64, CARD), (300, HERE), (64, CARD)],
            [(0, 64, (0,), (), True, False), (384, 448, (2,), (), True, False)],
            [1],
        ),
        # a chunk is full
        ([(400, CARD)] * 3, [(0, 848, (0, 1), (), True, False), (896, 1296, (2,), (), True, False)], []),
        ([(0, CARD), (0, SOON)], [(0, 0, (0, 1), (), True, True)], []),
    ],
)
def test_runs_pack_neighbours_and_let_large_leaves_go_alone(
    leaves: list[tuple[int, tuple[bool, bool]]],
    runs: list[tuple[Any, ...]],
    at_once: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("CHUNK_BYTES", 1000), ("MAX_PACKED_BYTES", 500), ("MAX_LATE_BYTES", 200)):
        monkeypatch.setattr(gather, name, value)
    found = runs_of(layout_of([size for size, _ in leaves]), [c for _, (c, _) in leaves], [e for _, (_, e) in leaves])
    assert found == ([Run(*run) for run in runs], at_once)


def test_copies_of_one_dtype_are_one_call_and_what_torch_cannot_join_goes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[int] = []
    stock = torch._foreach_copy_

    def foreach(into: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        assert len({source.dtype for source in sources}) == 1
        joined.append(len(into))
        stock(into, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", foreach)
    sources = [
        *(torch.randn(3), torch.ones(2, dtype=torch.int64), torch.randn(4), torch.ones(2, dtype=torch.int64)),
        *(torch.randn(3, 2).t(), torch.randn(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.uint16)),
    ]
    into = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    copy_all(into, sources)
    assert joined == [2, 2]
    assert [bits(place) for place in into] == [bits(source) for source in sources]


# -- what is read when


class State:
    """Leaves in one slot's worth of memory. The names of steady ones begin with "s"."""

    def __init__(self, tensors: dict[str, torch.Tensor], host: Sequence[str] = ()) -> None:
        self.card = QueuedCard()
        self.card.host = [tensors[name] for name in host]
        self.gatherer = Gatherer(self.card, lambda name: name.startswith("s"))
        self.leaves = [Leaf(name, tensor, (0,)) for name, tensor in sorted(tensors.items())]
        self.layout = Layout.build(self.leaves)
        self.region = torch.full((self.layout.num_bytes,), 0xCD, dtype=torch.uint8)
        self.expected = torch.zeros_like(self.region)
        self.layout.write(self.leaves, self.expected)

    def start(self) -> gather.Landing:
        self.gatherer.begin()
        self.gatherer.write(self.layout, self.leaves, self.region, None)  # type: ignore[arg-type]
        return self.gatherer.start()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CHUNK_BYTES", 1 << 12), ("MAX_PACKED_BYTES", 1 << 10), ("NUM_CHUNKS", 2)):
        monkeypatch.setattr(gather, name, value)


def zoo() -> dict[str, torch.Tensor]:
    """Packed in several chunks, large, not contiguous, conjugated, empty, 0-dim, early and steady."""
    torch.manual_seed(0)
    made = {f"s{i}": torch.randn(50 + i) for i in range(60)}
    made |= {f"b{i}": torch.randint(0, 9, (i,)) for i in range(5)}
    made |= {
        "s-large": torch.randn(2000),
        "s-large-transposed": torch.randn(40, 50).t(),
        "s-conjugated": torch.randn(300, dtype=torch.complex64).conj(),
        "s-scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "s-bool": torch.tensor([True, False, True]),
        "b-large": torch.randn(1000, dtype=torch.float64),
        "b-strided": torch.randn(7, 9)[:, 2],
    }
    return made


def test_what_has_landed_is_what_a_copy_would_have_been(small: None) -> None:
    state = State(zoo())
    for _ in range(2):  # the second time with places that are known
        landing = state.start()
        assert not landing.is_there()
        state.card.run()
        assert landing.is_there()
        landing.finish()
        assert torch.equal(state.region, state.expected)
        state.region.fill_(0xCD)
        for place, leaf in zip(state.layout.places(state.region), state.leaves, strict=True):
            assert bits(place) != bits(leaf.tensor) or not leaf.tensor.numel()
        state.layout._zero_gaps(state.region)


def test_leaves_that_may_change_are_read_before_training_goes_on_and_the_others_behind_it(small: None) -> None:
    state = State({"b": torch.ones(4), "s": torch.ones(500)})
    landing = state.start()
    assert state.card.log == ["follow", "pack 1", "fetch", "hold", "fetch"]
    (held,) = state.card.held
    assert held.at == 1, "training waits for a copy to the host"
    state.card.run(until=held)
    state.leaves[0].tensor.fill_(2)  # the next forward
    assert not landing.is_there()
    assert state.gatherer.fence() == []
    assert len(state.card.held) == 2
    state.card.run(until=state.card.held[1])
    state.leaves[1].tensor.fill_(2)  # the next optimizer.step()
    state.card.run()
    landing.finish()
    assert torch.equal(state.region, state.expected)


def test_host_waits_for_nothing_and_a_fence_without_a_capture_does_nothing(small: None) -> None:
    state = State(zoo())
    assert state.gatherer.fence() == []
    state.start()
    assert state.card.num_run == 0
    state.gatherer.fence()
    num_calls = len(state.card.log)
    state.gatherer.fence()
    assert len(state.card.log) == num_calls


def test_leaf_that_changes_behind_the_fence_is_named_and_read_early_from_then_on(small: None) -> None:
    state = State({"s-one": torch.ones(4), "s-two": torch.ones(500)})
    state.start()
    assert len(state.card.held) == 0
    state.leaves[1].tensor.add_(1)
    assert state.gatherer.fence() == ["s-two"]
    state.card.run()
    state.start()
    assert len(state.card.held) == 2, "training is not held for the leaf that changed before"
    state.leaves[1].tensor.add_(1)
    assert state.gatherer.fence() == []


def test_leaf_made_in_inference_mode_has_no_counter_and_is_read_early(small: None) -> None:
    with torch.inference_mode():
        made = torch.ones(4)
    state = State({"s": made})
    state.start()
    assert len(state.card.held) == 1


def test_host_leaves_have_their_value_of_that_instant(small: None) -> None:
    tensors = {"s1": torch.ones(4), "s2-step": torch.tensor(7.0), "s3": torch.ones(4), "s4": torch.ones(9000)}
    state = State(tensors, host=["s2-step", "s4"])
    landing = state.start()
    assert state.card.log == ["follow", "pack 2", "fetch"], "Adam's step makes two runs of one"
    for name in ("s2-step", "s4"):
        tensors[name].fill_(8)
    state.card.run()
    landing.finish()
    assert torch.equal(state.region, state.expected)


def test_what_is_being_read_is_kept_until_it_has_landed(small: None) -> None:
    state = State({"s": torch.ones(500)})
    storage = weakref.ref(state.leaves[0].tensor)
    landing = state.start()
    state.gatherer.fence()
    state.leaves.clear()
    gc.collect()
    assert storage() is not None
    state.card.run()
    landing.finish()
    gc.collect()
    assert storage() is None


def test_version_that_was_never_started_leaves_nothing_behind(small: None) -> None:
    state = State({"s": torch.ones(4)})
    state.gatherer.write(state.layout, state.leaves, state.region, None)  # type: ignore[arg-type]
    landing = state.start()
    assert state.card.log == ["follow", "pack 1", "fetch"]
    state.card.run()
    assert landing.is_there()


# -- which leaves are steady


def test_steady_is_what_an_optimizer_trains_and_keeps_for_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    optimizer = torch.optim.Adam([*model[0].parameters(), *model[1].parameters()])
    average = nn.Linear(2, 2)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    state = TrainingState([model], [optimizer], {"average": average})
    steady = {leaf.name for leaf in state.collect().leaves if state.is_steady(leaf.name)}
    params = {f"model/{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
    kept = {leaf.name for leaf in state.collect().leaves if leaf.name.startswith("optimizer/")}
    assert steady == {name for name in steady if name.startswith(("model/", "optimizer/"))}
    assert kept <= steady
    assert len(steady - kept) == len(params)
    assert not any("running" in name or "average" in name for name in steady)


# -- from a capture to a complete version


def shipped_from_card() -> list[str]:
    """One rank alone; returns what was wrong."""
    rank = Rank(0)
    card = QueuedCard()
    rank.capturer._gatherer = gatherer = Gatherer(card, lambda name: True)
    tensor = torch.arange(1000.0)
    collected = Collected([Leaf("s", tensor, (0,))], b"values", {})
    images = rank.capturer.capture(collected, Version(1, 1), None)
    landing = gatherer.start()
    wrong = []
    reached = threading.Event()

    def land() -> None:
        reached.set()
        assert gate.wait(DEADLINE_S)
        landing.finish()

    gate = threading.Event()
    shipper = Shipper(rank.link, (), (), lambda epoch, error: rank.errors.append(error), rank.stats)

    class Nothing:
        epoch = 1

        def exchange(self, *_: Any) -> None:
            """Nobody else is there."""

    shipper.ship(images, None, Nothing(), 0.0, None, land)  # type: ignore[arg-type]
    assert reached.wait(DEADLINE_S)
    slot = images[0].slot
    assert slot is not None
    if slot.header() is not None or shipper.complete == Version(1, 1):
        wrong.append("a version was complete before it had landed")
    card.run()
    gate.set()
    assert shipper.wait(DEADLINE_S)
    header = slot.header()
    if header is None or not slot.verify(header):
        wrong.append("a version that has landed is not complete")
    found, values = read_image(torch.frombuffer(slot.body(images[0].num_bytes), dtype=torch.uint8))
    if not torch.equal(found["s"], tensor) or values != b"values":
        wrong.append("it is another one")
    card.queued.clear()
    images = rank.capturer.capture(collected, Version(1, 2), Version(1, 1))

    def refuse() -> None:
        raise RuntimeError("an error was known before it landed")

    shipper.ship(images, Version(1, 1), Nothing(), 0.0, None, refuse)  # type: ignore[arg-type]
    assert shipper.wait(DEADLINE_S)
    second = images[0].slot
    assert second is not None
    if second.header() is not None or shipper.complete != Version(1, 1) or len(rank.errors) != 1:
        wrong.append("a version that must not be used is complete")
    return wrong


def test_version_is_complete_only_once_it_has_landed_and_never_after_an_error() -> None:
    assert shipped_from_card() == []


# -- pinned memory


def slot_of(num_bytes: int) -> Slot:
    fd = os.memfd_create("test")
    os.ftruncate(fd, num_bytes + 4096)
    try:
        return Slot(fd)
    finally:
        os.close(fd)


def test_slots_are_pinned_after_the_start_and_unpinned_before_they_are_unmapped() -> None:
    card = QueuedCard()
    pinner = Pinner(card)
    slot, empty = slot_of(1 << 16), slot_of(0)
    pinner.add(slot)
    pinner.add(empty)
    assert not card.registered.wait(0.1), "pinned before training went on"
    pinner.start()
    pinner.start()
    assert card.registered.wait(DEADLINE_S)
    assert list(card.pinned.values()) == [1 << 16]
    mapping = slot._map
    del slot
    deadline = time.monotonic() + DEADLINE_S
    while card.pinned and time.monotonic() < deadline:  # the thread that pinned it lets go of it, too
        gc.collect()
    assert not card.pinned
    assert not mapping.closed


def test_slot_that_is_gone_before_its_turn_is_passed_over() -> None:
    card = QueuedCard()
    pinner = Pinner(card)
    pinner.add(slot_of(1 << 12))
    gc.collect()
    kept = slot_of(1 << 13)
    pinner.add(kept)
    pinner.start()
    assert card.registered.wait(DEADLINE_S)
    assert list(card.pinned.values()) == [1 << 13]


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_said_once() -> None:
    card = QueuedCard()
    card.refuses = True
    pinner = Pinner(card)
    slots = [slot_of(1 << 12), slot_of(1 << 12)]
    for slot in slots:
        pinner.add(slot)
    with pytest.warns(RuntimeWarning, match="slots stay unpinned: the driver says no") as said:
        pinner._run()  # as its thread does, until the first refusal
    assert len(said) == 1
