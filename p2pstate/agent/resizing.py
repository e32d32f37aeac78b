"""On fewer nodes, and on as many as before once there are: the whole version goes to disk, and all start again from it.

In: views, what ``--nnodes MIN:MAX`` allows, a checkpoint directory. Out: how many places the next view may have, and
the wish for it. Without a directory, or when the version could not be written, the number of nodes stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from p2pstate.agent.draining import Draining
from p2pstate.types import RoundInfo
from rendezvous.config import Config
from rendezvous.node import Node
from rendezvous.types import View

__all__ = ["Resizing"]

GROW_AFTER_S = 5.0  # a node that has come back is there to stay


class Resizing:
    """Everything on the node's thread. ``want_round(reason)``: all workers are to start again, on other places."""

    def __init__(self, node: Node, config: Config, draining: Draining, want_round: Callable[[str], None]) -> None:
        self._node, self._config, self._draining, self._want_round = node, config, draining, want_round
        self._num_begun = 0  # training nodes of the largest view
        self._wanted: tuple[int, int] | None = None
        self._view: View | None = None

    def ballot(self) -> dict[str, Any]:
        return {"places": list(self._wanted)} if self._wanted is not None else {}

    def on_view(self, view: View, info: RoundInfo, is_training: Callable[[], bool], *, new_round: bool) -> None:
        """A view begins. The first place looks whether it could be larger."""
        self._view = view
        if new_round:
            self._wanted = None
        self._num_begun = max(self._num_begun, len(view.places))
        room = self._num_begun - len(view.places)
        if room > 0 and view.spares and view.place_of(self._node.key) == 0:
            self._node.call_later(GROW_AFTER_S, lambda: self._grow(view, info, is_training))

    def shrink(self, info: RoundInfo, reason: str, otherwise: Callable[[], None]) -> None:
        """No node came in the place of one that is gone. ``otherwise`` is called if fewer are no way out."""
        view = self._view
        if view is None or len(view.places) <= self._config.num_nodes_min:
            otherwise()
            return
        wanted = self._config.num_nodes_min, len(view.places)
        self._resize(info, wanted, f"{reason}; training goes on with fewer nodes", otherwise, training=False)

    def _grow(self, view: View, info: RoundInfo, is_training: Callable[[], bool]) -> None:
        if self._view is view and not self._draining.active and is_training():
            wanted = len(view.places), min(self._num_begun, len(view.places) + len(view.spares))
            self._resize(info, wanted, "training goes on with more nodes", lambda: None, training=True)

    def _resize(
        self,
        info: RoundInfo,
        wanted: tuple[int, int],
        reason: str,
        otherwise: Callable[[], None],
        *,
        training: bool,
    ) -> None:
        def drained() -> None:
            if not self._draining.on_disk:
                otherwise()
                return
            self._wanted = wanted
            self._want_round(reason)

        self._draining.start(info, reason, drained, training=training)
