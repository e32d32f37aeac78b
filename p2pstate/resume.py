"""When memory has no whole version: the newest good checkpoint, read for the live state.

In: the plan that found nothing in memory. Out: what is in a checkpoint, the same one on all ranks, or none.
What reads checkpoints is imported when one is looked for: that takes most of a second, which no start without a
checkpoint directory should spend.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from p2pstate.durable.remote import open_storage
from p2pstate.errors import ConfigError
from p2pstate.groups.status import STATUS
from p2pstate.settings import CheckpointPolicy
from p2pstate.state import TrainingState, decode
from p2pstate.types import RoundInfo, Version
from p2pstate.worker.link import Link

if TYPE_CHECKING:
    from p2pstate.durable.resume import Loaded, Resolved

__all__ = ["Disk"]

BEFORE_ALL_ROUNDS = 0  # the epoch of a version that was read from disk: all that the vaults hold is void against it


class Disk:
    """The checkpoints of a run, as one rank sees them. ``timeout_s``: how long ranks wait for each other's checks.

    Raises ConfigError when what ``policy`` names is no storage.
    """

    def __init__(self, policy: CheckpointPolicy, link: Link, rank: int, timeout_s: float) -> None:
        try:
            self._storage = open_storage(policy.path, policy.stage)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"checkpoint={policy.path!r} cannot be opened: {error}") from error
        self._link = link
        self._rank = rank
        self._timeout_s = timeout_s
        self._resolved: dict[int, Resolved] = {}

    def resolve(
        self, store: Store, info: RoundInfo, why: str, before_step: int | None = None, num_back: int = 1
    ) -> Resolved:
        """Decide with all ranks of the round, once in it. ``why``: why the disk is asked. ``before_step``,
        ``num_back``: see durable.resume.resolve."""
        from p2pstate.durable.resume import GIVEN_UP_WITHIN_S, resolve

        known = self._resolved.get(info.epoch)
        if known is not None:
            return known
        began = time.monotonic()
        with STATUS.trace.expect("checking checkpoints", self._timeout_s + GIVEN_UP_WITHIN_S):
            found = resolve(store, self._storage, self._rank, info.world_size, self._timeout_s, before_step, num_back)
        self._resolved = {info.epoch: found}
        if found.damaged:
            self._link.send("damaged_saves", names=list(found.damaged))
        if self._rank == 0:
            choice = found.choice
            self._link.send(
                "event",
                kind="resolved",
                source="disk" if choice is not None else "nothing",
                path=choice.path if choice is not None else self._storage.where,
                step=choice.step if choice is not None else None,
                skipped=list(found.skipped),
                reason=why,
                seconds=time.monotonic() - began,
            )
        return found

    def load(self, resolved: Resolved, state: TrainingState, num_ranks: int) -> tuple[Version, Loaded]:
        """The state of the choice for ``state``, whatever the number of ranks that wrote it."""
        from p2pstate.durable.resume import Loaded, load, load_resized

        choice = resolved.choice
        assert choice is not None
        assert choice.manifest is not None
        with STATUS.trace.expect("reading a checkpoint", self._timeout_s):
            if choice.manifest.world_size == num_ranks:
                tensors, values = load(choice, self._rank)
                loaded = Loaded(tensors, decode(values))
            else:
                loaded = load_resized(choice, self._rank, num_ranks, state.model_leaves())
                if self._rank == 0:
                    before = choice.manifest.world_size
                    self._link.send("event", kind="resized", before=before, now=num_ranks, said=list(loaded.said))
        return Version(BEFORE_ALL_ROUNDS, choice.step), loaded
