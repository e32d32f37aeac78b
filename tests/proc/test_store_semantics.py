"""What programs rely on in torch's stores, run against torch's own TCPStore and against ours: both must agree.

Ours is an epoch's store of three real nodes, so keys lie on different members; each client speaks to its own node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _store_based_barrier
from torch.distributed.elastic.utils import store as elastic_store

from ports import free_ports
from rendezvous.config import Config
from rendezvous.node import Node
from rendezvous.node_store import NodeChannel
from rendezvous.store import EpochStore, StoreEnded, StoreError
from rendezvous.types import Member, MemberKey, PassiveApplication, View

LONG = timedelta(seconds=30)
SHORT = timedelta(seconds=0.2)
NUM_CLIENTS = 3


class Quiet(PassiveApplication):
    """An application that only waits for its first view, and wants a new round whenever it is asked."""

    def __init__(self) -> None:
        self.entered = threading.Event()

    def decide(
        self, previous: View | None, places: Sequence[Member], ballots: Mapping[MemberKey, dict[str, Any]]
    ) -> tuple[bool, dict[str, Any]]:
        return previous is not None, {}

    def on_view(self, view: View) -> None:
        self.entered.set()


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    contacts = tuple(f"127.0.0.1:{port}" for port in free_ports(NUM_CLIENTS))
    made, applications, threads = [], [], []
    for index, bind in enumerate(contacts):
        applications.append(Quiet())
        config = Config("stores", f"n{index}", bind, contacts, num_nodes_min=3, num_nodes_max=3)
        made.append(Node(config, applications[-1]))
        threads.append(threading.Thread(target=made[-1].run, name=f"node {index}"))
        threads[-1].start()
    assert all(application.entered.wait(30) for application in applications)
    yield made
    for node in made:
        node.call_soon_threadsafe(node.stop)
    for node, thread in zip(made, threads, strict=True):
        thread.join(30)
        node.close()


@pytest.fixture(scope="module")
def stores_of(nodes: list[Node]) -> dict[str, list[dist.Store]]:
    (port,) = free_ports(1)
    server = dist.TCPStore("127.0.0.1", port, None, True, LONG, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", port, None, False, LONG, wait_for_workers=False) for _ in range(2)]
    view = nodes[0].view
    assert view is not None
    ours: list[dist.Store] = [EpochStore(NodeChannel(node), view.epoch, LONG) for node in nodes]
    return {"TCPStore": [server, *clients], "EpochStore": ours}


@pytest.fixture(params=["TCPStore", "EpochStore"])
def stores(request: pytest.FixtureRequest, stores_of: dict[str, list[dist.Store]]) -> list[dist.Store]:
    """One client each of three processes' worth of stores, on keys of their own."""
    for store in stores_of[request.param]:
        store.set_timeout(LONG)
    return stores_of[request.param]


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """No other test uses it."""
    return f"{request.node.name}/"


def soon(*actions: Callable[[], object]) -> list[Any]:
    """Everything at once, each on a thread of its own; the results in order."""
    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(60) for future in [pool.submit(action) for action in actions]]


def settle(stores: list[dist.Store]) -> None:
    """TCPStore's set, append, push and multi_set do not wait for the server: let what was sent arrive."""
    for store in stores:
        store.add("settle", 0)


@pytest.mark.parametrize("value", ["text", b"bytes", b"\x00\xff\x80", "", "x" * 2**20, "ü ∑"], ids=repr)
def test_value_that_one_sets_all_get(stores: list[dist.Store], key: str, value: str | bytes) -> None:
    stores[0].set(key[:80], value)
    wanted = value.encode() if isinstance(value, str) else value
    assert [store.get(key[:80]) for store in stores] == [wanted] * NUM_CLIENTS


def test_second_set_replaces_the_first(stores: list[dist.Store], key: str) -> None:
    stores[0].set(key, "one")
    settle(stores)
    stores[1].set(key, "two")
    settle(stores)
    assert stores[2].get(key) == b"two"


