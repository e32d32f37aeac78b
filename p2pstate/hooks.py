"""What runs between steps on all ranks together: evaluation, reductions for logging, saves of the user's own.

In: functions with how often they are due. Out: each has run on every rank after each step at which it is due; after a
fault on all of them again, newcomers included, if the step that is resumed is such a step.

Invariants: a function never sees an outcome that a fault has spoilt: a collective whose peer is lost raises in it, and
it begins anew after the recovery; what it does to the state (random numbers it draws) is part of the next version, not
of the one before it. Known limit: it may run more than once for a step, so effects on the outside may come twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from p2pstate.groups.status import STATUS, PeerLost
from p2pstate.observe.meter import METER
from p2pstate.trace import Doing
from p2pstate.user_errors import clear_wrappers
from p2pstate.worker.context import WorkerContext

__all__ = ["Hooks"]


class Hooks:
    """Used from the training thread only; the same on all ranks."""

    def __init__(self, context: WorkerContext, models: Iterable[nn.Module]) -> None:
        self._context = context
        self._models = list(models)
        self._hooks: list[tuple[int, Callable[[int], Any]]] = []
        self._ran_at = 0  # for which step

    def add(self, every: int, function: Callable[[int], Any]) -> None:
        if every < 1:
            raise ValueError(f"every({every}, ...): give 1 or more steps")
        if not callable(function):
            raise ValueError(f"every({every}, {function!r}): give a function of the step")
        self._hooks.append((every, function))

    def forget(self) -> None:
        """A version was resumed: what was due after its step has not happened."""
        self._ran_at = 0

    def due(self, step: int) -> list[Callable[[int], Any]]:
        if step == self._ran_at:
            return []
        return [function for every, function in self._hooks if step % every == 0]

    def run(self, step: int) -> None:
        """Run what is due, unless it has run. Raises what the functions raise, but for the loss of a peer."""
        functions = self.due(step)
        self._ran_at = step
        STATUS.trace.do(Doing.BETWEEN)
        STATUS.loud = True
        try:
            for function in functions:
                with METER.inside(f"phase.{getattr(function, '__name__', 'every')}"):
                    function(step)
        except PeerLost as error:
            if not clear_wrappers(self._models, error):
                self._context.leave("a peer was lost while its wrappers were between two states")
        finally:
            STATUS.loud = False
