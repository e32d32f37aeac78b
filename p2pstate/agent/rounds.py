"""How a round begins, and what its workers are told. Pure.

In: views and ballots. Out: the start of the next round, who has which rank, and the message that gives a process its
rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from p2pstate.types import LoopEnds, RoundInfo, Start, Worker
from rendezvous.store_line import ENV_GLOO_ASKS_ONCE
from rendezvous.types import View, split_address

__all__ = [
    "Progress",
    "assignment",
    "decide_restart",
    "decide_start",
    "ends_of",
    "num_places",
    "progress_of",
    "ranks_of",
    "round_info",
]


class Progress(NamedTuple):
    """The newest step known to be committed, since the view of epoch ``since`` in which training last started anew (0:
    since the run's start). Ordered: what was before a new start counts no more."""

    since: int
    step: int

    @staticmethod
    def of(table: Mapping[str, Any]) -> Progress:
        """What a ballot, a heartbeat or a view's data say; -1 where they say nothing that can be understood."""
        since, step = table.get("since", 0), table.get("step", -1)
        return Progress(since if isinstance(since, int) else 0, step if isinstance(step, int) else -1)

    def table(self) -> dict[str, int]:
        return self._asdict()

    def at(self, step: int) -> Progress:
        """After another commit."""
        return max(self, Progress(self.since, step))


def decide_start(previous: View | None, ballots: Iterable[Mapping[str, Any]]) -> tuple[bool, dict[str, Any]]:
    """(whether somebody needs a new round, the data of the view): see rendezvous.types.Application.decide."""
    given = list(ballots)
    asked = {str(ballot.get("start_over", "")) for ballot in given}
    known = max([Progress.of(ballot) for ballot in given] + [progress_of(previous)])
    if previous is None or Start.FRESH in asked:
        start = Start.FRESH
    elif Start.RESTART not in asked and any(ballot.get("rerun") for ballot in given):
        start = Start.RERUN
    elif Start.RESTART in asked or any(ballot.get("outside") for ballot in given):
        has_state = known.step > 0 or any(ballot.get("has_state") for ballot in given)
        start = Start.RESTART if has_state else Start.FRESH
    else:
        start = Start.IN_PLACE
    wanted = any(ballot.get("wants_round") for ballot in given)
    ends = max([ends_of(ballot) for ballot in given] + [ends_of(previous.data if previous is not None else {})])
    if previous is not None and start == Start.FRESH:
        known = Progress(previous.epoch + 1, -1)
        ends = LoopEnds(previous.epoch + 1, empty=ends.empty)
    return wanted, {"start": start, **known.table(), "ends": ends.pack()}


def decide_restart(previous: View | None, ballots: Iterable[Mapping[str, Any]]) -> tuple[bool, dict[str, Any]]:
    """As :func:`decide_start`, where a launcher starts all workers anew in every round (torchrun)."""
    return decide_start(previous, [{**ballot, "outside": True} for ballot in ballots])


def num_places(previous: View, ballots: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """(fewest, most) training nodes of the next view: as many as before, for shards are cut for so many, unless some
    member has seen to it that others are possible (see resizing.py)."""
    asked = [tuple(ballot["places"]) for ballot in ballots if ballot.get("places")]
    if not asked:
        return len(previous.places), len(previous.places)
    return min(fewest for fewest, _ in asked), max(most for _, most in asked)


def ends_of(table: Mapping[str, Any]) -> LoopEnds:
    """What a ballot or a view's data say of the loops that have ended; none where nothing can be understood."""
    try:
        return LoopEnds.unpack(table["ends"])
    except (KeyError, TypeError, ValueError):
        return LoopEnds()


def progress_of(view: View | None) -> Progress:
    """What was known when the view was decided."""
    return Progress.of(view.data if view is not None else {})


def round_info(view: View, start: str, run_id: str, num_local: int) -> RoundInfo:
    workers: list[Worker] = []
    for member in view.places:
        host, _ = split_address(member.address)
        for local_rank in range(num_local):
            workers.append(Worker(len(workers), local_rank, member.name, host))
    labels = {member.name: dict(member.labels) for member in view.places if member.labels}
    step, ends = progress_of(view).step, ends_of(view.data)
    return RoundInfo(run_id, view.nonce, view.round, start, view.reason, tuple(workers), step, labels, ends)


def ranks_of(place: int | None, num_local: int) -> range:
    """The ranks of a place; none for a spare node."""
    return range(0) if place is None else range(place * num_local, (place + 1) * num_local)


def assignment(
    info: RoundInfo,
    rank: int,
    num_local: int,
    *,
    fresh: bool,
    aborted: bool,
    raised: tuple[int, str] | None = None,
    max_restarts: int | None = None,
) -> dict[str, Any]:
    """The message that makes a process ``rank``. ``fresh``: it starts connected, with all others; else alone.
    ``aborted``: the round is over already, the next one will be told. ``raised``: see WorkerContext. ``max_restarts``:
    how many workers may be replaced, for scripts that ask torchrun; None: it is torchrun that they ask."""
    worker = info.workers[rank]
    environ = {
        "RANK": str(rank),
        "LOCAL_RANK": str(worker.local_rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_WORLD_SIZE": str(num_local),
        "GROUP_RANK": str(rank // num_local),
        "GROUP_WORLD_SIZE": str(info.world_size // num_local),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(info.world_size),
        "P2PSTATE_RUN_ID": info.run_id,
        "P2PSTATE_NODE": worker.node,
        "P2PSTATE_AGENT_PID": str(os.getpid()),
        ENV_GLOO_ASKS_ONCE: os.environ.get(ENV_GLOO_ASKS_ONCE, "1"),
    }
    if max_restarts is not None:
        environ |= {
            "TORCHELASTIC_RUN_ID": info.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(max(0, info.epoch - 1)),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
    if num_local > 1:
        environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return {
        "t": "assign",
        "rank": rank,
        "local_rank": worker.local_rank,
        "num_local": num_local,
        "world_size": info.world_size,
        "host": worker.host,
        "epoch": info.epoch,
        "fresh": fresh,
        "restore": fresh and info.start == Start.RESTART,
        "round": None if aborted else info.pack(),
        "environ": environ,
        "raised": raised,
        "ends": info.ends.pack(),
    }
