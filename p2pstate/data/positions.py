"""Which batch comes next in a map-style data set, for any sampler, as positions that can be gone back to.

In: p2pstate's ``Sampler``, or any other iterable of indices. Out: the task at a position and the position behind it;
positions as plain values.

Invariants: with ``Sampler`` a position is taken up at once and nothing is drawn; with another sampler its epoch is
iterated again from the beginning, with the random streams it began with, and the process's streams stay as they are.
Known limit: another sampler must give the same indices again for the same streams, generators and ``epoch``; going back
costs the time of drawing its indices again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from p2pstate.data.fetching import Read
from p2pstate.data.sampler import Sampler
from p2pstate.data.streams import kept

__all__ = ["Position", "Replayed", "Sampled", "Source"]

Position = tuple[int, int]  # epoch, and how far in it
DRAWN_AT_ONCE = 32


class Source(Protocol):
    """What an engine draws from. ``endless``: epochs can be drawn before they are asked for."""

    endless: bool

    def task(self, position: Position) -> tuple[Read, Position] | None:
        """The batch there and the position behind it; None at the epoch's end."""

    def delivered(self, position: Position) -> None:
        """The trainer has everything before ``position``."""

    def asked_for(self, position: Position) -> Position:
        """Where the next iteration begins if the last one came to ``position``: somebody may have set an epoch."""

    def state(self, position: Position) -> dict[str, Any]: ...

    def position_of(self, state: dict[str, Any]) -> Position: ...


class Sampled:
    """Of a ``Sampler``, whose own position follows what was delivered."""

    endless = True

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._drawn: dict[Position, tuple[Read, Position]] = {}  # several batches at once cost little more than one

    def task(self, position: Position) -> tuple[Read, Position] | None:
        if position not in self._drawn:
            epoch, at = position
            self._drawn.clear()
            for indices, passes, after in self._sampler.batches(epoch, at, DRAWN_AT_ONCE):
                self._drawn[epoch, at] = Read(epoch, indices, passes), (epoch, after)
                at = after
        return self._drawn.get(position)

    def delivered(self, position: Position) -> None:
        self._sampler.epoch, self._sampler.num_done = position

    def asked_for(self, position: Position) -> Position:
        return self._sampler.epoch, self._sampler.num_done

    def state(self, position: Position) -> dict[str, Any]:
        return {"order": self._sampler.order.identity, "epoch": position[0], "samples": position[1]}

    def position_of(self, state: dict[str, Any]) -> Position:
        if "order" not in state:
            raise ValueError(
                "the saved position was counted with another kind of sampler than p2pstate.data.Sampler, which this "
                "loader has now: load it into a loader with the sampler it was saved with"
            )
        self._sampler.check(state)
        return state["epoch"], state["samples"]


class Replayed:
    """Of any other sampler: an iterable of batches of indices, or of single indices."""

    endless = False

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._inner = [each for each in (sampler, getattr(sampler, "sampler", None)) if each is not None]
        self._iterator: Iterator[Any] | None = None
        self._drawn: Position = (0, 0)
        self._begins: tuple[int, dict[str, Any]] | None = None  # an epoch, and the streams it began with
        self._is_given = False  # they came with a position: its epoch begins with them, not with those of now

    def task(self, position: Position) -> tuple[Read, Position] | None:
        epoch, number = position
        if self._iterator is None or position != self._drawn:
            self._go_to(position)
        assert self._iterator is not None
        try:
            indices = next(self._iterator, None)
        except BaseException:
            self._iterator = None  # it is over; the next attempt must not take that for the epoch's end
            raise
        if indices is None:
            self._iterator = None
            return None
        self._drawn = (epoch, number + 1)
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
        streams = self._begins[1] if self._begins is not None and self._begins[0] == epoch else None
        # An epoch that is not begun will draw from the generators as they are now.
        generators = [each.get_state() for each in self._generators()] if streams is None else None
        return {"epoch": epoch, "batches": number, "streams": streams, "generators": generators}

    def position_of(self, state: dict[str, Any]) -> Position:
        if "batches" not in state:
            raise ValueError(
                f"the saved position counts samples of {state.get('order')}; this loader has a "
                f"{type(self._sampler).__name__}, which cannot begin there: use p2pstate.data.Sampler"
            )
        self._iterator = None
        self._is_given = state["streams"] is not None
        self._begins = (state["epoch"], state["streams"]) if self._is_given else None
        for generator, saved in zip(self._generators(), state.get("generators") or (), strict=False):
            generator.set_state(saved)
        return state["epoch"], state["batches"]

    def _go_to(self, position: Position) -> None:
        epoch, number = position
        is_given, self._is_given = self._is_given, False
        if self._begins is not None and self._begins[0] == epoch and (number > 0 or is_given):
            with kept():
                self._set(self._begins[1])
                self._iterator = iter(self._sampler)
                for _ in range(number):
                    next(self._iterator, None)
            return
        if number > 0:
            raise ValueError(f"epoch {epoch} was not begun here: its order is not known, and batch {number} neither")
        self._begins = (epoch, self._streams())
        self._iterator = iter(self._sampler)

    def _streams(self) -> dict[str, Any]:
        """Everything that the usual samplers draw their order from."""
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "generators": [each.get_state() for each in self._generators()],
            "epochs": [getattr(each, "epoch", None) for each in self._inner],
        }

    def _set(self, streams: dict[str, Any]) -> None:
        random.setstate(streams["python"])
        np.random.set_state(streams["numpy"])
        torch.set_rng_state(streams["torch"])
        for generator, state in zip(self._generators(), streams["generators"], strict=True):
            generator.set_state(state)
        for each, epoch in zip(self._inner, streams["epochs"], strict=True):
            if epoch is not None and hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(each, "generator", None) for each in self._inner]
        return [each for each in found if isinstance(each, torch.Generator)]
