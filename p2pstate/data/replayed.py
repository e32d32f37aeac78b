"""Positions in any sampler: an iterable of indices, or of batches of them, that knows nothing of positions.

In: the sampler. Out: as of ``positions.py``. A sampler with ``state_dict`` and ``load_state_dict`` (or whose iterator
has them, as torchdata's) is put where it was. Of another one the epoch is iterated again from its beginning, with the
random streams that it began with.

Invariants: the first indices of an epoch are drawn from the process's streams, as torch's samplers draw; the rest of
the epoch goes on from there in streams of its own, so that neither what the trainer draws nor how far ahead batches are
asked for changes an order; going back draws nothing from the process's streams.
Known limits: a sampler without a state must give the same indices again for the same streams, generators and
``epoch``, and going back costs the time of drawing them; what a sampler learns from training counts for batches that
were not asked for ahead.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.data

from p2pstate.data.fetching import Read
from p2pstate.data.positions import Position
from p2pstate.data.streams import current, kept, restore, same

__all__ = ["Replayed"]

_BEFORE_THE_FIRST = (  # types that draw all they need before they give the first index
    torch.utils.data.BatchSampler,
    torch.utils.data.DistributedSampler,
    torch.utils.data.RandomSampler,
    torch.utils.data.SequentialSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
    list,
    tuple,
    range,
)
MAX_PLACES = 512


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a sampler stood: its state, and the streams it goes on in (None: the process's)."""

    state: Any
    streams: dict[str, Any] | None


