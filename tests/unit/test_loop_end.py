"""What a rank does when it hears that the data of another one has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2pstate import loop_end
from p2pstate.agent.data_ends import DataEnds
from p2pstate.groups.status import Status
from p2pstate.loop_end import LoopEnd

TOLD_STEP, TOLD_BATCHES, LOOP = 6, 6, 2


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Status:
    status = Status()
    status.connect(3)
    monkeypatch.setattr(loop_end, "STATUS", status)
    return status


def a_rank() -> tuple[LoopEnd, Any]:
    link = SimpleNamespace()
    unused = cast(Any, None)
    context = cast(Any, SimpleNamespace(link=link, rank=1, loop=LOOP))
    return LoopEnd(context, unused, unused, drain_timeout_s=1.0, save_timeout_s=1.0), link


@pytest.mark.parametrize("heard_first", [True, False])
@pytest.mark.parametrize(
    ("epoch", "loop", "step", "num_batches", "gives_up"),
    [
        (3, LOOP, 7, 7, True),
        (3, LOOP, 6, 6, False),  # the step that both have done
        (3, LOOP, 7, 6, False),  # micro-batches without a step, of which the other one has had as many
        (2, LOOP, 7, 7, False),  # said in an earlier round
        (3, LOOP - 1, 7, 7, False),  # of a loop that is over
    ],
)
def test_a_block_that_another_rank_has_no_batch_for_is_given_up(
    status: Status, heard_first: bool, epoch: int, loop: int, step: int, num_batches: int, gives_up: bool
) -> None:
    end, link = a_rank()
    if heard_first:
        link.on_data_ended(epoch, 0, TOLD_STEP, TOLD_BATCHES, loop)
        assert status.error is None, "between two blocks there is nothing to give up"
    end.enter_block(step, num_batches)
    if not heard_first:
        assert status.error is None
        link.on_data_ended(epoch, 0, TOLD_STEP, TOLD_BATCHES, loop)
    assert (status.error is not None) == gives_up
    assert not gives_up or str(status.error) == "the data of rank 0 ended after step 6"


def test_the_end_of_data_reaches_the_ranks_of_this_node_and_the_other_agents() -> None:
    sent, told = [], []
    node = cast(Any, SimpleNamespace(broadcast=lambda kind, body: sent.append((kind, body))))
    ends = DataEnds(node, told.append)
    ends.handlers["data_ended"](cast(Any, SimpleNamespace(rank=2)), epoch=3, step=6, num_batches=8, loop=2)
    ((kind, body),) = sent
    ends.heard(body)
    message = {"t": kind, "epoch": 3, "rank": 2, "step": 6, "num_batches": 8, "loop": 2}
    assert told == [message, message]
    for nonsense in (None, [1, 2], "word"):
        with pytest.raises((TypeError, ValueError)):
            ends.heard(nonsense)