def test_get_waits_until_somebody_sets(stores: list[dist.Store], key: str) -> None:
    def set_later() -> None:
        time.sleep(0.2)
        stores[1].set(key, "late")

    assert soon(lambda: stores[0].get(key), lambda: stores[2].get(key), set_later)[:2] == [b"late"] * 2


def test_get_of_what_nobody_sets_fails_at_the_timeout_and_names_the_key(stores: list[dist.Store], key: str) -> None:
    stores[0].set_timeout(SHORT)
    assert stores[0].timeout == SHORT
    began_s = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="absent"):
        stores[0].get(f"{key}absent")
    assert time.monotonic() - began_s >= SHORT.total_seconds() - 0.01
    stores[0].set(key, "still works")
    assert stores[0].get(key) == b"still works"


@pytest.mark.parametrize("timeout", [timedelta(days=30000), timedelta.max, timedelta(seconds=-1)], ids=str)
def test_timeout_that_is_very_long_or_below_zero_is_no_limit(
    stores: list[dist.Store], key: str, timeout: timedelta
) -> None:
    stores[0].set_timeout(timeout)
    keys = [f"{key}{index}" for index in range(4)]  # of several owners
    for name in keys:
        stores[0].set(name, "v")
    assert stores[0].get(f"{key}0") == b"v"
    assert soon(lambda: stores[0].get(f"{key}late"), lambda: stores[1].set(f"{key}late", "w"))[0] == b"w"


def test_timeout_of_zero_cuts_off_only_what_must_wait(stores: list[dist.Store], key: str) -> None:
    keys = [f"{key}{index}" for index in range(8)]  # of several owners
    stores[0].set_timeout(timedelta(0))
    for name in keys:
        stores[0].set(name, "v")
        assert stores[0].add(f"{name}counter", 2) == 2
    assert stores[0].check(keys)
    with pytest.raises(dist.DistStoreError):
        stores[0].get(f"{key}absent")


def test_largest_value_has_eight_mebibytes(stores: list[dist.Store], key: str) -> None:
    stores[0].set(key, b"\0" * (8 << 20))
    assert len(stores[1].get(key)) == 8 << 20


def test_wait_ends_when_all_keys_are_there_and_not_before(stores: list[dist.Store], key: str) -> None:
    keys = [f"{key}{index}" for index in range(6)]
    for name in keys[:-1]:
        stores[0].set(name, "")
    with pytest.raises(dist.DistStoreError):
        stores[1].wait(keys, SHORT)
    soon(lambda: stores[1].wait(keys), lambda: stores[2].wait(keys, LONG), lambda: stores[0].set(keys[-1], ""))
    stores[0].wait([])


def test_wait_is_over_for_a_key_that_was_there_once_though_it_is_deleted_meanwhile(
    stores: list[dist.Store], key: str
) -> None:
    keys = [f"{key}{index}" for index in range(6)]  # several of one owner
    for name in keys[:2]:
        stores[0].set(name, "")

    def come_and_go() -> None:
        time.sleep(0.2)
        for name in keys[1:-1][::-1]:
            stores[1].set(name, "")
            settle(stores[1:])
        for name in keys[:-1]:
            assert stores[2].delete_key(name)
        stores[2].set(keys[-1], "")

    soon(lambda: stores[0].wait(keys), lambda: stores[1].clone().wait(keys), come_and_go)


def test_counter_begins_at_zero_may_be_negative_and_is_read_as_text(stores: list[dist.Store], key: str) -> None:
    assert stores[0].add(key, 0) == 0
    assert stores[1].add(key, 5) == 5
    assert stores[2].add(key, -12) == -7
    assert stores[0].get(key) == b"-7"
    stores[0].set(key, "40")
    settle(stores)
    assert stores[1].add(key, 2) == 42


def test_counter_loses_no_addition_of_many_clients(stores: list[dist.Store], key: str) -> None:
    def count(store: dist.Store) -> list[int]:
        return [store.add(key, 1) for _ in range(50)]

    seen = soon(*(lambda store=store: count(store) for store in stores))
    assert sorted(number for numbers in seen for number in numbers) == list(range(1, 50 * NUM_CLIENTS + 1))


