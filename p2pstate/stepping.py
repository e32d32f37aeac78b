"""When optimizers step: the votes of one rank, cast before anything is changed.

In: the calls of ``optimizer.step()`` and of loss scalers inside a block, the process's error flag. Out: ballots whose
outcome all ranks share, or ``StepDiscarded``.

Invariants: no optimizer changes anything before the vote has passed; outside a block optimizers are left alone, and
before this process has joined the run (a rehearsal) they step without a vote.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from p2pstate.block import StepBlock
from p2pstate.errors import P2PStateError, StepDiscarded
from p2pstate.groups.gate import Ballot, vote
from p2pstate.groups.registry import REGISTRY
from p2pstate.groups.status import STATUS
from p2pstate.protection import Protection

__all__ = ["Stepping"]


class Stepping:
    """Watches the optimizers and loss scalers of one Replicator. ``step_s``: how long a step takes, as seen so far."""

    def __init__(self, optimizers: Iterable[Optimizer], protection: Protection) -> None:
        self.optimizers = list(optimizers)
        self.scalers: list[Any] = []
        self.step_s = 0.0
        self._protection = protection
        self._block: StepBlock | None = None
        self._rehearsing = False
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self._before_optimizer)

    def begin(self, block: StepBlock, *, rehearsing: bool) -> None:
        self._block, self._rehearsing = block, rehearsing

    def end(self) -> None:
        self._block = None

    def watch_scaler(self, scaler: Any) -> None:
        """A loss scaler that declines to step an optimizer ends a step all the same."""
        stock = scaler.step

        def step(*args: Any, **kwargs: Any) -> Any:
            if self._block is not None:
                self._block.boundary = True
            return stock(*args, **kwargs)

        scaler.step = step
        self.scalers.append(scaler)

    def _before_optimizer(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pre-hook of every optimizer: nothing outside a block, once inside, after the closure where there is one."""
        block = self._block
        if block is None or block.voted is not None:
            return None
        if self._rehearsing:
            block.boundary = True
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._gate(block)
            return None

        def closure_then_gate() -> Any:
            loss = closure()
            if block.voted is None:
                self._gate(block)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_gate}
        return (args[0], closure_then_gate, *args[2:]), kwargs

    def _gate(self, block: StepBlock) -> None:
        if not self.vote(block, boundary=True):
            raise StepDiscarded
        if block.voted is not None and not block.voted.boundary:
            STATUS.fail(
                P2PStateError(
                    "some ranks ended their block without optimizer.step() while others stepped: every rank has to "
                    "step the same number of times"
                )
            )
            raise StepDiscarded

    def vote(self, block: StepBlock, *, boundary: bool) -> bool:
        """Cast this rank's vote. False: the step must be discarded here."""
        if STATUS.error is not None:
            return False
        self._protection.wait_a_little(self.step_s)
        block.voted = self.ballot(block.number, boundary)
        return block.voted is not None

    def ballot(self, step: int, boundary: bool, timeout_s: float | None = None) -> Ballot | None:
        """None: this rank has seen an error, the ranks do not agree on what they vote about, or time is up."""
        ballot = Ballot(int(boundary), step, -step, *self._protection.complete())
        result = vote(REGISTRY, STATUS, ballot, timeout_s)
        if result is not None and result.step != -result.neg_step:
            STATUS.fail(P2PStateError("ranks do not agree on the step: some have left the loop, others go on"))
            return None
        return result
