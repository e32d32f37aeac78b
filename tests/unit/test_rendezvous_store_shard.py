"""One member's keys of one round: operations, blocked calls, deadlines, the end."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rendezvous import store_shard
from rendezvous.store_shard import ENDED, StoreShard
from rendezvous.types import StoreReply


def call(shard: StoreShard, op: str, *args: Any, token: str = "t", deadline_s: float = 10.0, now: float = 0.0) -> Any:
    """The value of an operation that is answered at once."""
    replies = shard.call(token, op, list(args), deadline_s, now)
    (reply,) = [reply for whose, reply in replies if whose == token]
    assert reply.ok, reply.error
    return reply.value


@pytest.mark.parametrize(
    ("steps", "op", "args", "value"),
    [
        ([("set", "k", b"v")], "get", ["k"], b"v"),
        ([("set", "k", b"v"), ("set", "k", b"w")], "get", ["k"], b"w"),
        ([("set", "k", b"")], "get", ["k"], b""),
        ([], "add", ["n", 5], 5),
        ([("add", "n", 5)], "add", ["n", -7], -2),
        ([("add", "n", 5)], "get", ["n"], b"5"),
        ([("set", "n", b"40")], "add", ["n", 2], 42),
        ([], "compare_set", ["k", b"", b"new"], b"new"),
        ([], "compare_set", ["k", b"old", b"new"], b"old"),
        ([("set", "k", b"old")], "compare_set", ["k", b"old", b"new"], b"new"),
        ([("set", "k", b"other")], "compare_set", ["k", b"old", b"new"], b"other"),
        ([("set", "k", b"a")], "check", [["k"]], True),
        ([("set", "k", b"a")], "check", [["k", "l"]], False),
        ([], "check", [[]], True),
        ([("set", "k", b"a")], "delete_key", ["k"], True),
        ([], "delete_key", ["k"], False),
        ([("set", "k", b"a"), ("delete_key", "k")], "check", [["k"]], False),
        ([("set", "k", b"a"), ("add", "n", 1)], "num_keys", [], 2),
        ([("multi_set", ["a", "b"], [b"1", b"2"])], "multi_get", [["b", "a"]], [b"2", b"1"]),
        ([("append", "k", b"a"), ("append", "k", b"b")], "get", ["k"], b"ab"),
        ([("set", "k", b"a")], "wait", [["k"]], None),
        ([("queue_push", "q", b"1"), ("queue_push", "q", b"2")], "queue_pop", ["q", True], b"1"),
        ([("queue_push", "q", b"1"), ("queue_pop", "q", True)], "queue_pop", ["q", False], None),
        ([("queue_push", "q", b"1"), ("queue_push", "q", b"2")], "queue_len", ["q"], 2),
        ([], "queue_len", ["q"], 0),
        ([("queue_push", "q", b"1")], "check", [["q"]], True),
        ([("queue_push", "q", b"1"), ("queue_pop", "q", False)], "check", [["q"]], False),
        ([("queue_push", "q", b"1")], "wait", [["q"]], None),
        ([("queue_push", "q", b"1"), ("set", "k", b"a")], "num_keys", [], 2),
        ([("queue_push", "q", b"1"), ("set", "k", b"a")], "list_keys", [], ["k"]),
    ],
)
def test_operation_gives_what_torch_stores_give(
    steps: list[tuple[Any, ...]], op: str, args: list[Any], value: Any
) -> None:
    shard = StoreShard()
    for step in steps:
        call(shard, step[0], *step[1:])
    assert call(shard, op, *args) == value


def test_failed_compare_set_changes_nothing() -> None:
    shard = StoreShard()
    call(shard, "compare_set", "k", b"expected", b"new")
    assert call(shard, "check", ["k"]) is False


@pytest.mark.parametrize(
    ("op", "args", "value"),
    [("get", ["k"], b"v"), ("wait", [["k"]], None), ("multi_get", [["k", "l"]], [b"v", b"w"])],
)
def test_blocked_call_is_answered_when_the_last_key_is_set(op: str, args: list[Any], value: Any) -> None:
    shard = StoreShard()
    call(shard, "set", "l", b"w")
    assert shard.call("waiter", op, args, 10.0, 0.0) == []
    assert shard.is_waiting("waiter")
    replies = shard.call("setter", "set", ["k", b"v"], 10.0, 1.0)
    assert replies == [("setter", StoreReply(True)), ("waiter", StoreReply(True, value))]
    assert not shard.is_waiting("waiter")


@pytest.mark.parametrize(
    ("op", "args"),
    [("append", ["k", b"v"]), ("add", ["k", 1]), ("compare_set", ["k", b"", b"v"]), ("multi_set", [["k"], [b"v"]])],
)
def test_every_operation_that_writes_wakes_who_waits(op: str, args: list[Any]) -> None:
    shard = StoreShard()
    shard.call("waiter", "wait", [["k"]], 10.0, 0.0)
    assert ("waiter", StoreReply(True)) in shard.call("writer", op, args, 10.0, 0.0)


def test_late_call_is_told_which_keys_are_missing() -> None:
    shard = StoreShard()
    call(shard, "set", "here", b"")
    shard.call("waiter", "wait", [["here", "absent"]], 5.0, 0.0)
    assert shard.next_deadline_s() == 5.0
    assert shard.expire(4.9) == []
    ((token, reply),) = shard.expire(5.0)
    assert token == "waiter"
    assert reply == StoreReply(False, error="nobody set 'absent' in time", timed_out=True)
    assert shard.next_deadline_s() == float("inf")


def test_value_of_a_key_that_is_only_a_queue_is_named_when_it_is_late() -> None:
    shard = StoreShard()
    call(shard, "queue_push", "q", b"v", token="p")
    shard.call("g", "get", ["q"], 1.0, 0.0)
    assert shard.expire(1.0) == [("g", StoreReply(False, error="nobody set 'q' in time", timed_out=True))]


def test_deadline_that_has_passed_already_times_out_at_once() -> None:
    ((_, reply),) = StoreShard().call("waiter", "get", ["k"], 1.0, 2.0)
    assert reply.timed_out


def test_end_frees_everybody_and_refuses_what_comes_later() -> None:
    shard = StoreShard()
    for token in ("one", "two"):
        shard.call(token, "get", [token], 10.0, 0.0)
    assert sorted(shard.end()) == [("one", ENDED), ("two", ENDED)]
    assert shard.call("three", "set", ["k", b"v"], 10.0, 0.0) == [("three", ENDED)]


def test_cancelled_call_is_not_answered() -> None:
    shard = StoreShard()
    shard.call("waiter", "get", ["k"], 10.0, 0.0)
    shard.cancel("waiter")
    assert shard.call("setter", "set", ["k", b"v"], 10.0, 0.0) == [("setter", StoreReply(True))]
    assert shard.num_waiting == 0


@pytest.mark.parametrize("seed", range(30))
def test_calls_are_answered_as_soon_as_all_their_keys_are_there(seed: int) -> None:
    """Keys come and go in any order; whoever waits is answered exactly when a look at all that wait says so.

    `wait` needs each key to have been there once since it began, reads need all of them at one time.
    """
    rng = random.Random(seed)
    keys = [f"k{index}" for index in range(6)]
    shard, present, waiting, of_wait = StoreShard(), set[str](), dict[int, set[str]](), set[int]()
    for token in range(200):
        wanted = rng.sample(keys, rng.randint(1, 4))
        match rng.choice(("wait", "multi_get", "get", "set", "set", "multi_set", "delete_key", "cancel", "expire")):
            case "cancel":
                gone = rng.choice([-1, *waiting])
                shard.cancel(gone)
                waiting.pop(gone, None)
                continue
            case "expire":
                late = [old for old in waiting if old < token - 60]
                assert sorted(whose for whose, _ in shard.expire(token - 60.5)) == late
                for old in late:
                    del waiting[old]
                continue
            case "set" | "multi_set" as op:
                values: list[Any] = [wanted, [b""] * len(wanted)] if op == "multi_set" else [wanted[0], b""]
                present.update(wanted if op == "multi_set" else wanted[:1])
                replies = shard.call(token, op, values, token, token - 1.0)
            case "delete_key" as op:
                present.discard(wanted[0])
                replies = shard.call(token, op, wanted[:1], token, token - 1.0)
            case op:
                waiting[token] = set(wanted[:1] if op == "get" else wanted)
                of_wait |= {token} if op == "wait" else set()
                replies = shard.call(token, op, wanted[:1] if op == "get" else [wanted], token, token - 1.0)
        for whose in of_wait & waiting.keys():
            waiting[whose] -= present
        ready = [whose for whose, needs in waiting.items() if needs <= present]
        assert sorted(whose for whose, _ in replies if whose != token or token in ready) == ready
        for whose in ready:
            del waiting[whose]
    assert shard.num_waiting == len(waiting)


@pytest.mark.parametrize(
    ("op", "args", "text"),
    [
        ("set", ["k", "text"], "a value must be bytes"),
        ("set", [1, b"v"], "a key must be a string"),
        ("set", ["k"], "no such operation, or wrong arguments"),
        ("multi_set", [["a"], []], "no such operation, or wrong arguments"),
        ("add", ["k", "1"], "no such operation, or wrong arguments"),
        ("explode", [], "no such operation, or wrong arguments"),
        ("set", ["k" * 9000, b""], "a key must be a string of at most"),
        ("wait", [[1]], "a key must be a string"),
        ("queue_pop", [["k"], False], "a key must be a string"),
        ("add", ["word", 1], "is no number"),
        ("add", ["n", 2**63 - 1], "leaves 64 bits"),
    ],
)
def test_wrong_call_is_answered_with_a_sentence(op: str, args: list[Any], text: str) -> None:
    shard = StoreShard()
    call(shard, "set", "word", b"abc")
    call(shard, "add", "n", 1)
    ((_, reply),) = shard.call("t", op, args, 10.0, 0.0)
    assert not reply.ok
    assert not reply.timed_out
    assert text in reply.error
    assert reply.error.startswith(f"store {op}: ")


def test_shard_stops_growing_at_its_limit_and_deleting_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_shard, "MAX_SHARD_BYTES", 20)
    shard = StoreShard()
    call(shard, "set", "k", b"x" * 15)
    ((_, reply),) = shard.call("t", "set", ["l", b"x" * 10], 10.0, 0.0)
    assert "the shard is full" in reply.error
    call(shard, "set", "k", b"x" * 5)
    call(shard, "set", "l", b"x" * 10)
    call(shard, "delete_key", "l")
    call(shard, "set", "l", b"x" * 10)


def test_number_of_blocked_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_shard, "MAX_WAITING", 1)
    shard = StoreShard()
    shard.call("one", "get", ["k"], 10.0, 0.0)
    ((_, reply),) = shard.call("two", "get", ["k"], 10.0, 0.0)
    assert "too many calls wait" in reply.error
