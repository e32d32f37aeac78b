"""Values that one member sets and all read are read without a message, and never after they were changed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from rendezvous.messages import StoreCall, StoreResult
from rendezvous.store_copies import MAX_PUSHED_BYTES
from rendezvous.store_parts import PUSH, TAKE_BACK, owner_of
from rendezvous.store_router import StoreRouter
from rendezvous.types import STORE_ANSWER_S, Member, MemberKey, StoreReply, View

PLACES = tuple(Member(name, 1, f"127.0.0.1:{7000 + ord(name)}") for name in "abc")
KEY = next(key for key in map(str, range(1000)) if owner_of(key, PLACES).name == "a")


class Cluster:
    """Three routers in one round; what they send waits, in order, until `deliver`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.links: dict[tuple[MemberKey, MemberKey], deque[StoreCall | StoreResult]] = {}
        self.routers = {place.key: StoreRouter(place.key, self._sender(place), 1.0) for place in PLACES}
        for router in self.routers.values():
            router.enter(View("nonce", 1, 1, PLACES, (), (), "test"), 0.0)

    def _sender(self, source: Member) -> Callable[[Member, StoreCall | StoreResult], None]:
        return lambda to, message: self.links.setdefault((source.key, to.key), deque()).append(message)

    def waiting(self) -> list[StoreCall | StoreResult]:
        return [message for link in self.links.values() for message in link]

    def deliver_one(self, link: tuple[MemberKey, MemberKey]) -> None:
        self.routers[link[1]].receive(link[0], self.links[link].popleft(), self.now)

    def deliver(self) -> None:
        while busy := [link for link, messages in self.links.items() if messages]:
            self.deliver_one(busy[0])

    def ask(self, name: str, op: str, *args: Any, deadline_s: float = 1000.0) -> list[StoreReply]:
        replies: list[StoreReply] = []
        self.routers[MemberKey(name, 1)].request(1, op, list(args), self.now, deadline_s, replies.append)
        return replies

    def lose(self, op: str) -> None:
        for link, messages in self.links.items():
            self.links[link] = deque(m for m in messages if not (isinstance(m, StoreCall) and m.op == op))


def value(replies: list[StoreReply]) -> Any:
    (reply,) = replies
    assert reply.ok, reply.error
    return reply.value


def test_value_that_was_set_once_is_read_everywhere_without_a_message() -> None:
    cluster = Cluster()
    cluster.ask("b", "set", KEY, b"value")
    cluster.deliver()
    for name in "abc":
        assert value(cluster.ask(name, "get", KEY)) == b"value"
        assert value(cluster.ask(name, "multi_get", [KEY, KEY])) == [b"value", b"value"]
        assert value(cluster.ask(name, "check", [KEY])) is True
        assert value(cluster.ask(name, "wait", [KEY])) is None
    assert cluster.waiting() == []


def test_counters_long_values_and_what_was_changed_before_are_not_pushed() -> None:
    cluster = Cluster()
    for op, arg in (("add", 1), ("set", b"1")):
        cluster.ask("a", op, KEY, arg)
    cluster.ask("a", "delete_key", KEY)
    cluster.ask("a", "set", KEY, b"x" * (MAX_PUSHED_BYTES + 1))
    assert cluster.waiting() == []


@pytest.mark.parametrize(
    ("op", "args", "after"),
    [
        ("set", [b"new"], b"new"),
        ("append", [b"+"], b"1+"),
        ("add", [1], b"2"),
        ("compare_set", [b"1", b"new"], b"new"),
        ("delete_key", [], None),
    ],
)
@pytest.mark.parametrize("writer", "ab")
def test_change_waits_until_every_copy_is_given_up(op: str, args: list[Any], after: bytes | None, writer: str) -> None:
    cluster = Cluster()
    cluster.ask("a", "set", KEY, b"1")
    cluster.deliver()
    change = cluster.ask(writer, op, KEY, *args)
    if writer == "b":
        cluster.deliver_one((MemberKey("b", 1), MemberKey("a", 1)))
    cluster.lose(TAKE_BACK)
    assert change == []
    assert value(cluster.ask("c", "get", KEY)) == b"1"  # nobody was told that it changed
    cluster.now = 2.0
    for router in cluster.routers.values():
        router.tick(2.0)  # what was lost is repeated
    cluster.deliver()
    assert len(change) == 1
    reads = cluster.ask("c", "get", KEY)
    cluster.deliver()
    assert reads == [] if after is None else value(reads) == after


def test_push_that_comes_after_the_key_was_taken_back_is_no_copy() -> None:
    cluster = Cluster()
    cluster.ask("a", "set", KEY, b"old")
    late = next(m for m in cluster.waiting() if isinstance(m, StoreCall) and m.op == PUSH)
    cluster.deliver()
    cluster.ask("a", "set", KEY, b"new")
    cluster.deliver()
    cluster.routers[MemberKey("b", 1)].receive(MemberKey("a", 1), late, 0.0)
    reads = cluster.ask("b", "get", KEY)
    cluster.deliver()
    assert value(reads) == b"new"


@pytest.mark.parametrize("args", [[[KEY], [b"forged"]], [KEY, b"forged"], [[1], [2]], [[KEY], "x"], []])
def test_push_of_who_does_not_own_the_key_and_nonsense_are_ignored(args: list[Any]) -> None:
    cluster = Cluster()
    router = cluster.routers[MemberKey("b", 1)]
    router.receive(MemberKey("c", 1), StoreCall(0, 1, PUSH, args, 0.0), 0.0)
    router.receive(MemberKey("a", 1), StoreCall(1, 1, TAKE_BACK, [[1, None]], 0.0), 0.0)
    assert cluster.ask("b", "get", KEY) == []
    assert [reply.ok for reply in cluster.ask("b", PUSH, [KEY], [b"forged"])] == [False]


def test_change_that_waits_for_a_copy_ends_at_its_deadline_or_with_the_round() -> None:
    for ends in ("deadline", "round"):
        cluster = Cluster()
        cluster.ask("a", "set", KEY, b"1")
        cluster.deliver()
        change = cluster.ask("a", "set", KEY, b"2", deadline_s=3.0)
        owner = cluster.routers[MemberKey("a", 1)]
        if ends == "deadline":
            owner.tick(3.0 + STORE_ANSWER_S)
            assert [reply.timed_out for reply in change] == [True]
        else:
            owner.lose(MemberKey("b", 1))
            assert [reply.ended for reply in change] == [True]


@pytest.mark.parametrize("seed", range(30))
def test_read_never_gives_what_was_there_before_an_answered_change(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster()
    written: list[tuple[int, list[StoreReply]]] = []
    reads: list[tuple[int, list[StoreReply]]] = []
    for version in range(1, 9):
        change = cluster.ask(rng.choice("abc"), "set", KEY, str(version).encode())
        written.append((version, change))
        while not change:
            busy = [link for link, messages in cluster.links.items() if messages]
            if busy:
                cluster.deliver_one(rng.choice(busy))
            if rng.random() < 0.05:
                cluster.lose(rng.choice((PUSH, TAKE_BACK)))
            if not busy or rng.random() < 0.02:
                cluster.now += 1.0
                for router in cluster.routers.values():
                    router.tick(cluster.now)
            done = max((each for each, replies in written if replies), default=0)
            if rng.random() < 0.3:
                reads.append((done, cluster.ask(rng.choice("abc"), "get", KEY)))
        reads += [(version, cluster.ask(name, "get", KEY)) for name in "abc"]
    cluster.deliver()
    assert all(int(value(replies)) >= at_least for at_least, replies in reads)