def test_compare_set_swaps_only_what_was_expected(stores: list[dist.Store], key: str) -> None:
    assert stores[0].compare_set(key, "something", "new") == b"something"
    assert not stores[0].check([key])
    assert stores[0].compare_set(key, "", "first") == b"first"
    assert stores[1].compare_set(key, "wrong", "second") == b"first"
    assert stores[1].compare_set(key, "first", "second") == b"second"
    assert stores[2].get(key) == b"second"


def test_compare_set_has_one_winner(stores: list[dist.Store], key: str) -> None:
    names = [f"client {index}" for index in range(NUM_CLIENTS)]
    answers = soon(*(lambda s=s, n=n: s.compare_set(key, "", n) for s, n in zip(stores, names, strict=True)))
    assert len(set(answers)) == 1
    assert stores[0].get(key) == answers[0]


def test_check_tells_whether_all_keys_are_there(stores: list[dist.Store], key: str) -> None:
    for index in range(4):
        stores[index % NUM_CLIENTS].set(f"{key}{index}", "")
    settle(stores)
    assert stores[1].check([f"{key}{index}" for index in range(4)])
    assert not stores[1].check([f"{key}{index}" for index in range(5)])


def test_deleted_key_is_gone_for_everybody_and_may_be_set_again(stores: list[dist.Store], key: str) -> None:
    stores[0].set(key, "old")
    settle(stores)
    assert stores[1].delete_key(key)
    assert not stores[2].delete_key(key)
    assert not stores[0].check([key])
    stores[2].set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError):
        stores[2].get(key)
    stores[1].set(key, "new")
    assert stores[2].get(key) == b"new"


def test_number_of_keys_counts_sets_counters_and_deletions(stores: list[dist.Store], key: str) -> None:
    settle(stores)
    before = stores[0].num_keys()
    for index in range(5):
        stores[index % NUM_CLIENTS].set(f"{key}{index}", "x")
    stores[0].add(f"{key}counter", 1)
    settle(stores)
    assert stores[1].num_keys() == before + 6
    stores[0].delete_key(f"{key}3")
    assert stores[2].num_keys() == before + 5


def test_append_creates_and_extends(stores: list[dist.Store], key: str) -> None:
    assert all(store.has_extended_api() for store in stores)
    for store, part in zip(stores, ("po", "ta", b"to"), strict=True):
        store.append(key, part)
        settle(stores)
    assert stores[0].get(key) == b"potato"


def test_several_values_are_set_and_read_at_once_in_the_order_asked_for(stores: list[dist.Store], key: str) -> None:
    keys = [f"{key}{index}" for index in range(7)]
    stores[0].multi_set(keys, [str(index) for index in range(7)])
    assert stores[1].multi_get(keys[::-1]) == [str(index).encode() for index in reversed(range(7))]
    with pytest.raises(RuntimeError):
        stores[0].multi_set(keys, ["too few"])


def test_several_values_are_waited_for_together(stores: list[dist.Store], key: str) -> None:
    keys = [f"{key}{index}" for index in range(4)]
    found, *_ = soon(
        lambda: stores[0].multi_get(keys),
        lambda: stores[1].multi_set(keys[:2], ["0", "1"]),
        lambda: stores[2].multi_set(keys[2:], ["2", "3"]),
    )
    assert found == [b"0", b"1", b"2", b"3"]
    stores[0].set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError):
        stores[0].multi_get([keys[0], f"{key}absent"])


def test_queue_gives_each_value_to_one_in_the_order_pushed(stores: list[dist.Store], key: str) -> None:
    for index in range(4):
        stores[index % NUM_CLIENTS].queue_push(key, f"{index}")
        settle(stores)
    assert stores[0].queue_len(key) == 4
    assert stores[1].check([key])
    assert [stores[index % NUM_CLIENTS].queue_pop(key) for index in range(4)] == [b"0", b"1", b"2", b"3"]
    assert stores[2].queue_len(key) == 0


