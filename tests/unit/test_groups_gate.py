"""groups/gate.py and registry.py: votes, and which connections belong together. Three processes over gloo."""

from __future__ import annotations

import os
import threading
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from groups_in_processes import end_all, registry_of, run_ranks, start_ranks
from torch.distributed import HashStore, ReduceOp

from p2pstate.errors import Retryable
from p2pstate.groups import registry as registry_module
from p2pstate.groups.gate import NO_RANK, Ballot, all_say, vote
from p2pstate.groups.registry import Registry
from p2pstate.groups.status import PeerLost, Status
from p2pstate.groups.transport import Incoming, Outgoing, Payload, TransferFailed

NUM_RANKS = 3
TIMEOUT = timedelta(seconds=60)

kept: list[Any] = []  # the destructor of a group with an operation in flight waits for the group's timeout


def connect(rank: int, num_ranks: int, folder: str) -> tuple[Registry, Status]:
    """Gate and replication group of round 1."""
    status = Status()
    status.connect(1)
    registry = registry_of(rank, num_ranks, folder, status)
    registry.attach(registry.build(1, own_only=True))
    kept.append(registry)
    return registry, status


def cast(_line: Any, rank: int, num_ranks: int, folder: str, ballots: list[list[tuple[int, ...]]]) -> list[Any]:
    registry, status = connect(rank, num_ranks, folder)
    outcomes = [vote(registry, status, Ballot(*each[rank])) for each in ballots]
    assert status.error is None
    return [None if outcome is None else astuple(outcome) for outcome in outcomes]


def ask(_line: Any, rank: int, num_ranks: int, folder: str) -> list[Any]:
    registry, status = connect(rank, num_ranks, folder)
    answers = [all_say(registry, status, yes, about=1) for yes in (True, rank != 1, False)]
    answers.append(all_say(registry, status, True, about=min(rank, 1)))
    return [*answers, str(status.error)]


def test_question_is_answered_where_every_rank_is_asked_the_same(tmp_path: Path) -> None:
    error = "ranks do not agree on where they are: some have left the loop, others begin it"
    assert run_ranks(ask, tmp_path, NUM_RANKS) == [[True, False, False, None, error]] * NUM_RANKS


def test_vote_outcome_is_the_minimum_of_every_field_and_the_sum_of_balances_on_every_rank(tmp_path: Path) -> None:
    ballots = [
        [(1, 1, 7, -7, 2, 6), (1, 1, 7, -7, 2, 6), (1, 1, 7, -7, 2, 6)],
        [(1, 1, 7, -7, 2, 6), (0, 1, 7, -7, 2, 5, 1), (1, 0, 7, -7, 1, 9)],
        [(1, 1, 8, -8, 0, -1), (1, 1, 7, -7, 0, -1), (1, 1, 8, -8, 0, -1)],
        [(1, 1, 1 << 40, -(1 << 40), 1 << 33, 1 << 50)] * NUM_RANKS,
        [(1, 1, 7, -7, 2, 6, 2, NO_RANK, 0, 1, 1, balance) for balance in (1 << 50, -3, 4)],
        [(1, 1, 7, -7, 2, 6, 2, *spoilt, 0) for spoilt in ((NO_RANK, 0, 1, 1), (1, 0, 1, -1), (2, 0, 1, -2))],
    ]
    expected = [
        (1, 1, 7, -7, 2, 6, 2),
        (0, 0, 7, -7, 1, 5, 1),
        (1, 1, 7, -8, 0, -1, 2),  # step and neg_step show that the ranks do not agree
        (1, 1, 1 << 40, -(1 << 40), 1 << 33, 1 << 50, 2),
        (1, 1, 7, -7, 2, 6, 2, NO_RANK, 0, 1, 1, (1 << 50) + 1),
        (1, 1, 7, -7, 2, 6, 2, 1, 0, 1, -2, 0),  # the gradients of ranks 1 to 2 are no numbers
    ]
    outcome = [astuple(Ballot(*each)) for each in expected]
    assert run_ranks(cast, tmp_path, NUM_RANKS, ballots) == [outcome] * NUM_RANKS


def cast_without_rank_two(line: Any, rank: int, num_ranks: int, folder: str, how: str) -> Any:
    registry, status = connect(rank, num_ranks, folder)
    ballot = Ballot(1, 1, 1, -1, 0, -1)
    first = vote(registry, status, ballot)
    if rank == 2:
        line.send("voted once")
        if how == "dies":
            os._exit(1)
        return line.recv()
    if how == "is silent":  # what an abort ordered by the control plane does
        threading.Timer(0.2, status.fail, (Retryable("round 1 was aborted"), 1)).start()
    second = vote(registry, status, ballot)
    third = vote(registry, status, ballot)
    return first == ballot, second, third, status.error is not None


@pytest.mark.parametrize("how", ["dies", "is silent"])
def test_vote_that_one_rank_does_not_cast_has_no_outcome_elsewhere(tmp_path: Path, how: str) -> None:
    children = start_ranks(cast_without_rank_two, tmp_path, NUM_RANKS, how)
    try:
        assert children[2].hear() == "voted once"
        for child in children[:2]:
            assert child.result() == (True, None, None, True)
    finally:
        end_all(children)


