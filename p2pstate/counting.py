"""One Replicator after another in the same script: what the second one has to be given, and how its steps are counted.

In: the training loops and Replicators of this process. Out: how many steps were committed before this Replicator's
first one (the user counts from 1; versions, checkpoints and events count through, so that a later state has the larger
number), ConfigError for what could not be resumed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

from torch import nn

from p2pstate.errors import ConfigError
from p2pstate.worker.context import WorkerContext

__all__ = ["Counting", "check_successor"]


class Counting:
    """``before``: what is to be added to the user's number of a step."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._begun = False
        self.before = 0

    def begin(self, owner: object) -> bool:
        """``owner`` begins a training loop. True: it is the first of its own, and another one has trained before."""
        context = self._context
        if context.trains is owner:
            return False
        if self._begun:
            raise ConfigError(
                "a Replicator goes on after another one has trained: its steps could not be resumed. Give all models, "
                "optimizers and loaders to one Replicator, and use that one in every loop"
            )
        self._begun, context.trains = True, owner
        self.before = max(0, context.ends.end_of(context.loop - 1))
        return context.loop > 1


def check_successor(context: WorkerContext, models: Iterable[nn.Module], checkpoint: str | None) -> None:
    """A Replicator for ``models`` is made. Raises ConfigError when it could not be resumed beside those before it."""
    models = list(models)
    known = {id(parameter) for model in models for parameter in model.parameters()}
    gc.collect()  # what only a cycle keeps alive is used by nobody
    for before in context.models:
        model = before()
        if model is not None and any(id(parameter) not in known for parameter in model.parameters()):
            raise ConfigError(
                f"this Replicator is not given the {type(model).__name__} of the one before: a process that takes a "
                "rank over passes by the loops that are over, and would have that model untrained. Give it to this "
                "one as well, or delete it and its Replicator before"
            )
    if context.models and context.checkpoint != checkpoint:
        raise ConfigError(
            f"this Replicator is given checkpoint={checkpoint!r}, and the one before {context.checkpoint!r}: a run "
            "resumes from one directory. Give both the same (steps are counted through there)"
        )
    context.checkpoint = checkpoint
    context.models += [weakref.ref(model) for model in models]