def test_empty_queue_is_waited_for_or_said_to_be_empty(stores: list[dist.Store], key: str) -> None:
    with pytest.raises(dist.QueueEmptyError):
        stores[0].queue_pop(key, False)
    popped = soon(
        lambda: stores[0].queue_pop(key),
        lambda: stores[1].queue_pop(key),
        lambda: [stores[2].queue_push(key, value) for value in ("a", "b")],
    )
    assert sorted(popped[:2]) == [b"a", b"b"]
    stores[0].set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError):
        stores[0].queue_pop(key)


def test_listed_keys_are_those_that_were_set(stores: list[dist.Store], key: str) -> None:
    for index in range(5):
        stores[index % NUM_CLIENTS].set(f"{key}{index}", "x")
    settle(stores)
    stores[0].delete_key(f"{key}2")
    found = [name for name in stores[1].list_keys() if name.startswith(key)]
    assert sorted(found) == [f"{key}{index}" for index in (0, 1, 3, 4)]


def test_clone_is_another_client_of_the_same_store_with_a_timeout_of_its_own(
    stores: list[dist.Store], key: str
) -> None:
    clone = stores[0].clone()
    assert clone is not stores[0]
    clone.set_timeout(SHORT)
    assert stores[0].timeout == LONG
    blocked, _ = soon(lambda: stores[0].get(key), lambda: clone.set(key, "through the clone"))
    assert blocked == b"through the clone"


def test_prefixes_keep_keys_apart_and_nest(stores: list[dist.Store], key: str) -> None:
    one, two = dist.PrefixStore(f"{key}1", stores[0]), dist.PrefixStore(f"{key}2", stores[1])
    inner = dist.PrefixStore("inner", dist.PrefixStore(f"{key}1", stores[2]))
    one.set("k", "one")
    two.set("k", "two")
    inner.set("k", "inner")
    settle(stores)
    assert (one.get("k"), two.get("k"), one.get("inner/k")) == (b"one", b"two", b"inner")
    assert stores[0].get(f"{key}1/inner/k") == b"inner"
    assert (one.add("n", 1), two.add("n", 5), one.add("n", 1)) == (1, 5, 2)
    assert two.check(["k"])
    assert not two.check(["inner/k"])
    assert one.delete_key("k")
    assert two.get("k") == b"two"
    two.multi_set(["x", "y"], ["1", "2"])
    assert two.multi_get(["y", "x"]) == [b"2", b"1"]
    assert two.compare_set("x", "1", "3") == b"3"
    two.append("x", "4")
    settle(stores)
    assert stores[2].get(f"{key}2/x") == b"34"


def test_timeout_of_a_prefix_store_is_that_of_its_store(stores: list[dist.Store], key: str) -> None:
    prefixed = dist.PrefixStore(key, stores[0])
    prefixed.set_timeout(SHORT)
    for blocked in (lambda: prefixed.get("absent"), lambda: prefixed.wait(["absent"])):
        with pytest.raises(dist.DistStoreError):
            blocked()
    prefixed.set_timeout(LONG)
    soon(lambda: prefixed.wait(["there"]), lambda: dist.PrefixStore(key, stores[1]).set("there", ""))


def test_barrier_of_the_store_lets_nobody_through_before_the_last(stores: list[dist.Store], key: str) -> None:
    passed: list[int] = []

    def arrive(index: int) -> None:
        if index == NUM_CLIENTS - 1:
            time.sleep(0.2)
            assert not passed
        stores[index].barrier(key, NUM_CLIENTS, LONG)
        passed.append(index)

    soon(*(lambda index=index: arrive(index) for index in range(NUM_CLIENTS)))
    assert sorted(passed) == [0, 1, 2]
    with pytest.raises(dist.DistStoreError):
        stores[0].barrier(f"{key}alone", NUM_CLIENTS, SHORT)


