"""durable/session and division: one save over several nodes, with messages lost, nodes dead and storage failing."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from p2pstate.durable.division import Share, divide_version
from p2pstate.durable.session import Action, Begin, End, Publish, Session, State, Tell, Write, limit_s
from p2pstate.types import Part, SlotRecord, Version

V = Version(3, 40)
NODES = ("a", "b", "c")
HOME = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
DEADLINE = 30.0


def record(node: str, slot: int, part: Part, num_sets: int = 0, version: Version = V) -> SlotRecord:
    return SlotRecord(node, slot, part, version, 100, "00", num_sets)


def vault(node: str, *, shared: bool = False) -> list[SlotRecord]:
    """A node's own shards, its wards' (the next node's), and its copy of what all ranks share."""
    ward = NODES[(NODES.index(node) + 1) % 3]
    own = [rank for rank, home in HOME.items() if home == node]
    wards = [rank for rank, home in HOME.items() if home == ward]
    found = [record(node, slot, Part.own(rank), int(shared)) for slot, rank in enumerate(own + wards, start=1)]
    if shared:
        found += [record(node, 10 + piece, Part.shared((0, 1, 2, 3, 4, 5), piece, 2)) for piece in range(2)]
    return found


def test_every_rank_is_written_by_its_own_node() -> None:
    shares = divide_version(HOME, [r for node in NODES for r in vault(node)])
    assert not isinstance(shares, str)
    written = {node: [share.part.members[0] for share in given] for node, given in shares.items()}
    assert written == {"a": [0, 1], "b": [2, 3], "c": [4, 5]}


def test_shards_of_a_dead_node_are_written_by_the_one_that_keeps_their_copies() -> None:
    shares = divide_version(HOME, [r for node in ("a", "c") for r in vault(node)])
    assert not isinstance(shares, str)
    assert sorted(share.part.members[0] for share in shares["a"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(4))
def test_division_depends_on_no_order_of_the_records(seed: int) -> None:
    records = [r for node in NODES for r in vault(node, shared=True)]
    shuffled = random.Random(seed).sample(records, len(records))
    assert divide_version(HOME, shuffled) == divide_version(HOME, records)


def test_version_without_some_shard_says_which() -> None:
    assert divide_version(HOME, vault("a")) == "no live node has shard 4"


def test_shared_leaves_are_divided_over_the_nodes_that_have_all_of_them() -> None:
    records = [r for node in NODES for r in vault(node, shared=True)]
    records.remove(record("b", 11, Part.shared((0, 1, 2, 3, 4, 5), 1, 2)))  # b has only half
    shares = divide_version(HOME, records)
    assert not isinstance(shares, str)
    shared = {node: [s for s in given if s.part.kind == "shared"] for node, given in shares.items()}
    assert [(s.writer, s.num_writers) for s in shared["a"]] == [(0, 2), (0, 2)]
    assert shared["b"] == []
    assert [(s.writer, s.num_writers) for s in shared["c"]] == [(1, 2), (1, 2)]


def test_version_whose_shared_leaves_are_incomplete_everywhere_is_not_whole() -> None:
    records = [r for node in NODES for r in vault(node, shared=True) if r.part.piece == 0]
    assert divide_version(HOME, records) == "no live node has all of what rank 0 shares with others"


def test_share_survives_its_packed_form() -> None:
    share = Share(7, Part.shared((0, 2), 1, 2), 1, 3)
    assert Share.unpack(share.pack()) == share


@dataclass
class Storage:
    """What the nodes' writers do, and when they fail."""

    fail: dict[tuple[str, str], str] = field(default_factory=dict)  # (node, order) -> error
    names: list[str] = field(default_factory=list)
    written: Counter[int] = field(default_factory=Counter)  # rank -> how often
    published: list[dict[int, str]] = field(default_factory=list)


class Network:
    """Sessions of all nodes; messages are lost as ``lose`` says."""

    def __init__(self, storage: Storage, *, seed: int = 0, loss: float = 0.0) -> None:
        self.storage = storage
        self.random = random.Random(seed)
        self.loss = loss
        self.dead: set[str] = set()
        self.ends: dict[str, End] = {}
        self.sessions = {
            node: Session(V, "a", node, HOME, {n: p for p, n in enumerate(NODES)}, vault(node), DEADLINE)
            for node in NODES
        }
        self.messages: list[tuple[str, str, dict[str, Any]]] = []
        self.now = 0.0

    def start(self, *nodes: str) -> None:
        for node in nodes or NODES:
            self.do(node, self.sessions[node].start())

    def do(self, node: str, actions: list[Action]) -> None:
        session = self.sessions[node]
        for action in actions:
            match action:
                case Tell():
                    to = [action.to] if action.to else [other for other in NODES if other != node]
                    self.messages += [(node, each, action.body) for each in to]
                case End():
                    assert node not in self.ends, "it ends once"
                    self.ends[node] = action
                case Begin():
                    self.storage.names.append(f"save{len(self.storage.names)}")
                    self.answer(node, "begin", lambda: session.begun(self.storage.names[-1]))
                case Write():
                    self.storage.written.update(share.part.members[0] for share in action.shares)
                    self.answer(node, "write", lambda: session.written(f"digest of {node}"))
                case Publish():
                    self.storage.published.append(dict(action.digests))
                    self.answer(node, "publish", lambda: session.published(600))

    def answer(self, node: str, order: str, then: Any) -> None:
        error = self.storage.fail.get((node, order))
        if error == "never":
            return
        self.do(node, self.sessions[node].failed(error) if error else then())

    def run(self) -> None:
        """Until everybody alive has ended."""
        while not set(NODES) - self.dead <= set(self.ends):
            while self.messages:
                sender, to, body = self.messages.pop(0)
                if self.dead & {sender, to} or self.random.random() < self.loss:
                    continue
                self.do(to, self.sessions[to].heard(sender, body))
            self.now += 0.5
            assert self.now < DEADLINE + 5, "it does not end"
            for node in NODES:
                if node not in self.dead:
                    self.do(node, self.sessions[node].repeat(self.now))


@pytest.mark.parametrize("seed", range(12))
def test_save_ends_well_on_all_nodes_though_messages_are_lost(seed: int) -> None:
    network = Network(Storage(), seed=seed, loss=0.3 if seed else 0.0)
    network.start()
    network.run()
    assert {end.error for end in network.ends.values()} == {""}
    assert {end.name for end in network.ends.values()} == {"save0"}
    assert network.storage.published == [{p: f"digest of {n}" for p, n in enumerate(NODES)}]
    assert network.storage.written == Counter(dict.fromkeys(HOME, 1)), "every shard once"


@pytest.mark.parametrize(("node", "order"), [("a", "begin"), ("a", "write"), ("b", "write"), ("a", "publish")])
def test_failure_of_storage_ends_the_save_everywhere_with_its_reason(node: str, order: str) -> None:
    network = Network(Storage(fail={(node, order): "storage: No space left on device"}))
    network.start()
    network.run()
    assert all("No space left on device" in end.error for end in network.ends.values())
    assert network.now < 5, "at once"
    assert network.storage.published == ([] if order != "publish" else network.storage.published)


@pytest.mark.parametrize(("node", "order"), [("a", "begin"), ("c", "write"), ("a", "publish")])
def test_storage_that_never_answers_ends_the_save_at_its_deadline(node: str, order: str) -> None:
    network = Network(Storage(fail={(node, order): "never"}))
    network.start()
    network.run()
    assert all("took too long" in end.error for end in network.ends.values())
    assert DEADLINE <= network.now <= DEADLINE + 1


def test_lead_that_dies_leaves_no_checkpoint_and_the_others_give_up() -> None:
    network = Network(Storage(fail={("b", "write"): "never"}))
    network.start()
    network.dead.add("a")
    network.run()
    assert set(network.ends) == {"b", "c"}
    assert all(end.error for end in network.ends.values())
    assert network.storage.published == []


def test_node_that_begins_late_is_waited_for() -> None:
    network = Network(Storage())
    network.start("a", "b")
    for _ in range(4):
        network.now += 0.5
        for node in ("a", "b"):
            network.do(node, network.sessions[node].repeat(network.now))
        network.messages.clear()
    assert network.storage.names == []
    network.start("c")
    network.run()
    assert {end.error for end in network.ends.values()} == {""}


def test_version_that_is_not_whole_fails_at_once() -> None:
    network = Network(Storage())
    network.sessions["c"].records = []
    network.sessions["b"].records = []
    network.start()
    network.run()
    assert {end.error.removeprefix("a: ") for end in network.ends.values()} == {"no live node has shard 4"}


def test_nonsense_from_another_node_is_an_error_of_the_message() -> None:
    session = Network(Storage()).sessions["a"]
    for body in ({}, {"op": "have"}, {"op": "have", "records": [[1, 2]]}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            session.heard("b", body)
    assert session.heard("z", {"op": "part", "digest": ""}) == []
    assert session.heard("b", {"op": "part", "digest": ""}) == [], "nobody was asked to write yet"
    assert session.state is State.GATHERING


@pytest.mark.parametrize(
    ("longest_s", "num_failed", "limit"),
    [(None, 0, 1800.0), (1.0, 0, 60.0), (10.0, 0, 200.0), (10.0, 2, 800.0), (10.0, 9, 1800.0), (500.0, 0, 1800.0)],
)
def test_save_may_take_many_times_longer_than_any_before_it_and_longer_after_each_failure(
    longest_s: float | None, num_failed: int, limit: float
) -> None:
    assert limit_s(longest_s, num_failed) == limit
