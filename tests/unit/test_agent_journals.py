"""journals: who keeps what ranks were told at the start, and which nodes hear of it."""

from __future__ import annotations

from typing import Any

import pytest

from p2pstate.agent import journals as journals_module
from p2pstate.agent.journals import Journals
from rendezvous.types import Member, MemberKey, View

MEMBERS = {name: Member(name, 1, f"127.0.0.1:{number}", num_workers=1) for number, name in enumerate("abs", start=1)}


class FakeNode:
    def __init__(self, name: str) -> None:
        self.key = MEMBERS[name].key
        self.sent: list[tuple[MemberKey, str, Any]] = []

    def send(self, to: MemberKey, kind: str, body: Any) -> None:
        self.sent.append((to, kind, body))


def view(places: str, spares: str) -> View:
    members = [tuple(MEMBERS[name] for name in names) for names in (places, spares)]
    return View("nonce", 1, 1, *members, (), "because", {})


def test_journals_go_to_spare_nodes_and_from_there_to_who_takes_the_rank() -> None:
    node: Any = FakeNode("a")
    mine = Journals(node)
    mine.on_view(view("ab", ""), [0])
    mine.from_worker(0, b"told")
    assert (mine.of(0), mine.of(1), node.sent) == (b"told", b"", [])
    mine.on_view(view("ab", "s"), [0])  # it joined later
    mine.on_view(view("ab", "s"), [0])
    assert node.sent == [(MEMBERS["s"].key, "journal", [0, b"told"])]
    mine.from_worker(0, b"anew")
    assert node.sent[-1][2] == [0, b"anew"]
    mine.heard([0, b"of somebody else"])
    assert mine.of(0) == b"anew"

    spare: Any = FakeNode("s")
    kept = Journals(spare)
    kept.on_view(view("ab", "s"), [])
    kept.heard([0, b"anew"])
    assert kept.of(0) == b"anew"
    kept.on_view(view("sb", "a"), [0])
    assert spare.sent == [(MEMBERS["a"].key, "journal", [0, b"anew"])]


@pytest.mark.parametrize("body", [None, [0], [-1, b""], [0, "text"], [0, b"", 1]])
def test_nonsense_of_a_peer_is_refused(body: Any) -> None:
    journals = Journals(FakeNode("s"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be"):
        journals.heard(body)


def test_journals_of_all_ranks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals_module, "MAX_BYTES", 10)
    journals = Journals(FakeNode("s"))  # type: ignore[arg-type]
    for rank, size in [(0, 6), (1, 6), (1, 4), (0, 7)]:
        journals.heard([rank, bytes(size)])
    assert [len(journals.of(rank)) for rank in (0, 1)] == [0, 4]
