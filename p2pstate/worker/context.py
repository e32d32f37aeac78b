"""What this worker process knows about its place in the run. One per process, set before the user's script starts.

In: the agent's assignment. Out: :func:`current`, which the public objects start from, and the reactions to an abort.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from p2pstate.errors import EXIT_RETRY, ConfigError, P2PStateError, Retryable
from p2pstate.groups.registry import Registry
from p2pstate.groups.status import Status
from p2pstate.placement import partners, wards
from p2pstate.types import NO_ENDS, LoopEnds, RoundInfo, Version
from p2pstate.worker.farewell import Farewell
from p2pstate.worker.link import Link, RoundAborted
from rendezvous.autoload import ENV_AGENT

__all__ = ["WorkerContext", "current", "enter", "is_entered"]

HOLD_S = 60.0


@dataclass(slots=True)
class WorkerContext:
    link: Link
    rank: int
    local_rank: int
    num_local: int
    world_size: int
    fresh: bool  # this process starts connected, with everybody else; else alone
    restore: bool  # what it starts connected with resumes from the vaults, or from disk
    info: RoundInfo | None = None  # the round this process is in; None before a newcomer has joined one
    ends: LoopEnds = NO_ENDS  # of the training loops that are over, as far as this process knows
    epoch: int = 0  # the newest round that this process joined or tried to join; 0 before the first
    num_moves: int = 0  # how often all have moved on to another training loop in it, before they joined
    loop: int = 0  # in which of the script's training loops this process is, or was last
    trains: object = None  # whose loop that is
    models: list[weakref.ref[Any]] = field(default_factory=list)  # of all Replicators
    checkpoint: str | None = None  # where they write to
    kept: Version | None = None  # what the run can fall back to since the last loop has ended
    joining: bool = False  # inside recover.join: an abort cuts the replication group as well
    in_loop: bool = False  # shipping errors matter to the agent only while the loop runs
    rerunning: bool = False  # inside a restartable function
    num_meetings: int = 0  # of all ranks of a round, before they capture anything (see meeting.py)
    copies: int = 1  # of each shard, besides the own node's
    # Step and signature of what the user's code raised last in this rank; None: whoever started it wants to see it end.
    raised: tuple[int, str] | None = None
    unfinished: Callable[[], None] | None = None  # agrees on the end of a loop that was left, perhaps by an exception
    failing: bool = False  # the script ends by an exception: nobody waits for its loop any more
    lean: bool | None = None  # there is no copy on the own node; None: not known before a newcomer has joined
    sizes: tuple[int, int] = (0, 0)  # in bytes: what only this rank's node has, and its piece of what others have too
    sizes_of_all: list[tuple[int, int]] = field(default_factory=list)  # the same of every rank, once it is known
    why_not_full: str = ""  # why this newcomer's node has no memory for one
    farewell: Farewell = field(init=False)
    left_early: str = ""  # where a loop was left while its step was being discarded

    pid: int = field(default_factory=os.getpid)
    must_join: bool = field(init=False)  # this process has not resumed the run's state yet
    loop_to_join: int = field(init=False)  # in which of the script's training loops it is to do that

    def __post_init__(self) -> None:
        self.farewell = Farewell(self.leave)
        self.must_join = not self.fresh or self.restore
        # Those who start together see from the version where they have to go.
        self.loop_to_join = 1 if self.fresh else self.ends.num + 1

    @property
    def is_forked(self) -> bool:
        """This is a child that the user's code forked: what becomes of it says nothing about the worker."""
        return os.getpid() != self.pid

    @property
    def asked_to_leave(self) -> str:
        """Why this process, or its whole node, is to go as soon as it stands between two steps; empty: it is not."""
        return self.link.leaving or self.farewell.reason

    @property
    def why_left(self) -> str:
        return (
            f"the loop at {self.left_early} was left by break or return, and a fault came before all ranks had agreed "
            "that it ends"
        )

    @property
    def why_ended_early(self) -> str:
        return (
            f"the script ended after training loop {self.loop}, but the run is in loop {self.loop_to_join}: here, the "
            "loops before gave no steps, and what stands between them ran with a model that is not restored yet. End "
            "training there only `if not state.rehearsing`, and keep what it needs of the loops in extra="
        )

    @property
    def passes_by(self) -> bool:
        """The loop that this process is in was over before it began: it joins in a later one."""
        return self.must_join and self.loop < self.loop_to_join

    def begin_loop(self) -> None:
        if self.left_early:
            self.leave(f"{self.why_left}: another process goes on in it")
        self.loop += 1
        self.in_loop = True
        if not self.passes_by:
            self.farewell.listen()

    def leave_loop(self) -> None:
        self.in_loop = False
        self.farewell.close()

    def end_loop(self, step: int, *, left: bool) -> None:
        """All ranks have agreed on the end, after ``step``; ``left``: by break or return."""
        self.leave_loop()
        self.ends = self.ends.ended(self.loop, step, left=left)
        self.link.send("loop_done", ends=self.ends.pack())

    def go(self) -> None:
        """The newest version has arrived. Does not return, unless the agent changes its mind for a whole minute."""
        if not self.link.leaving:
            self.leave(self.farewell.reason)
        self.link.send("paused")
        time.sleep(HOLD_S)  # the agent ends this process

    def leave(self, reason: str, code: int = EXIT_RETRY, *, innocent: bool = True) -> NoReturn:
        """End this process, for another one to take its rank; not ``innocent``: and the run, with this code."""
        self.link.send("failed", code=code, text=reason, innocent=innocent)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    @property
    def buddies(self) -> tuple[int, ...]:
        """The ranks whose nodes keep this rank's shard. They may change when a round is joined: nodes have labels."""
        return self._partners[self.rank]

    @property
    def wards(self) -> tuple[int, ...]:
        """The ranks whose shards this rank keeps on its node, as many as there are buddies."""
        return wards(self._partners)[self.rank]

    @property
    def places(self) -> list[int]:
        """The place of every rank; it stays when a spare takes the place over."""
        return [rank // self.num_local for rank in range(self.world_size)]

    @property
    def _partners(self) -> list[tuple[int, ...]]:
        if self.info is None:
            return partners([f"place {place}" for place in self.places], self.copies)
        return partners([worker.node for worker in self.info.workers], self.copies, self.info.labels)

    def tell_copies(self) -> None:
        """The agent says what these copies do not protect from."""
        if self.lean is not None:
            self.link.send("copies", copies=self.copies, lean=self.lean)

    def watch(self, registry: Registry, status: Status) -> None:
        """Connect errors, aborts and connections: whatever happens first frees every blocked thread."""

        def on_first_error(error: BaseException, epoch: int) -> None:
            registry.cut(epoch, replication=False)
            if not isinstance(error, RoundAborted):
                certain = isinstance(error, P2PStateError) and not isinstance(error, Retryable)
                self.link.send("error", epoch=epoch, text=_one_line(error), certain=certain)

        def on_abort(epoch: int, reason: str) -> None:
            status.fail(RoundAborted(f"round {epoch} was aborted: {reason}"), epoch)
            registry.cut(epoch, replication=self.joining)

        status.on_first_error = on_first_error
        self.link.on_abort = on_abort


_current: WorkerContext | None = None


def enter(context: WorkerContext) -> None:
    global _current
    _current = context


def is_entered() -> bool:
    return _current is not None


def current() -> WorkerContext:
    """The context of this worker. Raises ConfigError in a process that has none."""
    if _current is not None:
        return _current
    if ENV_AGENT in os.environ:
        raise ConfigError("call p2pstate.init_process_group() first, in place of torch's own")
    script = os.path.basename(sys.argv[0]) if hasattr(sys.modules["__main__"], "__file__") else "script.py"
    raise ConfigError(
        "this process was not started by p2pstate, so its process groups cannot be repaired and nobody keeps its "
        f"state: start it as `p2prun --nproc-per-node N {script}`, or as `torchrun --rdzv-backend=p2p ... {script}`, "
        "instead of with python alone, in a notebook or with torchrun's own backends (mpirun and srun start p2prun, "
        "once per node)"
    )


def _one_line(error: BaseException) -> str:
    kind = "" if isinstance(error, P2PStateError) else f"{type(error).__name__}: "
    return f"{kind}{error}".replace("\n", " ")[:500]
