"""agent/ranks.py: what workers are told when a round begins."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

from p2pstate.agent.held import Phase
from p2pstate.agent.ranks import Ranks
from p2pstate.types import Start
from rendezvous.types import Member, View

MEMBER = Member("a", 1, "127.0.0.1:7000")


def view(round_: int) -> View:
    return View("nonce", round_, round_, (MEMBER,), (), (), "because", {"start": Start.IN_PLACE, "step": 3})


def test_rank_whose_process_is_not_ready_is_said_to_wait_for_it() -> None:
    node, supervisor, events, job = MagicMock(), MagicMock(), MagicMock(), MagicMock(num_workers=1)
    node.key = MEMBER.key
    supervisor.assigned.return_value = []
    supervisor.of_rank.return_value = supervisor.spare.return_value = None
    ending: Any = MagicMock(ended=False, closing=False)
    rehearsals = MagicMock()
    rehearsals.take.return_value = None
    ranks = Ranks(node, supervisor, events, rehearsals, MagicMock(), job, ending)
    ranks._budget = MagicMock()
    ranks._budget.round_begins.return_value = ""
    assert ranks.on_view(view(1))
    ranks.begin(view(1), Start.IN_PLACE, 0.0)
    events.emit.assert_called_once_with("workers_starting", "rank 0: waiting for a process that has imported torch")


def test_worker_in_a_round_that_nobody_called_over_is_freed_from_it_before_it_hears_of_the_next() -> None:
    node, supervisor, job = MagicMock(), MagicMock(), MagicMock(num_workers=1)
    node.key = MEMBER.key
    worker = MagicMock(phase=Phase.LOOP, rank=0)
    supervisor.assigned.return_value = [worker]
    supervisor.of_rank.return_value = worker
    ending: Any = MagicMock(ended=False, closing=False)
    ranks = Ranks(node, supervisor, MagicMock(), MagicMock(), MagicMock(), job, ending)
    ranks._budget = MagicMock()
    ranks._budget.round_begins.return_value = ""
    over: list[int] = []
    ranks.on_over = over.append
    for round_ in (1, 2):
        assert ranks.on_view(view(round_))
        ranks.begin(view(round_), Start.IN_PLACE, 0.0)
    told = [(to, message["t"], message.get("epoch")) for (to, message), _ in supervisor.tell.call_args_list]
    assert told == [(worker, "round", None), (worker, "abort", 1), (worker, "round", None)]
    assert over == [1]


def test_rehearsed_process_that_is_taken_in_a_running_round_is_told_of_it_as_all_others_were() -> None:
    node, supervisor, job = MagicMock(), MagicMock(), MagicMock(num_workers=2)
    node.key = MEMBER.key
    stays, rehearsed = MagicMock(phase=Phase.LOOP, rank=0), MagicMock(pid=7)
    supervisor.assigned.return_value = [stays]
    supervisor.of_rank = {0: stays}.get
    rehearsals = MagicMock()
    rehearsals.take.return_value = rehearsed
    ending: Any = MagicMock(ended=False, closing=False)
    ranks = Ranks(node, supervisor, MagicMock(), rehearsals, MagicMock(), job, ending)
    ranks._budget = MagicMock()
    ranks._budget.round_begins.return_value = ""
    assert ranks.on_view(view(1))
    ranks.begin(view(1), Start.IN_PLACE, 0.0)
    told = [(to, message) for (to, message), _ in supervisor.tell.call_args_list if message["t"] == "round"]
    assert [to for to, _ in told] == [stays, rehearsed]
    assert told[0][1] == told[1][1]