class Replayed:
    """``sets_epochs``: of samplers that have ``set_epoch``, because nobody else can between the epochs of one
    iteration."""

    endless = False

    def __init__(self, sampler: Iterable[Any], *, sets_epochs: bool = False) -> None:
        self._sampler, self._sets_epochs = sampler, sets_epochs
        self._inner = [each for each in (sampler, getattr(sampler, "sampler", None)) if each is not None]
        self._draws_late = not all(type(each) in _BEFORE_THE_FIRST for each in self._inner)
        self._iterator: Iterator[Any] | None = None
        self._drawn: Position = (0, 0)  # behind what the iterator has given
        self._end: Position | None = None  # of the epoch that was drawn to its end
        self._ahead: list[Any] = []  # what it has given for this position already
        self._streams: dict[str, Any] | None = None  # that it goes on in; None: the process's
        self._begins: tuple[int, dict[str, Any]] | None = None  # an epoch, and the streams it began with
        self._is_given = False  # they came with a position: its epoch begins with them, not with those of now
        inner: list[Any] = self._inner
        self._owner = next((each for each in inner if _has_state(each)), None)
        self._places: dict[Position, _Place] = {}  # of a sampler with a state: where it was, the newest positions
        self._stands: Position = (0, 0)  # what its state is that of
        self._initial: Any = copy.deepcopy(self._owner.state_dict()) if self._owner is not None else None
        self._is_carried = False  # its state came with a position between two epochs

    def task(self, position: Position) -> tuple[Read, Position] | None:
        epoch, number = position
        if position == self._end:
            return None
        if self._iterator is None or position != self._drawn:
            self._go_to(position)
        try:
            indices = self._draw()
            if indices is None and number == 0 and self._is_carried and self._owner is not None:
                self._owner.load_state_dict(self._initial)  # to this one, the state of an epoch's end is: nothing left
                self._iterator = iter(self._sampler)
                indices = self._draw()
        except BaseException:
            self._iterator = None  # it is over; the next attempt must not take that for the epoch's end
            raise
        self._is_carried = False
        if indices is None:
            self._iterator, self._end = None, position
            self._remember((epoch + 1, 0))
            return None
        self._drawn = (epoch, number + 1)
        self._remember(self._drawn)
        drawn = np.atleast_1d(np.asarray(indices))
        if drawn.size and drawn.dtype.kind not in "iu":
            self._iterator = None
            raise ValueError(
                f"the sampler gave {indices!r:.100}: a Loader takes integers; let the data set look up other keys"
            )
        drawn = drawn.astype(np.int64)
        return Read(epoch, drawn, np.full(len(drawn), epoch, dtype=np.int64)), self._drawn

    def delivered(self, position: Position) -> None:
        """Such a sampler is not told."""

    def asked_for(self, position: Position) -> Position:
        return position

    def state(self, position: Position) -> dict[str, Any]:
        epoch, number = position
        ended = position == self._end
        streams = self._begins[1] if self._begins is not None and self._begins[0] == epoch else None
        # An epoch that is not begun will draw from the generators as they are now.
        generators = [each.get_state() for each in self._generators()] if streams is None or ended else None
        found = {"epoch": epoch, "batches": number, "streams": streams, "generators": generators, "ended": ended}
        place = self._places.get((epoch + 1, 0) if ended else position)
        if place is not None:
            found["sampler"] = {"state": place.state, "streams": place.streams}
        return found

    def position_of(self, state: dict[str, Any]) -> Position:
        if "batches" not in state:
            raise ValueError(
                f"the saved position counts samples of {state.get('order')}; this loader has a "
                f"{type(self._sampler).__name__}, which cannot begin there: use p2pstate.data.Sampler"
            )
        return state["epoch"], state["batches"]

    def draws_as(self, state: dict[str, Any]) -> bool:
        """Not at an epoch's beginning: the process's streams are set back, too, and the order is drawn once more."""
        return (
            state["batches"] > 0
            and self._begins is not None
            and self._begins[0] == state["epoch"]
            and same(self._begins[1], state["streams"])
        )

    def take_up(self, position: Position, state: dict[str, Any]) -> None:
        self._iterator = None
        if state.get("ended"):
            self._end = position
        self._is_given = state["streams"] is not None
        self._begins = (state["epoch"], state["streams"]) if self._is_given else None
        for generator, saved in zip(self._generators(), state.get("generators") or (), strict=False):
            generator.set_state(saved)
        place = state.get("sampler")
        if place is not None:
            stands = (position[0] + 1, 0) if position == self._end else position
            self._places[stands] = _Place(place["state"], place["streams"])
            if stands[1] == 0 and self._owner is not None:  # now: whoever calls set_epoch does it before iterating
                self._load(stands)
                self._is_carried = True

    # -- inside

    def _go_to(self, position: Position) -> None:
        epoch, number = position
        is_given, self._is_given = self._is_given, False
        self._ahead.clear()
        self._drawn, self._end = position, None
        if number > 0 and position in self._places:
            with kept():
                self._put(position)
            return
        if self._owner is not None and self._stands != (epoch, 0) and (epoch, 0) in self._places:
            self._load((epoch, 0))
        if self._begins is not None and self._begins[0] == epoch and (number > 0 or is_given):
            with kept():
                self._replay(self._begins[1], number)
            return
        if number > 0:
            raise ValueError(f"epoch {epoch} was not begun here: its order is not known, and batch {number} neither")
        for each in self._inner if self._sets_epochs else ():
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        self._begins = (epoch, {**current(), **self._generators_and_epochs()})
        self._streams = None
        self._remember(position)
        self._iterator = iter(self._sampler)

    def _replay(self, begins: dict[str, Any], number: int) -> None:
        restore(begins)
        for generator, state in zip(self._generators(), begins["generators"], strict=True):
            generator.set_state(state)
        for each, epoch in zip(self._inner, begins["epochs"], strict=True):
            if epoch is not None and hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        self._iterator = iter(self._sampler)
        given = list(itertools.islice(self._iterator, max(1, number)))[-1:]  # it draws only when it gives something
        self._streams = current() if self._draws_late else None
        if number == 0:
            self._ahead = given

    def _draw(self) -> Any:
        """What the iterator gives next, or None."""
        assert self._iterator is not None
        if self._ahead:
            return self._ahead.pop()
        if self._streams is None:
            indices = next(self._iterator, None)
            self._streams = current() if self._draws_late else None
            return indices
        with kept():
            restore(self._streams)
            indices = next(self._iterator, None)
            self._streams = current()
        return indices

    def _generators_and_epochs(self) -> dict[str, Any]:
        """What else the usual samplers make their order of."""
        return {
            "generators": [each.get_state() for each in self._generators()],
            "epochs": [getattr(each, "epoch", None) for each in self._inner],
        }

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(each, "generator", None) for each in self._inner]
        return [each for each in found if isinstance(each, torch.Generator)]

    # -- samplers with a state

    def _remember(self, position: Position) -> None:
        """Where the sampler is now, if it can say so; its iterator's state belongs to one epoch."""
        self._stands = position
        thing: Any = self._owner or (self._iterator if position[1] > 0 and _has_state(self._iterator) else None)
        if thing is None:
            return
        self._places.pop(position, None)
        self._places[position] = _Place(copy.deepcopy(thing.state_dict()), self._streams)
        if len(self._places) > MAX_PLACES:
            del self._places[next(at for at in self._places if at != (position[0], 0))]

    def _load(self, position: Position) -> None:
        assert self._owner is not None
        self._owner.load_state_dict(copy.deepcopy(self._places[position].state))
        self._stands = position

    def _put(self, position: Position) -> None:
        if self._owner is not None:
            self._load(position)
        iterator: Any = iter(self._sampler)
        if self._owner is None:
            iterator.load_state_dict(copy.deepcopy(self._places[position].state))
        self._iterator, self._streams = iterator, self._places[position].streams


def _has_state(thing: Any) -> bool:
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))
