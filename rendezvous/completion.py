"""When a run has finished: the workers of every place of the round have ended well.

Flows in: that this node's have, what other nodes say of theirs. Flows out: what this node says, one call at the end.
Invariants: a node goes on telling until there is a verdict or another round, so no single message has to arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rendezvous.node import Node

KIND = "done"  # of the message
_INTERVAL_S = 1.0


class Completion:
    """Used on the node's thread. `is_done`: whether this node's workers have all ended well in this round."""

    def __init__(self, node: Node, is_done: Callable[[int], bool], on_finished: Callable[[], None]) -> None:
        self._node = node
        self._is_done = is_done
        self._on_finished = on_finished
        self._places: dict[int, set[int]] = {}  # by round

    def tell(self) -> None:
        """Tell everybody, now and again, if this node's workers are done."""
        view = self._node.view
        place = view.place_of(self._node.key) if view is not None else None
        if view is None or place is None or self._node.verdict is not None or not self._is_done(view.round):
            return
        self._node.broadcast(KIND, [view.round, place])
        self._place_done(view.round, place)
        self._node.call_later(_INTERVAL_S, self.tell)

    def heard(self, body: Any) -> None:
        """Another node's message; nonsense changes nothing."""
        if isinstance(body, list) and len(body) == 2 and all(isinstance(number, int) for number in body):
            self._place_done(*body)

    def _place_done(self, round_: int, place: int) -> None:
        done = self._places.setdefault(round_, set())
        done.add(place)
        view = self._node.view
        current = view is not None and view.round == round_ and self._node.verdict is None
        if current and view is not None and done >= set(range(len(view.places))):
            self._on_finished()
