"""When optimizers step: the votes of one rank, cast before anything is changed and at the block's end.

In: the calls of ``optimizer.step()`` and of loss scalers inside a block, the process's error flag. Out: ballots whose
outcome all ranks share, or ``StepDiscarded``.

Invariants: no optimizer changes anything before a vote has passed that was cast after its gradients were there: one
vote per ``step()``, per evaluation of a closure, and per step that a loss scaler skips, so that ranks which skip
different steps still meet. Where anything may follow (a collective, another ``step()``) a vote at the block's end
decides for all ranks; a block that was always quiet after its ``step()`` is trusted to stay so, and if it does not,
every rank still acts on the errors that it sees itself. Outside a block optimizers are left alone, and before this
process has joined the run (a rehearsal) they step without a vote.

An optimizer that steps in backward does so without a vote, for an exception there breaks the wrappers: once an error is
known it finds no gradients, and the vote at the block's end discards what was changed before.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from p2pstate.block import StepBlock
from p2pstate.errors import GradientsLost, NotFinite, P2PStateError, StepDiscarded, StepSkipped
from p2pstate.finite import all_finite
from p2pstate.groups.gate import NO_RANK, Ballot, vote
from p2pstate.groups.registry import REGISTRY
from p2pstate.groups.status import STATUS
from p2pstate.groups.uncompiled import uncompiled
from p2pstate.interrupting import NOT_IN_BACKWARD
from p2pstate.protection import Protection
from p2pstate.state import CarriedGradients

__all__ = ["Stepping"]

NUM_QUIET_BLOCKS = 100  # after so many in a row nothing is expected to follow the first optimizer.step()
NUM_OPEN_BLOCKS = 1000  # nobody accumulates gradients over so many
NUM_OPEN_WINDOWS = 10  # nor over so many times as many as before


class Stepping:
    """Watches the optimizers and loss scalers of one Replicator. ``step_s``: how long a step takes, as seen so far."""

    def __init__(
        self,
        carried: Mapping[Optimizer, CarriedGradients],
        protection: Protection,
        vote_timeout_s: float,
        on_nan: str,
    ) -> None:
        """``carried``: of all optimizers; ``vote_timeout_s``: how long a rank waits in a step for the others' votes;
        ``on_nan``: see Replicator."""
        self.optimizers = list(carried)
        self._carried = carried
        self._told = False  # that gradients are carried from step to step
        self.scalers: list[Any] = []
        self.step_s = 0.0
        self._protection = protection
        self._vote_timeout_s = vote_timeout_s
        self._on_nan = on_nan
        self.spoilt_step = 0  # the run goes back behind this step; 0: behind none
        self._block: StepBlock | None = None
        self._rehearsing = False
        self._num_quiet_blocks = 0
        self.num_open_blocks = 0  # in a row, without an optimizer's step
        self._longest_window: int | None = None  # of such blocks before a step; None before the first one
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self._before_optimizer)
            carried[optimizer].watch()

    def begin(self, block: StepBlock, *, rehearsing: bool) -> None:
        self._block, self._rehearsing = block, rehearsing
        if not rehearsing:
            for each in self._carried.values():
                each.begin()

    def end(self) -> None:
        self._block = None

    def forget_gradients(self) -> None:
        """There are none any more."""
        for each in self._carried.values():
            each.end()

    def watch_scaler(self, scaler: Any) -> None:
        """A loss scaler that declines to step an optimizer ends a step all the same."""
        stock = scaler.step

        @uncompiled
        def step(*args: Any, **kwargs: Any) -> Any:
            block = self._block
            if block is None:
                return stock(*args, **kwargs)
            num_gates = block.num_gates
            optimizer = args[0] if args else kwargs["optimizer"]
            block.stepped.add(optimizer)
            result = stock(*args, **kwargs)
            if self._rehearsing:
                block.boundary = True
            elif block.num_gates == num_gates:
                self._look_at_gradients(optimizer)
                self._gate(block, None)
            return result

        scaler.step = step
        self.scalers.append(scaler)

    @uncompiled
    def _before_optimizer(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pre-hook of every optimizer: nothing outside a block; inside a vote, after the closure where there is one."""
        block = self._block
        if block is None:
            return None
        block.stepped.add(optimizer)
        if self._rehearsing:
            block.boundary = True
            return None
        self._protection.fence()
        if torch._C._current_graph_task_id() != NOT_IN_BACKWARD:
            self._look_at_gradients(optimizer)
            self._step_in_backward(block, optimizer)
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._gate(block, optimizer)
            return None

        def closure_then_gate() -> Any:
            loss = closure()
            self._gate(block, optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_gate}
        return (args[0], closure_then_gate, *args[2:]), kwargs

    @staticmethod
    def _step_in_backward(block: StepBlock, optimizer: Optimizer) -> None:
        block.boundary = True
        if STATUS.error is not None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _gate(self, block: StepBlock, optimizer: Optimizer | None) -> None:
        """``optimizer``: the one that is about to step; None where a loss scaler has looked, and declines."""
        block.boundary = True
        if optimizer is not None:
            self._look_at_gradients(optimizer)
            if self._on_nan != "ignore":
                block.finite = all_finite(optimizer)
        if not self._vote(block, ended=self._num_quiet_blocks >= NUM_QUIET_BLOCKS):
            raise StepDiscarded
        if block.voted is not None and block.voted.spoilt_rank != NO_RANK:
            self._not_finite(block.step, block.voted.spoilt_rank, -block.voted.neg_spoilt_rank)
        block.num_gates += 1
        if block.num_gates == 1:
            block.num_collectives_before = REGISTRY.num_collectives

    def _look_at_gradients(self, optimizer: Optimizer) -> None:
        """Before it steps on them: are some older than the step, and does the state that was resumed have them?"""
        carried = self._carried.get(optimizer)
        if carried is None:
            return
        carried.at_step()
        if not carried.carried:
            return
        if carried.lost:
            raise GradientsLost(
                f"{carried.name} carries gradients from step to step (it steps, and no zero_grad() of it comes before "
                "the next backward), and the version that was resumed after a fault was taken before that was known: "
                "they are lost, and this step is not what it would have been. Call zero_grad() in every step, or start "
                "again"
            )
        if not self._told:
            self._told = True
            warnings.warn(
                f"{carried.name} steps on gradients that are older than this step (no zero_grad() of it has come since "
                "the one before): from now on they are part of each version, which is larger by their bytes; if that "
                "is not meant, call zero_grad() in every step",
                RuntimeWarning,
                stacklevel=2,
            )

    def _not_finite(self, step: int, first: int, last: int) -> None:
        """``first``, ``last``: of the ranks with such gradients."""
        whose = f"rank {first}" if first == last else f"ranks {first} to {last} (reduced ones are no rank's own)"
        if self._on_nan == "skip":
            raise StepSkipped
        if self._on_nan == "rollback":
            self.spoilt_step = step
            STATUS.fail(P2PStateError(f"in step {step} gradients of {whose} are NaN or infinite: the run goes back"))
            raise StepDiscarded
        raise NotFinite(
            f"in step {step} gradients of {whose} are NaN or infinite: the run stops before they reach the model "
            "(on_nan='stop'); look for the batch or the learning rate, or leave such batches out with on_nan='skip'"
        )

    def finish(self, block: StepBlock) -> bool:
        """At the block's end: vote until all ranks are at theirs. False: the step must be discarded here."""
        while block.voted is None or not block.voted.ended:
            if not self._vote(block, ended=True):
                return False
        self.count(block)
        if block.boundary:
            quiet = block.num_gates == 1 and REGISTRY.num_collectives == block.num_collectives_before
            self._num_quiet_blocks = self._num_quiet_blocks + 1 if quiet else 0
        return STATUS.error is None

    def count(self, block: StepBlock) -> None:
        """Blocks in which no optimizer was stepped are accumulating gradients, or the wrong optimizers are watched."""
        if block.boundary:
            self._longest_window = max(self._longest_window or 0, self.num_open_blocks)
            self.num_open_blocks = 0
            return
        self.num_open_blocks += 1
        longest = self._longest_window
        if self.num_open_blocks == (NUM_OPEN_BLOCKS if longest is None else NUM_OPEN_WINDOWS * (longest + 1)):
            self.warn_of_open_blocks()

    def warn_of_open_blocks(self) -> None:
        warnings.warn(
            f"in {self.num_open_blocks} blocks in a row none of the optimizers given to Replicator(...) was stepped: "
            "none of them is a step, nothing of what they trained is committed or protected; give it the optimizer "
            "whose step() is called",
            RuntimeWarning,
            stacklevel=2,
        )

    def _vote(self, block: StepBlock, *, ended: bool) -> bool:
        """Cast this rank's vote, unless all have said that none follows. False: the step must be discarded here."""
        if STATUS.error is not None:
            return False
        if block.voted is not None and block.voted.ended:
            return True
        if block.voted is None:
            self._protection.wait_a_little(self.step_s)
        block.voted = self.ballot(block.step, block.boundary, ended, self._vote_timeout_s, block.finite)
        if block.voted is not None and block.boundary and not block.voted.boundary:
            STATUS.fail(
                P2PStateError(
                    "some ranks ended their block without optimizer.step() while others stepped: every rank has to "
                    "step, or none"
                )
            )
            return False
        return block.voted is not None

    def ballot(
        self, step: int, boundary: bool, ended: bool, timeout_s: float | None = None, finite: bool = True
    ) -> Ballot | None:
        """None: this rank has seen an error, the ranks do not agree on what they vote about, or time is up."""
        protection = self._protection
        protected = protection.complete()
        spoilt = NO_RANK if finite else REGISTRY.rank
        need = -protection.need_vote(self.step_s)
        neg_spoilt = 1 if finite else -REGISTRY.rank
        seen = protection.save_vote(step), spoilt, need, int(protection.alike), neg_spoilt, protection.balance
        ballot = Ballot(int(boundary), int(ended), step, -step, *protected, *seen)
        result = vote(REGISTRY, STATUS, ballot, timeout_s)
        if result is not None and result.step != -result.neg_step:
            STATUS.fail(P2PStateError("ranks do not agree on the step: some have left the loop, others go on"))
            return None
        return result