def test_vote_before_there_is_a_gate_has_no_outcome() -> None:
    status = Status()
    assert vote(Registry(status), status, Ballot(1, 1, 1, -1, 0, -1)) is None


# -- the registry


def test_registry_keys_tell_groups_of_the_same_members_apart_and_sort_alike_everywhere() -> None:
    status = Status()
    status.solo = True
    one, other = Registry(status), Registry(status)
    one.world_size = other.world_size = 4
    everybody, pair, again = [], [0, 1], [0, 1]
    first = [one.create(members, 0, TIMEOUT) for members in (everybody, pair, again)]
    second = [other.create(members, 0, TIMEOUT) for members in (pair, everybody, again)]
    assert first[0].members == (0, 1, 2, 3)
    assert len({group.key for group in first}) == 3
    assert [first[0].key, first[1].key, first[2].key] == [second[1].key, second[0].key, second[2].key]
    assert sorted(group.key for group in first)[-1] == first[0].key, "small groups come first"


def test_registry_group_that_cannot_be_connected_is_an_error_and_echoes() -> None:
    status = Status()
    status.connect(1)
    registry = Registry(status)
    registry.world_size = 2

    def no_store(epoch: int) -> Any:
        raise RuntimeError(f"there is no store of round {epoch}")

    registry.make_store = no_store
    status.loud = False  # as inside a training loop
    group = registry.create([0, 1], 0, TIMEOUT)
    assert "no store of round 1" in str(status.error)
    tensors = [torch.ones(1)]
    assert group.allreduce(tensors).result() is tensors
    status.loud = True
    with pytest.raises(PeerLost):
        registry.create([0, 1], 0, TIMEOUT)


def test_registry_connects_nothing_before_all_members_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's patience while it connects is short; a rank that still reads its data may come minutes later."""
    status, begun = Status(), []
    status.connect(1)
    registry = Registry(status)
    registry.world_size = 2
    registry.make_store = lambda epoch: HashStore()
    monkeypatch.setattr(registry_module, "build_inner", lambda *args: begun.append(args))
    status.loud = False  # as inside a training loop
    registry.create([0, 1], 0, timedelta(milliseconds=10))
    assert "imeout" in str(status.error)
    assert not begun


def connect_overlapping(_line: Any, rank: int, num_ranks: int, folder: str) -> dict[str, float]:
    """Every pair of three ranks has a group; each rank made its groups in another order."""
    status = Status()
    status.solo = True
    registry = registry_of(rank, num_ranks, folder, status)
    pairs = [pair for pair in ([0, 1], [1, 2], [0, 2]) if rank in pair]
    groups = [registry.create(pair, pair.index(rank), TIMEOUT) for pair in (pairs if rank else pairs[::-1])]
    registry.attach(registry.build(1))
    status.connect(1)
    sums = {}
    for group in sorted(groups, key=lambda group: group.members):
        tensor = torch.tensor([float(rank + 1)])
        group.allreduce([tensor]).wait()
        sums[str(group.members)] = tensor.item()
    assert status.error is None
    kept.append(registry)
    return sums


def test_registry_connects_overlapping_groups_in_any_order_of_creation(tmp_path: Path) -> None:
    found = run_ranks(connect_overlapping, tmp_path, NUM_RANKS)
    expected = {"(0, 1)": 3.0, "(1, 2)": 5.0, "(0, 2)": 4.0}
    for rank, sums in enumerate(found):
        assert sums == {pair: total for pair, total in expected.items() if str(rank) in pair}


def cut_training_only(_line: Any, rank: int, num_ranks: int, folder: str) -> tuple[bool, bool, bool]:
    """After an error the copies that are under way may still arrive: what works after which cut."""
    registry, _ = connect(rank, num_ranks, folder)
    assert registry.gate is not None
    registry.cut(1, replication=False)
    works = [gate_works(registry.gate), replication_works(registry)]
    registry.cut(1)
    return works[0], works[1], replication_works(registry)


def gate_works(inner: Any) -> bool:
    try:
        inner.group.allreduce([torch.ones(1)], ReduceOp.MIN).wait(TIMEOUT)
    except RuntimeError:
        return False
    return True


def replication_works(registry: Registry) -> bool:
    """Every rank sends to the next one."""
    assert registry.replication is not None
    into = bytearray(3)
    send = Outgoing((registry.rank + 1) % registry.world_size, b"", Payload(memoryview(b"abc")))
    receive = Incoming(
        (registry.rank - 1) % registry.world_size, lambda head, size: memoryview(into), lambda *digests: None
    )
    try:
        registry.replication.exchange([send], [receive])
    except TransferFailed:
        return False
    return into == b"abc"


def test_registry_cut_of_the_training_groups_leaves_replication_alone(tmp_path: Path) -> None:
    assert run_ranks(cut_training_only, tmp_path, 2) == [(False, True, False)] * 2


def cut_an_older_round(_line: Any, rank: int, num_ranks: int, folder: str) -> bool:
    registry, _ = connect(rank, num_ranks, folder)
    registry.cut(0)
    assert registry.gate is not None
    return gate_works(registry.gate)


def test_registry_cut_of_an_older_round_leaves_this_one_alone(tmp_path: Path) -> None:
    assert run_ranks(cut_an_older_round, tmp_path, 2) == [True, True]
