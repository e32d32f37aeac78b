"""What a node knows of the run from its workers and from views, and whether it needs another round.

In: views, what workers say of their steps and troubles. Out: the newest step, which version each round resumed, this
node's ballot, events. The same for p2prun's agent and for torchrun's.

Invariants: everything here runs on the node's thread; a wish for another round lasts until one begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from p2pstate.agent.events import EventLog
from p2pstate.agent.held import Phase, RankProcess
from p2pstate.agent.rounds import Progress, ends_of, progress_of
from p2pstate.agent.sentences import Sentences
from p2pstate.types import OLDEST, LoopEnds, Start
from rendezvous.node import Node
from rendezvous.types import View

__all__ = ["RoundState", "tell_view"]

ERROR_GRACE_S = 1.0  # an error that a death may explain: give the detector of deaths the first word


def tell_view(events: EventLog, view: View, start: str, *, aloud: bool = True) -> None:
    """The event that says who is in. ``aloud``: nobody else says so on the console."""
    places, spares = [member.name for member in view.places], [member.name for member in view.spares]
    fields = {"epoch": view.epoch, "round": view.round, "nonce": view.nonce, "reason": view.reason}
    beside = f", spare {', '.join(spares)}" if spares else ""
    sentence = f"view {view.epoch}: training on {', '.join(places)}{beside} ({view.reason})"
    events.emit("view", sentence if aloud else "", **fields, places=places, spares=spares, start=start)


class RoundState:
    def __init__(
        self,
        node: Node,
        events: EventLog,
        *,
        want_round: Callable[[str], None],
        state_lost: Callable[[str], None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """``want_round``: do what a trouble that only another round ends calls for; ``state_lost``: no copy is left;
        ``is_over``: the newest round was given up, and errors in it are old news."""
        self._node, self._events = node, events
        self._want_round, self._lost, self._is_over = want_round, state_lost, is_over
        self._sentences = Sentences()
        self.view: View | None = None
        self.known = Progress(0, -1)  # by what any member has told
        self.ends = LoopEnds()  # by what this node's workers and views have told
        self.lineage: dict[int, list[int]] = {}  # round -> the version it resumed
        self.wants_round = ""  # why this node needs a new round; empty: it does not
        self.start_over = ""  # types.Start that a worker's plan asks for
        self.handlers: dict[str, Callable[..., None]] = {
            "in_loop": self.in_loop,
            "resumed": self.resumed,
            "loop_done": self.loop_done,
            "error": self._error,
            "start_over": self._start_over,
            "state_lost": self._state_lost,
            "step": self.step,
            "event": self._event,
        }

    def ballot(self) -> dict[str, Any]:
        """See rounds.decide_start."""
        said = {"wants_round": self.wants_round, "start_over": self.start_over, "ends": self.ends.pack()}
        return {**said, **self.known.table()}

    def on_view(self, view: View) -> bool:
        """Returns whether a new round begins with it."""
        before, self.view = self.view, view
        self.known = max(self.known, progress_of(view))
        self.ends = max(self.ends, ends_of(view.data))
        if before is not None and before.round == view.round:
            if self.wants_round:
                self._node.propose(self.wants_round)  # decided from ballots that did not know yet
            return False
        self.wants_round = self.start_over = ""
        if view.data.get("start") == Start.FRESH:
            self.lineage[view.round] = list(OLDEST)  # what there was before counts no more
        return True

    def is_current(self, round_: int) -> bool:
        return self.view is not None and self.view.round == round_

    # -- what workers say (see worker/link.py and steps.py)

    def in_loop(self, worker: RankProcess) -> None:
        if worker.phase not in (Phase.ALONE, Phase.REHEARSING):  # they are once they have joined
            worker.phase = Phase.LOOP

    def resumed(self, worker: RankProcess, epoch: int, version: list[int], ends: list[Any]) -> None:
        worker.phase = Phase.LOOP
        self.lineage[epoch] = version
        self.ends = max(self.ends, LoopEnds.unpack(ends))

    def loop_done(self, worker: RankProcess, ends: list[Any]) -> None:
        """All ranks have agreed that a training loop is over."""
        worker.phase = Phase.DONE
        self.ends = max(self.ends, LoopEnds.unpack(ends))

    def step(self, worker: RankProcess, step: int, protected: int | None, **fields: Any) -> None:
        self.known = self.known.at(step)
        worker.step, worker.protected, worker.told_at = step, protected, time.monotonic()
        self._events.emit("step", rank=worker.rank, step=step, protected=protected, **fields)

    def _error(self, worker: RankProcess, epoch: int, text: str, certain: bool = False) -> None:
        """A worker cannot go on in its round although nobody is known to be dead. ``certain``: nobody needs to be."""
        reason = f"rank {worker.rank}: {text}"

        def is_unexplained() -> bool:
            return self.is_current(epoch) and not self._is_over() and self._node.verdict is None

        def look_again() -> None:
            if is_unexplained():
                self._want_round(reason)

        if certain:
            look_again()
        elif is_unexplained():
            self._node.call_later(ERROR_GRACE_S, look_again)

    def _start_over(self, worker: RankProcess, epoch: int, start: str, reason: str, ends: list[Any]) -> None:
        if self.is_current(epoch):
            self.ends = max(self.ends, LoopEnds.unpack(ends))
            self.start_over = start if start in (Start.FRESH, Start.RESTART) else Start.FRESH
            self._want_round(reason)

    def _state_lost(self, worker: RankProcess, epoch: int, reason: str) -> None:
        if self.is_current(epoch):
            self._lost(f"the training state is lost: {reason}")

    def _event(self, worker: RankProcess, kind: str, **fields: Any) -> None:
        if worker.rank is None:
            return  # a rehearsal is no part of the run
        sentence = self._sentences.of(kind, worker.rank, fields)
        if sentence is not None:
            self._events.emit(kind, sentence, rank=worker.rank, **fields)
