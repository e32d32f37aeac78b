"""The vote that every rank casts once per step, before anything is changed.

In: this rank's ballot. Out: the smallest value of each field over all ranks, or ``None`` when the outcome cannot be
known here (a peer or the connection died). One all-reduce of a few integers decides whether the step commits, which
version is protected everywhere and whether the next capture happens: all ranks act on the same numbers.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from datetime import timedelta

import torch
from torch.distributed import ReduceOp

from p2pstate.groups.registry import GATE, Registry
from p2pstate.groups.status import Status
from p2pstate.groups.waiting import wait_collective

__all__ = ["Ballot", "vote"]


@dataclass(frozen=True, slots=True)
class Ballot:
    """``boundary``: an optimizer was (or, with a loss scaler, declined to be) stepped.

    ``step``: the step being voted on; ``neg_step`` its negative, so that the minimum shows disagreement.
    ``protected_epoch``, ``protected_step``: newest version of which all that this rank writes is complete: its own
    slots and the copies it keeps for its wards. The smallest over all ranks is complete in both places everywhere.
    """

    boundary: int
    step: int
    neg_step: int
    protected_epoch: int
    protected_step: int


def vote(registry: Registry, status: Status, ballot: Ballot, timeout_s: float | None = None) -> Ballot | None:
    """Blocks until every rank has voted. None: this rank has seen an error (or time is up) and knows no outcome."""
    gate = registry.gate
    if status.error is not None or gate is None:
        return None
    tensor = torch.tensor(astuple(ballot), dtype=torch.int64)

    def is_over() -> bool:
        status.trace.poll()
        return status.error is not None

    try:
        with status.trace.row(GATE).inside("vote"):
            work = gate.group.allreduce([tensor], ReduceOp.MIN)
            timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
            wait_collective(work, is_over, timeout)
    except Exception as error:
        status.fail(error, gate.epoch)
        return None
    return Ballot(*tensor.tolist())
