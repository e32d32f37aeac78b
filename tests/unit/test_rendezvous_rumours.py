"""News in a large group: who hands it on, to how many, how often."""

from __future__ import annotations

import random

from rendezvous.config import Timing
from rendezvous.effects import Outbox, Send
from rendezvous.membership import BROADCAST_LIMIT, Membership
from rendezvous.messages import Gossip, Status, Update
from rendezvous.rumours import FANOUT, Rumours
from rendezvous.types import Member

TIMING = Timing(0.5, 5.0)


def member(index: int) -> Member:
    return Member(f"n{index}", 1, f"127.0.0.1:{7000 + index}")


class Group:
    def __init__(self, size: int) -> None:
        self.out = Outbox()
        self.membership = Membership(member(0), self.out, 0.0)
        for index in range(1, size):
            self.membership.apply(Update(member(index), Status.ALIVE, 0, "", False, "x"), 0.0)
        while self.membership.take_news():
            pass
        self.rumours = Rumours(self.membership, TIMING, random.Random(1), self.out, 0.0)
        self.out.drain()

    def gossip(self, until_s: float) -> list[tuple[str, tuple[Update, ...]]]:
        sent = []
        while self.rumours.next_deadline_s() <= until_s:
            self.rumours.tick(self.rumours.next_deadline_s())
            for effect in self.out.drain():
                assert isinstance(effect, Send)
                assert effect.to is not None
                assert isinstance(effect.message, Gossip)
                sent.append((effect.to.name, effect.message.updates))
        return sent


def test_news_is_handed_on_to_some_a_bounded_number_of_times() -> None:
    group = Group(100)
    assert group.rumours.next_deadline_s() == float("inf")
    group.membership.judge(member(5).key, Status.GONE, "refused", 1.0, proof=True)
    group.out.drain()
    sent = group.gossip(60.0)
    assert len(sent) == 21  # 3 * ceil(log2(100 members + 1))
    assert len({name for name, _ in sent}) > 10
    assert "n5" not in {name for name, _ in sent}
    assert all([update.member.name for update in updates] == ["n5"] for _, updates in sent)


def test_much_news_goes_together() -> None:
    group = Group(100)
    for index in range(1, 40):
        group.membership.judge(member(index).key, Status.GONE, "refused", 1.0, proof=True)
    group.out.drain()
    first = group.gossip(0.0)
    assert len(first) == FANOUT
    assert all(len(updates) == 39 for _, updates in first)


def test_small_group_needs_no_rounds() -> None:
    group = Group(BROADCAST_LIMIT)
    group.membership.judge(member(5).key, Status.SUSPECT, "silent", 1.0)
    assert group.rumours.next_deadline_s() == float("inf")