def test_exchange_of_elastic_agents_gives_everybody_everything_in_order(stores: list[dist.Store], key: str) -> None:
    data = [f"agent {index}".encode() for index in range(NUM_CLIENTS)]
    found = soon(
        *(
            lambda rank=rank: elastic_store.synchronize(stores[rank], data[rank], rank, NUM_CLIENTS, key, 30.0)
            for rank in range(NUM_CLIENTS)
        )
    )
    assert found == [data] * NUM_CLIENTS


def test_barrier_of_elastic_agents_passes_together_and_fails_without_one(stores: list[dist.Store], key: str) -> None:
    def arrive(rank: int, prefix: str, timeout_s: float) -> None:
        elastic_store.barrier(stores[rank], NUM_CLIENTS, prefix, timeout_s)

    soon(*(lambda rank=rank: arrive(rank, key, 30.0) for rank in range(NUM_CLIENTS)))
    with pytest.raises(dist.DistStoreError):
        soon(*(lambda rank=rank: arrive(rank, f"{key}two of three", 0.3) for rank in range(NUM_CLIENTS - 1)))


def test_barrier_of_new_groups_passes_when_all_have_come(stores: list[dist.Store], key: str) -> None:
    def arrive(rank: int) -> None:
        _store_based_barrier(rank, stores[rank], key, NUM_CLIENTS, LONG)

    soon(*(lambda rank=rank: arrive(rank) for rank in range(NUM_CLIENTS)))


def test_arguments_that_no_message_can_carry_are_errors_of_the_caller_alone(nodes: list[Node]) -> None:
    store = EpochStore(NodeChannel(nodes[0]), 1, LONG)
    for call in (
        lambda: store.set("\ud800", "1"),
        lambda: store.set("odd", "\ud800"),
        lambda: store.set("odd", 5),  # type: ignore[arg-type]
        lambda: store.wait("odd"),
        lambda: store.add("odd", 2**70),
        lambda: store.add("odd", 1.5),  # type: ignore[arg-type]
        lambda: store.set("odd", bytes(20 << 20)),
        lambda: store.multi_set([f"odd{n}" for n in range(30)], [bytes(6 << 20)] * 30),  # 3 of another node's
    ):
        with pytest.raises(dist.DistStoreError):
            call()
    store.set(b"odd", bytearray(b"1"))  # type: ignore[arg-type]
    assert [EpochStore(NodeChannel(node), 1, LONG).get("odd") for node in nodes] == [b"1"] * len(nodes)


def test_value_that_is_too_long_is_refused_before_any_agent_sees_it() -> None:
    class Nobody:
        def request(self, *_: Any) -> Any:
            raise AssertionError("sent")

    with pytest.raises(StoreError, match="has 104857600 bytes, and at most 8388608 are allowed"):
        EpochStore(Nobody(), 1).multi_set(["a", "b"], [b"", bytes(100 << 20)])


def test_end_of_the_round_frees_every_kind_of_wait_at_once(nodes: list[Node]) -> None:
    """Last, because it ends the store of this file."""
    view = nodes[0].view
    assert view is not None
    stores = [EpochStore(NodeChannel(node), view.epoch, LONG) for node in nodes]
    for index in range(9):
        assert not stores[0].check([f"never{index}"])
    waits = [
        lambda: stores[0].get("never0"),
        lambda: stores[1].wait(["never1", "never2"]),
        lambda: stores[2].multi_get(["never3", "never4"]),
        lambda: stores[0].queue_pop("never5"),
        lambda: dist.PrefixStore("p", stores[1]).wait(["never6"]),
        lambda: stores[2].barrier("never7", 2, LONG),
    ]
    freed: list[str] = []

    def blocked(wait: Callable[[], object]) -> None:
        with pytest.raises(StoreEnded):
            wait()
        freed.append("freed")

    threads = [threading.Thread(target=blocked, args=(wait,)) for wait in waits]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert not freed
    began_s = time.monotonic()
    nodes[0].call_soon_threadsafe(lambda: nodes[0].propose("the next round"))
    for thread in threads:
        thread.join(20)
    assert len(freed) == len(waits)
    assert time.monotonic() - began_s < LONG.total_seconds() / 2
    with pytest.raises(StoreEnded):
        stores[0].set("late", "x")
