"""completion: a run has finished when every place of the round has said so, whatever gets lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rendezvous.completion import Completion
from rendezvous.types import Member, View

MEMBERS = tuple(Member(name, 1, f"127.0.0.1:{number}", num_workers=1) for number, name in enumerate("ab", start=1))


class FakeNode:
    def __init__(self) -> None:
        self.key = MEMBERS[0].key
        self.verdict: Any = None
        self.said: list[tuple[str, Any]] = []
        self.later: list[Callable[[], None]] = []
        self.enter(1)

    def enter(self, round_: int) -> None:
        self.view = View("nonce", round_, round_, MEMBERS, (), (), "because", {})

    def broadcast(self, kind: str, body: Any) -> None:
        self.said.append((kind, body))

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.later.append(callback)


def test_node_tells_until_the_others_are_done_or_another_round_begins() -> None:
    node: Any = FakeNode()
    ended: list[int] = []
    done_in = [0]
    completion = Completion(node, lambda round_: round_ == done_in[0], lambda: ended.append(node.view.round))
    completion.tell()
    assert node.said == []
    done_in[0] = 1
    completion.tell()
    node.later.pop()()
    assert node.said == [("done", [1, 0])] * 2
    node.enter(2)
    node.later.pop()()
    assert len(node.said) == 2
    completion.heard([1, 1])  # of the round before
    assert ended == []
    completion.heard([2, 1])
    done_in[0] = 2
    completion.tell()
    assert ended == [2]


def test_nonsense_changes_nothing_and_after_a_verdict_nothing_is_said() -> None:
    node: Any = FakeNode()
    ended: list[str] = []
    completion = Completion(node, lambda round_: True, lambda: ended.append("finished"))
    for body in (None, [1], ["1", 0], [1, 7], [1, 1, 1]):
        completion.heard(body)
    completion.tell()
    assert ended == []
    completion.heard([1, 1])
    assert ended == ["finished"]
    node.verdict = "finished"
    node.said.clear()
    completion.tell()
    assert node.said == []
