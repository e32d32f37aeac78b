"""Which shard an operation goes to, over messages that are lost, doubled, early and late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rendezvous.messages import StoreCall, StoreResult
from rendezvous.store_parts import owner_of
from rendezvous.store_router import StoreRouter
from rendezvous.types import STORE_ANSWER_S, Member, MemberKey, StoreReply, View


def member(name: str) -> Member:
    return Member(name, 1, "127.0.0.1:7001")


def view_of(names: str, epoch: int = 1, round_: int = 1, spares: str = "") -> View:
    return View("nonce", epoch, round_, tuple(map(member, names)), tuple(map(member, spares)), (), "")


def keys_owned_by(name: str, places: str, count: int = 3) -> list[str]:
    members = tuple(map(member, places))
    return [key for key in map(str, range(1000)) if owner_of(key, members).name == name][:count]


class Cluster:
    """Routers that hand each other messages at once, unless `lose` says no."""

    def __init__(self, names: str) -> None:
        self.now = 0.0
        self.lose: Callable[[StoreCall | StoreResult], bool] = lambda _: False
        self.sent: list[StoreCall | StoreResult] = []
        self.routers: dict[MemberKey, StoreRouter] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> StoreRouter:
        me = member(name).key

        def send(to: Member, message: StoreCall | StoreResult) -> None:
            self.sent.append(message)
            if not self.lose(message) and to.key in self.routers:
                self.routers[to.key].receive(me, message, self.now)

        self.routers[me] = StoreRouter(me, send, 1.0)
        return self.routers[me]

    def enter(self, view: View, names: str | None = None) -> None:
        for key, router in self.routers.items():
            if names is None or key.name in names:
                router.enter(view, self.now)

    def tick(self, now: float) -> None:
        self.now = now
        for router in self.routers.values():
            router.tick(now)

    def ask(self, name: str, op: str, *args: Any, epoch: int = 1, deadline_s: float = 10.0) -> list[StoreReply]:
        """The (growing) list of replies to one operation of `name`."""
        replies: list[StoreReply] = []
        self.routers[member(name).key].request(epoch, op, list(args), self.now, deadline_s, replies.append)
        return replies


def test_owners_are_the_same_for_all_and_spread_evenly() -> None:
    places = tuple(map(member, "abcd"))
    counts = Counter(owner_of(str(key), places).name for key in range(4000))
    assert all(800 < counts[name] < 1200 for name in "abcd")
    assert [owner_of(str(k), places) for k in range(50)] == [owner_of(str(k), places[::-1]) for k in range(50)]


def test_losing_a_place_moves_only_its_keys() -> None:
    before, after = tuple(map(member, "abcd")), tuple(map(member, "abd"))
    moved = [k for k in map(str, range(500)) if owner_of(k, before) != owner_of(k, after)]
    assert all(owner_of(key, before).name == "c" for key in moved)


def test_value_set_by_one_is_got_by_another_wherever_it_lives() -> None:
    cluster = Cluster("abc")
    cluster.enter(view_of("abc"))
    for index in range(30):
        assert cluster.ask("a", "set", f"k{index}", b"v%d" % index)[0].ok
        assert cluster.ask("b", "get", f"k{index}") == [StoreReply(True, b"v%d" % index)]
    assert cluster.ask("c", "num_keys") == [StoreReply(True, 30)]


def test_operations_over_several_owners_come_back_in_the_order_of_the_keys() -> None:
    cluster = Cluster("abc")
    cluster.enter(view_of("abc"))
    keys = [f"k{index}" for index in range(20)]
    waiting = cluster.ask("b", "multi_get", keys)
    waiter = cluster.ask("c", "wait", keys)
    assert cluster.ask("a", "check", keys) == [StoreReply(True, False)]
    assert cluster.ask("a", "multi_set", keys, [key.encode() for key in keys])[0].ok
    assert waiting == [StoreReply(True, [key.encode() for key in keys])]
    assert waiter == [StoreReply(True)]
    assert cluster.ask("a", "check", keys) == [StoreReply(True, True)]
    assert cluster.ask("a", "multi_get", []) == [StoreReply(True, [])]
    assert cluster.ask("a", "check", []) == [StoreReply(True, True)]


def test_lost_call_is_repeated_and_done_once() -> None:
    cluster = Cluster("ab")
    cluster.enter(view_of("ab"))
    (key,) = keys_owned_by("b", "ab", 1)
    cluster.lose = lambda _: True
    replies = cluster.ask("a", "add", key, 5)
    cluster.lose = lambda message: isinstance(message, StoreResult)
    cluster.tick(1.0)
    assert replies == []
    cluster.lose = lambda _: False
    cluster.tick(2.0)
    assert replies == [StoreReply(True, 5)]
    assert cluster.ask("b", "get", key) == [StoreReply(True, b"5")]


def test_doubled_call_that_waits_is_answered_once() -> None:
    cluster = Cluster("ab")
    cluster.enter(view_of("ab"))
    (key,) = keys_owned_by("b", "ab", 1)
    replies = cluster.ask("a", "get", key)
    cluster.tick(1.0)
    cluster.tick(2.0)
    cluster.ask("b", "set", key, b"v")
    assert replies == [StoreReply(True, b"v")]
    assert sum(isinstance(message, StoreResult) for message in cluster.sent) == 1


def test_answer_from_a_member_that_is_not_the_owner_is_ignored() -> None:
    cluster = Cluster("abc")
    cluster.enter(view_of("abc"))
    (key,) = keys_owned_by("b", "abc", 1)
    replies = cluster.ask("a", "get", key)
    (call,) = [message for message in cluster.sent if isinstance(message, StoreCall)]
    forged = StoreResult(call.call, True, b"forged", "", False, False)
    cluster.routers[member("a").key].receive(member("c").key, forged, 0.0)
    assert replies == []


def test_deadline_is_kept_by_the_asking_side_when_the_owner_is_silent() -> None:
    cluster = Cluster("ab")
    cluster.enter(view_of("ab"))
    (key,) = keys_owned_by("b", "ab", 1)
    cluster.lose = lambda _: True
    replies = cluster.ask("a", "set", key, b"v", deadline_s=3.0)
    cluster.tick(3.0 + STORE_ANSWER_S - 0.1)
    assert replies == []
    cluster.tick(3.0 + STORE_ANSWER_S)
    assert replies == [StoreReply(False, error=f"b gave no answer about {key!r} in time", timed_out=True)]


def test_deadline_that_is_over_cuts_off_only_what_must_wait() -> None:
    cluster = Cluster("ab")
    cluster.enter(view_of("ab"))
    key, changed, missing = keys_owned_by("b", "ab", 3)
    cluster.ask("b", "set", changed, b"1")
    later: list[StoreCall | StoreResult] = []

    def keep(message: StoreCall | StoreResult) -> bool:
        later.append(message)
        return True

    cluster.lose = keep
    asked = [("set", key, b"v"), ("get", key), ("add", changed, 1), ("get", missing)]
    replies = [cluster.ask("a", *question, deadline_s=0.0) for question in asked]
    cluster.lose = lambda _: False
    cluster.tick(0.2)
    assert replies == [[]] * 4
    for message in later:
        cluster.routers[member("b").key].receive(member("a").key, message, cluster.now)
    assert [(reply.value, reply.timed_out) for (reply,) in replies] == [
        (None, False),
        (b"v", False),
        (2, False),
        (None, True),
    ]
    assert replies[3][0].error == f"nobody set {missing!r} in time"


def test_one_late_part_fails_the_whole_operation_once() -> None:
    cluster = Cluster("ab")
    cluster.enter(view_of("ab"))
    keys = keys_owned_by("a", "ab") + keys_owned_by("b", "ab")
    replies = cluster.ask("a", "wait", keys, deadline_s=3.0)
    cluster.tick(3.0)
    cluster.tick(4.0)
    (reply,) = replies
    assert reply.timed_out


def test_new_round_ends_what_waits_and_empties_the_store() -> None:
    cluster = Cluster("ab")
    cluster.enter(view_of("ab"))
    blocked = [cluster.ask(name, "get", f"never{index}") for name in "ab" for index in range(5)]
    cluster.ask("a", "set", "k", b"v")
    cluster.enter(view_of("ba", epoch=2, round_=2))
    assert all(len(replies) == 1 and replies[0].ended for replies in blocked)
    assert cluster.ask("a", "check", ["k"], epoch=2) == [StoreReply(True, False)]
    assert cluster.ask("a", "get", "k", epoch=1)[0].ended


def test_certain_death_of_a_place_ends_the_round_before_the_next_view_and_that_of_a_spare_does_not() -> None:
    cluster = Cluster("abc")
    cluster.enter(view_of("ab", spares="c"))
    waiting = cluster.ask("a", "get", "never")
    router = cluster.routers[member("a").key]
    router.lose(member("c").key)
    assert waiting == []
    router.lose(member("b").key)
    assert [reply.ended for reply in waiting] == [True]
    assert [reply.ended for reply in cluster.ask("a", "set", "key", b"")] == [True]
    cluster.enter(view_of("ac", 2, 2))
    assert [reply.ok for reply in cluster.ask("a", "set", "key", b"", epoch=2)] == [True]


def test_view_of_the_same_round_leaves_the_store_and_who_waits_alone() -> None:
    cluster = Cluster("ab")
    cluster.enter(view_of("ab"))
    cluster.ask("a", "set", "k", b"v")
    blocked = cluster.ask("b", "get", "later")
    cluster.enter(view_of("ab", epoch=2, round_=1, spares="c"))
    assert cluster.ask("b", "get", "k", epoch=1) == [StoreReply(True, b"v")]
    assert cluster.ask("b", "get", "k", epoch=2) == [StoreReply(True, b"v")]
    cluster.ask("a", "set", "later", b"w", epoch=2)
    assert blocked == [StoreReply(True, b"w")]


def test_member_that_is_ahead_waits_for_the_owner_to_learn_the_view() -> None:
    cluster = Cluster("ab")
    cluster.enter(view_of("ab"))
    (key,) = keys_owned_by("b", "ba", 1)
    cluster.enter(view_of("ba", epoch=2, round_=2), "a")
    replies = cluster.ask("a", "set", key, b"new", epoch=2)
    assert replies == []
    cluster.enter(view_of("ba", epoch=2, round_=2), "b")
    assert [reply.ok for reply in replies] == [True]


def test_operation_for_an_epoch_to_come_waits_for_its_view_or_its_deadline() -> None:
    cluster = Cluster("ab")
    before_any = cluster.ask("a", "set", "k", b"v", epoch=1)
    too_early = cluster.ask("a", "set", "k", b"v", epoch=9, deadline_s=2.0)
    cluster.enter(view_of("ab"))
    assert [reply.ok for reply in before_any] == [True]
    cluster.tick(2.0)
    (reply,) = too_early
    assert reply.timed_out
    assert "epoch 9 did not begin in time" in reply.error


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    cluster = Cluster("ab")
    cluster.enter(view_of("ab"))
    for op, args in (("get", [1]), ("get", []), ("wait", ["abc", 3]), ("multi_set", [["a"], []]), ("check", [[1]])):
        (reply,) = cluster.ask("a", op, *args)
        assert not reply.ok
        assert reply.error.startswith(f"store {op}: ")
    assert cluster.sent == []


def test_what_is_too_large_for_a_message_is_an_error_for_who_asked_and_no_crash() -> None:
    cluster = Cluster("abc")
    cluster.enter(view_of("abc"))
    (theirs,), (mine,) = keys_owned_by("b", "abc", 1), keys_owned_by("a", "abc", 1)

    def too_large(message: StoreCall | StoreResult) -> bool:
        content = message.args if isinstance(message, StoreCall) else message.value
        if "x" * 100 in str(content):
            raise ValueError("it has 117 bytes")
        return False

    cluster.ask("b", "set", theirs, b"x" * 100)
    cluster.ask("b", "compare_set", theirs, b"x" * 100, b"x" * 101)  # nobody has copies any more
    cluster.lose = too_large
    (reply,) = cluster.ask("a", "get", theirs)
    assert not reply.ok
    assert "the answer is too large: it has 117 bytes" in reply.error
    (reply,) = cluster.ask("a", "multi_set", [mine, theirs], [b"1", b"x" * 100])
    assert not reply.ok
    assert "store multi_set: it has 117 bytes" in reply.error
    assert cluster.ask("a", "check", [mine])[0].ok
    cluster.lose = lambda _: False
    keys = keys_owned_by("a", "abc")
    for key in keys:
        cluster.ask("a", "set", key, b"x" * (6 << 20))
    for asking in "ab":
        (reply,) = cluster.ask(asking, "multi_get", keys)
        assert "ask for fewer keys" in reply.error


def test_nonsense_from_an_owner_is_an_error_and_no_crash() -> None:
    cluster = Cluster("ab")
    cluster.enter(view_of("ab"))
    keys = keys_owned_by("b", "ab", 2)
    replies = cluster.ask("a", "multi_get", keys)
    (call,) = [message for message in cluster.sent if isinstance(message, StoreCall)]
    cluster.routers[member("a").key].receive(member("b").key, StoreResult(call.call, True, 7, "", False, False), 0.0)
    assert replies == [StoreReply(False, error="b gave no proper answer to multi_get")]


def test_next_deadline_is_never_in_the_past_after_a_tick() -> None:
    cluster = Cluster("ab")
    cluster.enter(view_of("ab"))
    cluster.lose = lambda _: True
    for name in "ab":
        cluster.ask(name, "wait", [f"k{index}" for index in range(6)], deadline_s=5.0)
    router = cluster.routers[member("a").key]
    now = 0.0
    while router.next_deadline_s() < float("inf"):
        assert router.next_deadline_s() > now
        now = router.next_deadline_s()
        cluster.tick(now)
    assert now == 5.0


def test_end_of_the_run_frees_blocked_early_and_later_calls() -> None:
    cluster = Cluster("ab")
    router = cluster.routers[member("a").key]
    replies: list[StoreReply] = []
    router.enter(view_of("ab"), 0.0)
    for key in (*keys_owned_by("a", "ab", 1), *keys_owned_by("b", "ab", 1)):
        router.request(1, "get", [key], 0.0, 60.0, replies.append)
    router.request(7, "get", ["key"], 0.0, 60.0, replies.append)
    assert not replies
    router.end()
    router.request(1, "set", ["key", b""], 0.0, 60.0, replies.append)
    assert [reply.ended for reply in replies] == [True] * 4
