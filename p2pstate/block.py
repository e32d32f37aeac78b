"""One block of the training loop: what ``with state.step() as step`` binds.

In: where the user wrote it. Out: what became of it, for the code after it. The owner (see blocks.py) does all the work.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from torch.optim import Optimizer

from p2pstate.groups.gate import Ballot

__all__ = ["StepBlock"]


class _Owner(Protocol):
    def enter(self, block: StepBlock) -> None: ...
    def leave(self, block: StepBlock, error: BaseException | None) -> bool: ...


class StepBlock:
    """``number`` counts from 1, ``step`` through all training loops of the script; ``where`` names the user's line."""

    def __init__(self, owner: _Owner, number: int, where: str, num_before: int = 0) -> None:
        self._owner = owner
        self.where = where
        self.number = number
        self.step = num_before + number
        self.committed = False
        self.again = False  # committed before in this process, and done again after a fault
        self.boundary = False  # an optimizer was stepped, or a loss scaler declined to
        self.stepped: set[Optimizer] = set()  # those that were, or would have been
        self.voted: Ballot | None = None  # the outcome of the newest vote in this block
        self.finite = True  # this rank's gradients are numbers, as far as it looks
        self.num_gates = 0  # how often an optimizer, or a loss scaler for one, came to a vote
        self.runs_to_its_end = False  # its user cannot be left in the middle, also when the step is discarded
        self.num_collectives_before = 0  # of all groups, when the first of these votes had passed

    def __enter__(self) -> StepBlock:
        self._owner.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        return self._owner.leave(self, error)
