"""Views that members speak of and this node does not know: how far they keep it from deciding the next one. Pure.

Flows in: the newest epoch that each member says it knows, learned views, time. Flows out: whether this node may vote,
and who said what.
Invariants: what was said holds until this node learns that view, the member takes it back, or somebody outside vouches
for the member's end (fenced). A node that has a view does not vote at all while the word is fresh, because the view is
on its way; after `patience_s` it votes again, bound like every acceptor by what it promised and accepted, but it
proposes nothing that fewer than a majority (or a tie) decide: these alone rest on there being no newer view. A node
that has no view votes on no first one as long as the word holds: it may have lost the memory of its vote.
Limits: whether a word is true cannot be seen here, only that nobody shows the view.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from rendezvous.types import MemberKey


@dataclass(slots=True)
class _Word:
    epoch: int
    until_s: float
    is_fresh: bool = True


class Hearsay:
    """Owned by the agreement."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._words: dict[MemberKey, _Word] = {}

    def hear(self, member: MemberKey, epoch: int, known: int, now: float) -> None:
        """A member says that `epoch` is its newest; `known` is this node's own (0: none). Saying it again renews
        nothing.
        """
        if epoch > known:
            word = self._words.setdefault(member, _Word(epoch, now + self._patience_s))
            word.epoch = epoch
        elif known:
            self._words.pop(member, None)

    def learn(self, epoch: int) -> None:
        """This node learned the view of `epoch`."""
        self._words = {key: word for key, word in self._words.items() if word.epoch > epoch}

    def tick(self, now: float) -> None:
        for word in self._words.values():
            word.is_fresh = word.is_fresh and now < word.until_s

    def said_by(self, fenced: AbstractSet[MemberKey], *, fresh: bool = False) -> list[MemberKey]:
        """Whose word holds, or is even `fresh`."""
        return [key for key, word in self._words.items() if key not in fenced and (word.is_fresh or not fresh)]

    def text(self, fenced: AbstractSet[MemberKey]) -> str:
        """The sentence about words that hold and are fresh no more; empty if there are none."""
        stale = [(key, self._words[key].epoch) for key in self.said_by(fenced) if not self._words[key].is_fresh]
        if not stale:
            return ""
        who = " and ".join(f"{key.name} said that it knows view {epoch}" for key, epoch in stale)
        names = " and ".join(f"`p2prun assume-dead {key.name}`" for key, _ in stale)
        return (
            f"{who}, which nobody shows: waiting to be told that view. If nothing goes on with it any more, say so "
            f"with {names}"
        )
