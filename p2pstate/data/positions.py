"""Which batch comes next in a map-style data set, for any sampler, as positions that can be gone back to.

In: p2pstate's ``Sampler``; for any other iterable of indices see ``replayed.py``. Out: the task at a position and the
position behind it; positions as plain values.

Invariant: a position is taken up at once and nothing is drawn.
"""

from __future__ import annotations

from typing import Any, Protocol

from p2pstate.data.fetching import Read
from p2pstate.data.sampler import Sampler

__all__ = ["Position", "Sampled", "Source"]

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

    def draws_as(self, state: dict[str, Any]) -> bool:
        """Whether the epoch of a saved position has the order that is drawn here."""

    def take_up(self, position: Position, state: dict[str, Any]) -> None:
        """The next task is the one at ``position``, which was saved as ``state``."""


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

    def draws_as(self, state: dict[str, Any]) -> bool:
        return True

    def take_up(self, position: Position, state: dict[str, Any]) -> None:
        """Any position is taken up when its task is asked for."""
