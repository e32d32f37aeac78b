"""The votes that every rank casts in a step: before each change of the state, and at the step's end.

In: this rank's ballot. Out: the smallest value of each field over all ranks (of one field the sum), or ``None`` when
the outcome cannot be known here (a peer or the connection died). A few integers, which each rank sends to every other,
decide whether the step commits, which version is protected everywhere and whether the next capture happens: all ranks
act on the same numbers. (All at once rather than in a ring: one delay instead of two per rank.)

Invariant: whoever is at the end of its step votes again until all are (``ended``), so ranks that change their state a
different number of times still cast the same number of votes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from datetime import timedelta
from operator import attrgetter

import torch

from p2pstate.errors import P2PStateError, Retryable
from p2pstate.groups.registry import GATE, Registry
from p2pstate.groups.status import Status
from p2pstate.groups.waiting import wait_collective
from p2pstate.types import OLDEST

__all__ = ["NO_RANK", "Ballot", "all_say", "vote"]

NO_RANK = 1 << 40  # above all ranks


@dataclass(frozen=True, slots=True)
class Ballot:
    """``boundary``: an optimizer was (or, with a loss scaler, declined to be) stepped in this block.

    ``ended``: this rank is at the block's end, or expects that nothing follows its ``optimizer.step()``; once all have
    said so, nobody votes any more in this block.

    ``step``: the step being voted on; ``neg_step`` its negative, so that the minimum shows disagreement.
    ``protected_epoch``, ``protected_step``: newest version of which all that this rank writes is complete: its own
    slots and the copies it keeps for its wards. The smallest over all ranks is complete in both places everywhere.
    ``spoilt_rank``: this rank, if its gradients are no numbers (and it was asked to look), else ``NO_RANK``;
    ``neg_spoilt_rank``: minus this rank, or 1: the smallest shows the last such rank.
    ``save``: whether a version should go to disk (see saving.py).
    ``neg_need``: minus the thousandths of a step that this rank needs from one version to the next (interval.py): the
    smallest is the largest need.
    ``alike``: 0 if this rank has seen that what it holds alike with others is not alike any more.
    ``balance``: of the version captured last, see sampling.py. The result has the sum over all ranks.
    """

    boundary: int
    ended: int
    step: int
    neg_step: int
    protected_epoch: int
    protected_step: int
    save: int = 2
    spoilt_rank: int = NO_RANK
    neg_need: int = 0
    alike: int = 1
    neg_spoilt_rank: int = 1
    balance: int = 0  # the last field


_VALUES = attrgetter(*(field.name for field in fields(Ballot)))


def vote(registry: Registry, status: Status, ballot: Ballot, timeout_s: float | None = None) -> Ballot | None:
    """Blocks until every rank has voted. None: this rank has seen an error (or time is up) and knows no outcome."""
    gate = registry.gate
    if status.error is not None or gate is None:
        return None
    mine = torch.tensor(_VALUES(ballot), dtype=torch.int64)
    everywhere = mine.repeat(registry.world_size)  # what goes to each rank
    ballots = torch.empty_like(everywhere)

    def is_over() -> bool:
        status.trace.poll()
        return status.error is not None

    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    began = time.monotonic()
    try:
        with status.trace.row(GATE).inside("vote"):
            work = gate.group.alltoall_base(ballots, everywhere, [], [])
            wait_collective(work, is_over, timeout)
    except Exception as error:
        late = timeout_s is not None and time.monotonic() - began >= timeout_s
        status.fail(Retryable(f"not every rank voted within {timeout_s:g} s") if late else error, gate.epoch)
        return None
    everyone = ballots.view(registry.world_size, -1)
    outcome = everyone.amin(0)
    outcome[-1] = everyone[:, -1].sum()
    return Ballot(*outcome.tolist())


def all_say(registry: Registry, status: Status, yes: bool, about: int = 0) -> bool | None:
    """Whether every rank says yes to the same question, which ``about`` tells from others. None: as of :func:`vote`."""
    voted = vote(registry, status, Ballot(int(yes), 1, about, -about, *OLDEST))
    if voted is not None and voted.step != -voted.neg_step:
        status.fail(P2PStateError("ranks do not agree on where they are: some have left the loop, others begin it"))
        return None
    return None if voted is None else bool(voted.boundary)
