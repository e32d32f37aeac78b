"""From the live training state to the slots of the own node: one version, two kinds of parts.

In: what ``TrainingState.collect`` found, the version, and the version whose slots must not be touched. Out: filled
slots, not yet *complete*: the shipper publishes their headers. Where one thread copies, it hashes in the same pass;
where several do (or a card), the shipper hashes in the background.

Invariants: called on the training thread, between two steps; a slot that holds the version to keep is never written;
what several ranks hold alike is written once per node, divided over those of them that are there; what no other
node has is written by every rank that has it.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from p2pstate.cards.gather import Gatherer
from p2pstate.groups.transport import Body
from p2pstate.image_format import tail_begin, tail_end
from p2pstate.live_body import LiveBody
from p2pstate.redundancy import divide, is_held_elsewhere
from p2pstate.sampling import Sample
from p2pstate.slots import Header, Slot, capacity_for
from p2pstate.state import Collected, Layout, Leaf
from p2pstate.state.hashed_copy import HashedCopy
from p2pstate.types import Part, Version
from p2pstate.versions import next_slot
from p2pstate.worker.link import Link

__all__ = ["Capturer", "Image", "SlotPair"]


@dataclass(frozen=True, slots=True)
class Image:
    """One part of one version in a slot: all bytes in place. Without a slot it is ``live``. ``digest``: where it is
    known already. ``balance``: of an own part, see sampling.py."""

    part: Part
    slot: Slot | None
    version: Version
    data_bytes: int
    tail_bytes: int
    num_shared_sets: int
    live: LiveBody | None = None
    digest: bytes | None = None
    balance: int = 0

    @property
    def body(self) -> Body:
        if self.live is not None:
            return self.live
        assert self.slot is not None
        return self.slot.body(self.num_bytes)

    @property
    def num_bytes(self) -> int:
        return self.data_bytes + self.tail_bytes

    def header(self, digest: bytes) -> Header:
        sizes = self.data_bytes, self.tail_bytes
        return Header(self.version, *sizes, digest, self.num_shared_sets, self.balance)


class SlotPair:
    """The two slots of one part: one keeps the version to fall back to, the other takes the next.

    With ``reserve`` there is a third: the slot of a version that is being written to disk is set aside, and the reserve
    takes its place in the pair until the next time.
    """

    def __init__(
        self,
        link: Link,
        part: Part,
        *,
        reserve: bool = False,
        expected_bytes: int = 0,
        on_map: Callable[[Slot], None] = lambda slot: None,
    ) -> None:
        """``expected_bytes``: what a version will have once all state exists; memory that is new has room for it.
        ``on_map``: called with every slot that is mapped here."""
        self._expected_bytes = expected_bytes
        self._link = link
        self._part = part
        self._on_map = on_map
        self._slots: list[Slot | None] = [None, None, None]
        self._pair = (0, 1)
        self._reserve = 2 if reserve else None
        self._looked = not reserve
        self._prepared: set[Slot] = set()

    def target(self, num_bytes: int, keep: Version | None) -> Slot:
        """The slot to write next, with room for ``num_bytes``; never the one that holds ``keep``.

        Raises Retryable when the node has no memory for it.
        """
        if not self._looked:
            self._look(keep)
        first, second = self._pair
        index = self._pair[next_slot((self._version(first), self._version(second)), keep)]
        return self._with_room(index, num_bytes)

    def set_aside(self, slot: Slot) -> None:
        """Whatever was just written to ``slot`` stays there until the slot after the next call is taken back."""
        assert self._reserve is not None
        written = next(index for index in self._pair if self._slots[index] is slot)
        self._pair = (sum(self._pair) - written, self._reserve)
        self._reserve = written

    def prepare(self, num_bytes: int) -> None:
        """Have all memory there before it is needed: what is new takes six times as long to write. A slot that holds a
        version keeps it, even where it has become too small."""
        for index in (*self._pair, *(() if self._reserve is None else (self._reserve,))):
            if self._version(index) is None or index == self._reserve:
                self._with_room(index, num_bytes)
        slots = {slot for slot in self._slots if slot is not None and slot.capacity}
        for slot in slots - self._prepared:
            slot.populate()
        self._prepared = slots

    def _with_room(self, index: int, num_bytes: int) -> Slot:
        slot = self._slots[index]
        if slot is None or slot.capacity < num_bytes:
            slot = self._slots[index] = self._map(index, capacity_for(max(num_bytes, self._expected_bytes)))
        return slot

    def _look(self, keep: Version | None) -> None:
        """A predecessor may have left versions in all three: the reserve is the oldest that is not kept."""
        self._looked = True
        held = {index: self._version(index) for index in range(3)}
        free = [index for index in (2, 1, 0) if held[index] is None or held[index] != keep]
        self._reserve = min(free, key=lambda index: held[index] or Version(-1, -1))
        first, second = (index for index in range(3) if index != self._reserve)
        self._pair = first, second

    def _version(self, index: int) -> Version | None:
        slot = self._slots[index]
        if slot is None:
            # A predecessor of this process may have left a version here.
            slot = self._slots[index] = self._map(index, 0)
        header = slot.header()
        return header.version if header else None

    def _map(self, index: int, num_bytes: int) -> Slot:
        fd = self._link.allocate(self._part, index, num_bytes)
        try:
            slot = Slot(fd)
        finally:
            os.close(fd)
        self._on_map(slot)
        return slot


class Capturer:
    """Writes the parts of rank ``rank``. ``places[rank]`` tells which ranks are on one node."""

    def __init__(
        self,
        link: Link,
        rank: int,
        places: Sequence[int],
        *,
        reserve: bool = False,
        expected_bytes: tuple[int, int] = (0, 0),
        gatherer: Gatherer | None = None,
        on_map: Callable[[Slot], None] = lambda slot: None,
        sampled: bool = True,
    ) -> None:
        """``reserve``: slots can be set aside (see SlotPair). ``expected_bytes``: once all state exists, of what only
        this rank has, and of its piece of what others have as well. ``gatherer``: for the leaves on a card, which it
        reads once it is started; what :meth:`capture` returns is filled when that says so. ``sampled``: look whether
        what others have as well is still alike."""
        self._link = link
        self._gatherer = gatherer
        self._on_map = on_map
        self._reserve = reserve
        self._expected_bytes = expected_bytes
        self._rank = rank
        self._places = tuple(places)
        self._pairs: dict[Part, SlotPair] = {}
        self._layouts: dict[Part, _KnownLayout] = {}
        self._plan: _Plan | None = None
        self._sampled = sampled
        self.balance = 0  # of the version captured last

    def retain(self, parts: Collection[Part]) -> None:
        """Forget the memory of all other parts: the vault is about to let it go."""
        self._pairs = {part: pair for part, pair in self._pairs.items() if part in parts}

    def capture(
        self,
        collected: Collected,
        version: Version,
        keep: Version | None,
        *,
        set_aside: bool = False,
        num_readers: int = 0,
    ) -> list[Image]:
        """Copy the state into this rank's slots. The caller may change the state as soon as this returns.

        ``set_aside``: no later version is written over this one before the next that is set aside. ``num_readers``: of
        the own part, which then has no slot; the caller changes nothing before all have read it (see LiveBody).
        """
        if self._gatherer is not None:
            self._gatherer.begin()
        plan = self._plan_for(collected.leaves)
        self.balance = plan.sample.balance()
        mine = Part.own(self._rank)
        if num_readers:
            known, tail = self._image(mine, plan.own, collected, version)
            live = LiveBody(known.layout, plan.own, tail, num_readers)
            sizes = known.layout.num_bytes, len(tail)
            images = [Image(mine, None, version, *sizes, len(plan.shared), live, balance=self.balance)]
        else:
            images = [self._write(mine, plan.own, collected, version, keep, len(plan.shared))]
        images += [self._write(part, leaves, collected, version, keep, 0) for part, leaves in plan.shared]
        if set_aside:
            for image in images:
                assert image.slot is not None, "what is written to disk comes from slots"
                self._pairs[image.part].set_aside(image.slot)
        return images

    def prepare(self, images: Sequence[Image]) -> None:
        """Have all memory that further versions like ``images`` take. From any thread, until the next capture."""
        for image in images:
            if image.slot is not None:
                self._pairs[image.part].prepare(image.num_bytes)

    def _write(
        self,
        part: Part,
        leaves: list[Leaf],
        collected: Collected,
        version: Version,
        keep: Version | None,
        num_shared_sets: int,
    ) -> Image:
        pair = self._pairs.get(part)
        if pair is None:
            own, alike = self._expected_bytes
            alone = self._plan is not None and len(self._plan.shared) == 1  # else it is not known how much is of which
            expected = own if part.kind == "own" else alike if alone else 0
            pair = self._pairs[part] = SlotPair(
                self._link, part, reserve=self._reserve, expected_bytes=expected, on_map=self._on_map
            )
        known, tail = self._image(part, leaves, collected, version)
        data_bytes = known.layout.num_bytes
        needed = data_bytes + len(tail)
        slot = pair.target(needed, keep)
        slot.begin()
        body = slot.body()
        hasher = xxhash.xxh3_128() if self._gatherer is None and torch.get_num_threads() == 1 else None
        if data_bytes:
            region = torch.frombuffer(body, dtype=torch.uint8, count=data_bytes)
            if hasher is not None:
                known.hashed_copy().write(region, hasher)
            elif self._gatherer is None:
                known.layout.write_fitting(known.sources, region)
            else:
                self._gatherer.write(known.layout, leaves, region, slot)
        body[data_bytes:needed] = tail
        digest = None
        if hasher is not None:
            hasher.update(tail)
            digest = hasher.digest()
        balance = self.balance if part.kind == "own" else 0
        return Image(part, slot, version, data_bytes, len(tail), num_shared_sets, digest=digest, balance=balance)

    def _image(
        self, part: Part, leaves: list[Leaf], collected: Collected, version: Version
    ) -> tuple[_KnownLayout, bytes]:
        """Where the data goes, and the tail."""
        known = self._layout_for(part, leaves, collected.tied)
        values = collected.values if part.kind == "own" else b""
        return known, known.tail_begin + tail_end(values, version, part, known.layout.num_bytes)

    def _layout_for(self, part: Part, leaves: list[Leaf], tied: Mapping[str, str]) -> _KnownLayout:
        """The layout of the last version while it fits: its views into the slots are reused."""
        known = self._layouts.get(part)
        if known is None or known.leaves is not leaves:
            if known is not None and known.layout.fits(leaves) and known.divided_like(leaves):
                layout, begin = known.layout, known.tail_begin
            else:
                layout = Layout.build(leaves)
                begin = tail_begin(layout, leaves, tied)
            sources = [leaf.tensor for leaf in leaves]
            known = _KnownLayout(leaves, sources, layout, _divisions(leaves), begin)
            self._layouts[part] = known
        return known

    def _plan_for(self, leaves: list[Leaf]) -> _Plan:
        """Which leaves go where; made anew when they are not those of the last version."""
        plan = self._plan
        if plan is None or plan.leaves is not leaves:
            own: list[Leaf] = []
            shared: dict[tuple[int, ...], list[Leaf]] = {}
            for leaf in leaves:
                if is_held_elsewhere(leaf.holders, self._places):
                    shared.setdefault(leaf.holders, []).append(leaf)
                else:
                    own.append(leaf)
            pieces = [self._piece(members, alike) for members, alike in sorted(shared.items())]
            sample = Sample(self._rank, shared if self._sampled else {})
            plan = self._plan = _Plan(leaves, own, pieces, sample)
        return plan

    def _piece(self, members: tuple[int, ...], leaves: list[Leaf]) -> tuple[Part, list[Leaf]]:
        """What this rank keeps of what ``members`` hold alike."""
        local = [rank for rank in members if self._places[rank] == self._places[self._rank]]
        piece = local.index(self._rank)
        names = set(divide([(leaf.name, leaf.tensor.nbytes) for leaf in leaves], len(local))[piece])
        return Part.shared(members, piece, len(local)), [leaf for leaf in leaves if leaf.name in names]


@dataclass(frozen=True, slots=True)
class _Plan:
    """``leaves``: all of them; ``own``: those that nobody else has; ``shared``: this rank's piece of each other set."""

    leaves: list[Leaf]
    own: list[Leaf]
    shared: list[tuple[Part, list[Leaf]]]
    sample: Sample


@dataclass(slots=True)
class _KnownLayout:
    """``leaves`` and their tensors, ``sources``, fit the layout. ``tail_begin``: all of a tail before the values."""

    leaves: list[Leaf]
    sources: list[torch.Tensor]
    layout: Layout
    divisions: list[Any]
    tail_begin: bytes
    _hashed_copy: HashedCopy | None = None

    def hashed_copy(self) -> HashedCopy:
        if self._hashed_copy is None:
            self._hashed_copy = HashedCopy(self.layout, self.sources)
        return self._hashed_copy

    def divided_like(self, leaves: Sequence[Leaf]) -> bool:
        now = _divisions(leaves)
        return all(map(operator.is_, now, self.divisions)) or now == self.divisions


def _divisions(leaves: Sequence[Leaf]) -> list[Any]:
    """How each leaf is divided over ranks: a distributed tensor's mesh, placements and global shape."""
    return [leaf.whole._spec if leaf.whole is not None else None for leaf in leaves]
