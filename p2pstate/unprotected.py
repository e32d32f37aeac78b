"""Optimizers that step although nothing keeps what they change.

In: every ``optimizer.step()`` of the process, until the answer is known. Out: one RuntimeWarning on rank 0, when so
many steps were made and no loop of a Replicator has begun: it was forgotten, or its loop is not the one that trains.
A restartable function has checkpoints of its own, and is left alone.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from p2pstate.groups.status import STATUS
from p2pstate.worker.context import WorkerContext

__all__ = ["warn_of_unprotected_steps"]

MIN_STEPS = 10  # fewer may prepare an optimizer before its loop begins


def warn_of_unprotected_steps(context: WorkerContext) -> None:
    num_steps = 0

    def stepped(*_: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        unprotected = STATUS.loud and not context.rerunning
        if unprotected and num_steps < MIN_STEPS:
            return
        handle.remove()
        if unprotected and context.rank == 0:
            warnings.warn(
                f"{num_steps} optimizer steps were made outside of a Replicator's loop: nothing of them is protected, "
                "and a fault begins the script anew. Make a p2pstate.Replicator(model, optimizer, ...), and train in "
                "`for step, loss in state.run(train_step):` or in `with state.step():`",
                RuntimeWarning,
                stacklevel=4,
            )

    handle = register_optimizer_step_post_hook(stepped)
