"""agent/agent.py: what another node's agent says, or another version of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pstate.agent.agent import Agent
from rendezvous.types import MemberKey

OTHER = MemberKey("b", 1)


def told(body: Any) -> list[tuple[Any, ...]]:
    agent: Any = Agent.__new__(Agent)
    aborted: list[tuple[Any, ...]] = []
    agent._ranks = SimpleNamespace(abort=lambda *what, **more: aborted.append((*what, more["cause"])))
    agent.on_message(OTHER, "abort", body)
    return aborted


def test_abort_of_another_node_is_heard() -> None:
    assert told([7, "rank 3 died", "killed"]) == [(7, "rank 3 died", "killed")]


@pytest.mark.parametrize(
    "body", [["seven", "rank 3 died", "killed"], [None, "", ""], [[], {}, 0], [7], "abc", {}, None]
)
def test_abort_that_is_nonsense_changes_nothing(body: Any) -> None:
    assert told(body) == []
