"""From a card to slots while training goes on: what is read when, and when it may change again.

In: the leaves of each part of one version, with their places in a slot. Out: a :class:`Landing`, which says when all
bytes are there, and a fence, which keeps training from changing what has not been read.

A stream of its own reads the state behind everything that training has queued. Leaves that may change at any time
(buffers, frozen parameters, averages, gradients that accumulate) are read first, and training waits on the card until
they are. Trainable parameters and the state of their optimizers are read while the next forward and backward run;
the fence is set before the next ``optimizer.step()``, on the card as well: the host waits for neither. Small leaves are
packed into chunks on the card, so that there are few kernels and few copies; a large one goes straight to its slot.
Digests are made on the host, from the slot, once everything has landed.

Invariants: a version is of one instant: whatever else changes a parameter before the fence is noticed by torch's
version counters, and named; what is being read is not freed, and no slot that is being written is unpinned; memory on
the card is ``NUM_CHUNKS`` chunks, and one leaf more where a large one is not contiguous.
Known limits: what changes a trainable parameter behind torch's back (``parameter.data``) between the beginning of a
step and its first ``optimizer.step()`` is not noticed. The state of one process is on one card. What was on the card at
the instant is not hashed there: a fault of the copy itself would be taken for the state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from p2pstate.cards.card import Card, Mark
from p2pstate.slots import Slot
from p2pstate.state import Layout, Leaf

__all__ = ["CHUNK_BYTES", "Gatherer", "Landing", "Run", "runs_of"]

CHUNK_BYTES = 32 << 20
NUM_CHUNKS = 4
MAX_PACKED_BYTES = 8 << 20  # a leaf above goes straight from where it is
MAX_LATE_BYTES = 4 << 10  # a leaf in host memory up to this size does not end a run of leaves on the card


@dataclass(frozen=True, slots=True)
class Run:
    """Leaves ``indices`` of a layout, all on the card, that travel as the bytes ``start`` to ``stop`` of its region.

    ``late``: leaves in host memory that lie between them, and are written once the run has landed.
    """

    start: int
    stop: int
    indices: tuple[int, ...]
    late: tuple[int, ...]
    packed: bool
    early: bool


def runs_of(layout: Layout, on_card: Sequence[bool], early: Sequence[bool]) -> tuple[list[Run], list[int]]:
    """Pure. How the leaves of ``layout`` travel, and which of them are copied on the host at once.

    ``early``: of each leaf on the card, whether it may change at any time. A packed run is early if one of its leaves
    is.
    """
    runs: list[Run] = []
    at_once: list[int] = []
    open_: list[int] = []  # of the run that is being put together
    between: list[int] = []  # host leaves since its last leaf on the card
    late: list[int] = []

    def close() -> None:
        if open_:
            first, last = layout.entries[open_[0]], layout.entries[open_[-1]]
            is_early = any(early[index] for index in open_)
            stop = last.offset_bytes + last.num_bytes
            runs.append(Run(first.offset_bytes, stop, tuple(open_), tuple(late), True, is_early))
        at_once.extend(between)
        for each in (open_, between, late):
            each.clear()

    for index, entry in enumerate(layout.entries):
        if not on_card[index]:
            if entry.num_bytes > MAX_LATE_BYTES or not open_:
                close()
                at_once.append(index)
            else:
                between.append(index)
            continue
        end = entry.offset_bytes + entry.num_bytes
        if entry.num_bytes > MAX_PACKED_BYTES:
            close()
            runs.append(Run(entry.offset_bytes, end, (index,), (), False, early[index]))
            continue
        if open_ and end - layout.entries[open_[0]].offset_bytes > CHUNK_BYTES:
            close()
        late += between
        between.clear()
        open_.append(index)
    close()
    return runs, at_once


@dataclass(slots=True)
class Landing:
    """Bytes of one version on their way. ``keeps``: what must live until they are there."""

    mark: Mark
    late: list[tuple[torch.Tensor, torch.Tensor]]
    keeps: list[object]

    def is_there(self) -> bool:
        """Whether everything has left the card."""
        return self.mark.query()

    def finish(self) -> None:
        """Once it is: what was kept on the host meanwhile goes to its place as well."""
        for view, value in self.late:
            view.copy_(value)
        self.late.clear()
        self.keeps.clear()


@dataclass(slots=True)
class _Plan:
    """How the leaves of one layout travel, while the same of them are on the card and early."""

    key: tuple[tuple[bool, ...], tuple[bool, ...]]
    runs: list[Run]
    at_once: list[int]
    places: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)  # (run, chunk) -> views


@dataclass(frozen=True, slots=True)
class _Part:
    plan: _Plan
    layout: Layout
    sources: list[torch.Tensor]
    region: torch.Tensor


class Gatherer:
    """``is_steady``: whether the leaf of this name changes in ``optimizer.step()`` only."""

    def __init__(self, card: Card, is_steady: Callable[[str], bool]) -> None:
        self._card = card
        self._is_steady = is_steady
        self._chunks: list[torch.Tensor] = []
        self._plans: weakref.WeakKeyDictionary[Layout, _Plan] = weakref.WeakKeyDictionary()
        self._parts: list[_Part] = []
        self._keeps: list[object] = []
        self._unsteady: set[str] = set()
        self._newest: Landing | None = None  # nobody may wait for it any more, and it keeps what is being read
        self._reading: Mark | None = None
        self._versions: list[tuple[Leaf, int]] = []

    def begin(self) -> None:
        """A new version: forget what was noted down of one that was not started."""
        self._parts, self._keeps, self._versions = [], [], []

    def write(self, layout: Layout, leaves: Sequence[Leaf], region: torch.Tensor, slot: Slot) -> None:
        """Like ``layout.write``, but leaves on the card are only noted down: :meth:`start` reads them."""
        sources = layout.sources(leaves)
        on_card = tuple(map(self._card.holds, sources))
        early = tuple(there and not self._steady(leaf) for leaf, there in zip(leaves, on_card, strict=True))
        plan = self._plans.get(layout)
        if plan is None or plan.key != (on_card, early):
            plan = self._plans[layout] = _Plan((on_card, early), *runs_of(layout, on_card, early))
        places = layout.places(region)
        for index in plan.at_once:
            places[index].copy_(sources[index])
        self._parts.append(_Part(plan, layout, sources, region))
        self._keeps += [slot, sources]
        self._versions += [
            (leaf, leaf.tensor._version)
            for leaf, there, soon in zip(leaves, on_card, early, strict=True)
            if there and not soon
        ]

    def start(self) -> Landing:
        """Queue the copies of everything that was noted down; the caller may change host memory from now on."""
        card, parts = self._card, self._parts
        late = [
            (part.layout.places(part.region)[index], part.sources[index].clone())
            for part in parts
            for run in part.plan.runs
            for index in run.late
        ]
        card.follow_training()
        if any(run.early for part in parts for run in part.plan.runs):
            card.hold_training(self._queue(early=True))
        mark = self._reading = self._queue(early=False)
        landing = self._newest = Landing(mark, late, self._keeps)
        self._parts, self._keeps = [], []
        return landing

    def fence(self) -> list[str]:
        """From here on training may change everything. Returns the leaves that it has changed already, though they were
        taken for steady: what was read of them is worth nothing. Next time they are read early."""
        if self._reading is None:
            return []
        self._card.hold_training(self._reading)
        changed = [leaf.name for leaf, version in self._versions if leaf.tensor._version != version]
        self._reading, self._versions = None, []
        self._unsteady.update(changed)
        return changed

    def _steady(self, leaf: Leaf) -> bool:
        # A tensor made in inference mode has no version counter.
        return leaf.name not in self._unsteady and not leaf.tensor.is_inference() and self._is_steady(leaf.name)

    def _queue(self, *, early: bool) -> Mark:
        """Queue all runs that are early, or all others. The mark: everything of them has been read."""
        todo = [
            (part, number, run)
            for part in self._parts
            for number, run in enumerate(part.plan.runs)
            if run.early is early
        ]
        for part, _, run in todo:
            if not run.packed:
                self._fetch_whole(part, run)
        packed = [each for each in todo if each[2].packed]
        read = self._card.mark()
        for first in range(0, len(packed), NUM_CHUNKS):
            batch = packed[first : first + NUM_CHUNKS]
            for chunk, (part, number, run) in enumerate(batch):
                self._pack(part, number, run, chunk)
            read = self._card.mark()
            for chunk, (part, _, run) in enumerate(batch):
                into = part.region[run.start : run.stop]
                self._card.fetch(into, self._chunk(chunk)[: len(into)])
        return read if early else self._card.mark()

    def _pack(self, part: _Part, number: int, run: Run, chunk: int) -> None:
        memory = self._chunk(chunk)[: run.stop - run.start]
        views = part.plan.places.get((number, chunk))
        if views is None:
            views = []
            for entry in (part.layout.entries[index] for index in run.indices):
                begin = entry.offset_bytes - run.start
                views.append(memory[begin : begin + entry.num_bytes].view(entry.dtype).view(entry.shape))
            part.plan.places[number, chunk] = views
        self._card.pack(memory, views, [part.sources[index] for index in run.indices])

    def _fetch_whole(self, part: _Part, run: Run) -> None:
        """One large leaf. Where it is not contiguous it is, in memory of its own, before."""
        source = part.sources[run.indices[0]]
        if not source.is_contiguous() or source.is_conj() or source.is_neg():
            memory = self._card.empty(run.stop - run.start)
            entry = part.layout.entries[run.indices[0]]
            self._card.pack(memory, [memory.view(entry.dtype).view(entry.shape)], [source])
        else:
            memory = source.reshape(-1).view(torch.uint8)
        self._keeps.append(memory)
        self._card.fetch(part.region[run.start : run.stop], memory)

    def _chunk(self, number: int) -> torch.Tensor:
        while len(self._chunks) <= number:
            self._chunks.append(self._card.empty(CHUNK_BYTES))
        return self._chunks[number]
