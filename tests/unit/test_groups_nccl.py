"""groups/nccl.py and what the groups make of it, on a machine without a card: the calls, their order, their threads.

What fake_cards.py has stands for torch's CUDA and NCCL bindings, whose names are checked against this torch's own
stubs; the real ones are used by tests/gpu.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cards import CARD, DEADLINE_S, FakeCardWork, FakeNccl, FakeProcessGroup
from groups_in_processes import run_alone
from torch._C._distributed_c10d import BarrierOptions, ErrorType
from torch.distributed import HashStore, distributed_c10d

from p2pstate.errors import ConfigError
from p2pstate.groups import inner as inner_module
from p2pstate.groups import nccl
from p2pstate.groups.group import P2PGroup
from p2pstate.groups.inner import Inner, card_inner
from p2pstate.groups.install import install
from p2pstate.groups.nccl import Communicator, ErrorWatch, wait_on_host
from p2pstate.groups.registry import Registry
from p2pstate.groups.sockets import Connections
from p2pstate.groups.status import Status
from p2pstate.groups.waiting import Abandoned
from p2pstate.groups.works import CardWork, card_of
from p2pstate.trace import Row

TIMEOUT = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FakeNccl.calls, FakeNccl.blocked, FakeNccl.fails = [], None, ""
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: FakeNccl._say("set_device"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    yield
    nccl.WATCH._watched.clear()


def communicator(num_blocks: int = 0) -> Communicator:
    return Communicator(HashStore(), 0, (4, 7), CARD, TIMEOUT, name="key", num_blocks=num_blocks)


def names() -> list[str]:
    return [name for name, _ in FakeNccl.calls]


def test_fakes_have_the_names_of_this_torch() -> None:
    stubs = (Path(torch.__file__).parent / "_C/_distributed_c10d.pyi").read_text()
    declared = dict(re.findall(r"(?m)^class (\w+)\b.*:\n((?:    .*\n|\n)+)", stubs))
    for name in ("abort", "get_error", "eager_connect_single_device"):
        assert f"def {name}(self" in declared["Backend"]
    for name in ("is_completed", "block_current_stream", "get_future"):
        assert f"def {name}(self" in declared["Work"]
    for name in ("global_ranks_in_group", "group_name"):
        assert re.search(rf"\b{name}: ", declared["Backend"])
    for name in ("is_high_priority_stream", "config", "min_ctas", "max_ctas"):
        assert re.search(rf"\b{name}: ", declared["ProcessGroupNCCL"])
    assert re.search(r"def __init__\(\s+self,\s+store: Store,\s+rank: int,\s+size: int,", declared["ProcessGroupNCCL"])


def test_communicator_is_connected_eagerly_proved_and_then_used() -> None:
    made = communicator(num_blocks=4)
    group = FakeProcessGroup()
    made.connect(group)
    assert names() == ["make", "set_device", "connect", "register"]
    assert group.names == ["allreduce"]
    options = made.backend.options
    assert (options._timeout, options.global_ranks_in_group, options.group_name) == (TIMEOUT, [4, 7], "key")
    assert (made.backend.options.config.min_ctas, made.backend.options.config.max_ctas) == (1, 4)
    assert made.error() is None


def test_communicator_that_counts_other_ranks_than_it_should_is_refused() -> None:
    with pytest.raises(RuntimeError, match="of 2 ranks counted 1"):
        communicator().connect(FakeProcessGroup(counts=1))


def test_cut_frees_a_thread_whose_connecting_never_ends_and_aborts_on_another_thread() -> None:
    FakeNccl.blocked = threading.Event()
    made = communicator()
    threading.Timer(0.05, made.cut).start()
    with pytest.raises(Abandoned):
        made.connect(FakeProcessGroup())
    assert made.release().wait(DEADLINE_S)
    FakeNccl.blocked.set()
    assert ("abort", "p2pstate-abort") in FakeNccl.calls


def test_connecting_that_takes_longer_than_the_groups_timeout_is_given_up() -> None:
    FakeNccl.blocked = threading.Event()
    made = Communicator(HashStore(), 0, (0, 1), CARD, timedelta(seconds=0.05))
    with pytest.raises(RuntimeError, match="not connected within"):
        made.connect(FakeProcessGroup())
    FakeNccl.blocked.set()


def test_torch_without_nccl_is_named_and_is_no_fault_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    group, status, _ = on_card(monkeypatch)
    registry = Members()
    group.connect_card = registry._connect_card
    with pytest.raises(ConfigError, match="this torch has no NCCL"):
        group.allreduce([torch.ones(1)])
    assert status.error is None


def test_cut_twice_aborts_once_after_its_thread_has_chosen_the_card() -> None:
    made = communicator()
    made.connect(FakeProcessGroup())
    FakeNccl.calls.clear()
    made.cut()
    made.cut()
    assert made.release().wait(DEADLINE_S)
    assert FakeNccl.calls == [("set_device", "p2pstate-abort"), ("abort", "p2pstate-abort")]


def test_abort_that_fails_counts_as_ended() -> None:
    FakeNccl.fails = "abort"
    made = communicator()
    assert made.release().wait(DEADLINE_S)


def test_error_that_nccl_reports_is_told_once_and_before_anything_is_aborted() -> None:
    watch, made, told = ErrorWatch(), communicator(), threading.Event()
    seen: list[tuple[str, list[str]]] = []

    def on_error(error: Exception) -> None:
        seen.append((str(error), names()))
        made.cut()
        told.set()

    watch.add(made, on_error)
    made.backend.state = ErrorType.REMOTE_ERROR
    assert told.wait(DEADLINE_S)
    watch.look()
    assert seen == [("NCCL reports REMOTE_ERROR on cpu", ["make"])]


def test_error_of_a_communicator_that_was_cut_or_let_go_is_none() -> None:
    made = communicator()
    made.backend.state = ErrorType.COMM_ERROR
    assert made.error() is not None
    made.cut()
    assert made.error() is None
    made.release()
    assert made.error() is None


def test_waiting_on_the_host_ends_with_the_operation_with_the_round_or_at_its_deadline() -> None:
    wait_on_host(lambda: True, lambda: False, None)
    wait_on_host(lambda: False, lambda: True, None)
    with pytest.raises(RuntimeError, match="did not end on the card"):
        wait_on_host(lambda: False, lambda: False, 0.05)


# -- connections of one round


def test_connections_are_destroyed_only_after_the_abort_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_module, "MAX_ABORT_S", DEADLINE_S)
    inner = Inner(1, FakeProcessGroup(), None, Connections())
    held = threading.Event()
    monkeypatch.setattr(FakeNccl, "abort", lambda self: held.wait(DEADLINE_S))
    inner.join_card(communicator())
    gone = inner.release()
    assert not gone.wait(0.1)
    held.set()
    assert gone.wait(DEADLINE_S)


def test_connections_whose_abort_never_ends_are_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_module, "MAX_ABORT_S", 0.05)
    kept: list[Any] = []
    monkeypatch.setattr(inner_module, "_unburied", kept)
    thing = object()
    assert not inner_module.bury([thing], [threading.Event()]).wait(0.3)
    assert kept == [[thing]]


def test_interpreter_waits_at_its_end_for_connections_that_are_being_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    thing = object()
    gone = inner_module.bury([thing], [held])
    monkeypatch.setattr(inner_module, "EXIT_WAIT_S", 0.05)
    inner_module._wait_for_reapers()
    assert not gone.is_set()
    monkeypatch.setattr(inner_module, "EXIT_WAIT_S", DEADLINE_S)
    threading.Timer(0.05, held.set).start()
    inner_module._wait_for_reapers()
    assert gone.is_set()


def test_card_that_cannot_be_connected_is_aborted_and_leaves_the_group_without_one() -> None:
    FakeNccl.fails = "connect"
    inner = card_inner(HashStore(), 0, 2, 1)
    made = communicator()
    with pytest.raises(RuntimeError, match="remote process exited"):
        inner.join_card(made)
    assert made.release().wait(DEADLINE_S)
    assert inner.card is None
    assert "abort" in names()


# -- the group that a model holds


def on_card(
    monkeypatch: pytest.MonkeyPatch, operation: Callable[[], Any] = FakeCardWork
) -> tuple[P2PGroup, Status, FakeProcessGroup]:
    """A group of two whose every tensor is one of a card, connected without NCCL so far."""
    monkeypatch.setattr("p2pstate.groups.group.card_of", lambda values: CARD)
    status = Status()
    status.loud = False
    status.connect(1)
    fake = FakeProcessGroup(operation=operation)
    group = P2PGroup("key", (0, 1), 0, TIMEOUT, status)
    group.connect_card = lambda group, card: group.inner.join_card(communicator())  # type: ignore[union-attr]
    group.attach(Inner(1, fake, None, Connections()))
    return group, status, fake


def test_first_collective_on_a_card_connects_nccl_and_the_second_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    group, status, fake = on_card(monkeypatch)
    assert group.card is None
    for _ in range(2):
        assert isinstance(group.allreduce([torch.ones(1)]), CardWork)
    assert names().count("connect") == 1
    assert fake.names == ["allreduce"] * 3, "one of them is the probe"
    assert (group.card, status.error) == (CARD, None)


def test_collective_on_a_card_that_cannot_be_connected_echoes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNccl.fails = "connect"
    group, status, fake = on_card(monkeypatch)
    tensor = torch.full((1,), 5.0)
    assert group.allreduce([tensor]).wait()
    assert tensor.item() == 5
    assert "remote process exited" in str(status.error)
    assert fake.names == []


def test_newcomer_that_is_alone_remembers_that_its_group_is_for_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    group, status, fake = on_card(monkeypatch)
    status.solo = True
    group.allreduce([torch.ones(1)])
    assert group.card == CARD
    assert (names(), fake.names) == ([], [])


def test_waiting_for_a_card_takes_no_deadline_to_nccl_and_none_of_the_hosts_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = FakeCardWork(ends=False)
    group, status, _ = on_card(monkeypatch)
    group.allreduce([torch.ones(1)])
    monkeypatch.setattr(FakeProcessGroup, "_note", lambda self, name: work)
    assert group.allreduce([torch.ones(1)]).wait()
    assert work.num_blocks == 1
    assert status.error is None
    assert group.allreduce([torch.ones(1)]).get_future() is work.future
    assert group.allreduce([torch.ones(1)]).wait(timedelta(seconds=0.05))
    assert "within 0.05 s" in str(status.error)


def test_operation_on_the_callers_own_stream_has_no_handle_and_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch asks for with async_op=False."""
    group, status, _ = on_card(monkeypatch)
    group.allreduce([torch.ones(1)]).wait()
    monkeypatch.setattr(FakeProcessGroup, "_note", lambda self, name: None)
    left: list[int] = []
    monkeypatch.setattr(Row, "leave", lambda row, entered: left.append(entered))
    assert group.allreduce([torch.ones(1)]) is None
    assert (left, status.error) == ([2], None)


def test_barrier_on_a_card_is_waited_for_here_also_when_torch_asks_for_a_blocking_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, _, _ = on_card(monkeypatch)
    group.allreduce([torch.ones(1)])
    asked: list[bool] = []
    monkeypatch.setattr(FakeProcessGroup, "barrier", lambda self, opts: asked.append(opts.asyncOp) or FakeCardWork())
    options = BarrierOptions()
    options.asyncOp = False
    assert group.barrier(opts=options).wait()
    assert asked == [True]


def test_operation_that_failed_on_a_card_is_waited_for_without_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    group, status, _ = on_card(monkeypatch)
    group.allreduce([torch.ones(1)])
    work = FakeCardWork(error=RuntimeError("NCCL error: remote process exited"))
    monkeypatch.setattr(FakeProcessGroup, "_note", lambda self, name: work)
    assert group.allreduce([torch.ones(1)]).wait()
    assert group.barrier().wait()
    assert work.num_blocks == 2
    assert "abort" not in names()
    assert status.error is None, "whoever watches the communicator tells"


def test_barrier_on_a_card_makes_the_host_wait_until_an_error_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    group, status, _ = on_card(monkeypatch)
    group.allreduce([torch.ones(1)])
    monkeypatch.setattr(FakeProcessGroup, "_note", lambda self, name: FakeCardWork(ends=False))
    threading.Timer(0.1, status.fail, [RuntimeError("rank 1 died")]).start()
    assert group.barrier().wait()
    assert "rank 1 died" in str(status.error)


def test_work_on_a_card_whose_round_is_over_has_the_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    group, status, _ = on_card(monkeypatch)
    out = torch.full((2,), float("nan"))
    monkeypatch.setattr(FakeProcessGroup, "_allgather_base", lambda *_: FakeCardWork(), raising=False)
    work = group._allgather_base(out, torch.ones(1))
    status.fail(RuntimeError("elsewhere"))
    assert work.wait()
    assert out.tolist() == [1, 1]


def test_nccl_error_is_recorded_for_the_process_before_the_group_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    group, status, _ = on_card(monkeypatch)
    order: list[str] = []
    monkeypatch.setattr(FakeNccl, "abort", lambda self: order.append("abort"))
    cut = threading.Event()

    def on_first_error(error: BaseException, epoch: int) -> None:
        order.append("recorded" if status.error is error else "not recorded")
        assert group.inner is not None
        group.inner.cut()
        cut.set()

    status.on_first_error = on_first_error
    group.allreduce([torch.ones(1)])
    assert group.inner is not None
    group.inner._communicator.backend.state = ErrorType.REMOTE_ERROR  # type: ignore[union-attr]
    assert cut.wait(DEADLINE_S)
    group.detach().wait(DEADLINE_S)  # type: ignore[union-attr]
    assert order == ["recorded", "abort"]


def test_coalesced_calls_that_were_begun_are_ended_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    group, status, fake = on_card(monkeypatch)
    card = torch.device("cuda", 0)
    group._start_coalescing(card)
    group.send([torch.ones(1)], 1, 0)
    status.fail(RuntimeError("elsewhere"))
    group.send([torch.ones(1)], 1, 0)
    group._end_coalescing(card).wait()
    assert fake.names == ["allreduce", "start", "send", "end"]
    group._start_coalescing(card)
    assert group._end_coalescing(card).wait()
    assert fake.names == ["allreduce", "start", "send", "end"], "a group that echoes went to the card"


def test_shutdown_lets_the_card_finish_and_aborts_then(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _, _ = on_card(monkeypatch)
    group.allreduce([torch.ones(1)])
    asked: list[int] = []

    class Stream:
        def record_event(self) -> Stream:
            return self

        def query(self) -> bool:
            assert "abort" not in names()
            asked.append(1)
            return len(asked) == 3

    monkeypatch.setattr(torch.cuda, "current_stream", lambda card: Stream())
    group.shutdown()
    assert len(asked) == 3


def test_card_of_arguments_is_that_of_the_first_tensor_or_of_a_barriers_options() -> None:
    card = torch.device("cuda", 3)
    options = distributed_c10d.BarrierOptions()
    assert card_of((options,)) is None
    options.device = card
    assert card_of((options,)) == card
    assert card_of(([[torch.ones(1)]], [torch.ones(1)])) is None
    assert card_of(()) is None


# -- all groups of a process


class Members(Registry):
    """The registry of rank 0 of 2, over a store in this process."""

    def __init__(self) -> None:
        super().__init__(Status())
        self.rank, self.world_size, self.host = 0, 2, "127.0.0.1"
        self.made = HashStore()
        self.make_store = self._store

    def _store(self, epoch: int) -> HashStore:
        return self.made


@pytest.mark.parametrize(
    ("own", "theirs", "is_there", "wanted"),
    [
        (False, "", True, False),
        (False, "card", True, True),
        (True, "", True, True),
        (False, "card", False, False),
    ],
)
def test_members_of_a_group_agree_on_nccl_as_soon_as_one_wants_it(
    own: bool, theirs: str, is_there: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    registry = Members()
    registry.made.set("groups/key/here/1", theirs)
    assert registry._meet("key", (0, 1), 1, TIMEOUT, own)[1] is wanted
    assert registry.made.get("groups/key/here/0") == (b"card" if own else b"")


@pytest.mark.parametrize(("initialized", "expected"), [(True, 3), (False, 1)])
def test_card_of_a_process_that_has_none_is_that_of_its_place(
    initialized: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    registry = Members()
    registry.local_rank = 5
    assert registry._own_card() == torch.device("cuda", expected)
    registry.told_card = torch.device("cuda", 2)
    assert registry._own_card() == registry.told_card


def install_and_name_a_card() -> tuple[dict[str, Any], str]:
    """What torch is left to do of a group with a device_id, and what the registry knows of it."""
    given: list[dict[str, Any]] = []

    def helper(*_: Any, **kwargs: Any) -> None:
        given.append(kwargs)

    distributed_c10d._new_process_group_helper = helper  # type: ignore[assignment]
    registry = Registry(Status())
    install(registry, HashStore)
    make: Any = distributed_c10d._new_process_group_helper
    make(2, 0, [], "nccl", HashStore(), group_name="0", device_id=torch.device("cuda", 3))
    make(2, 0, [], "nccl", HashStore(), group_name="1")
    return given[0], str(registry.told_card)


def test_card_that_torch_is_told_is_known_and_torch_does_not_connect_to_it() -> None:
    assert run_alone(install_and_name_a_card) == ({"group_name": "0"}, "cuda:3")


def test_watch_ends_its_thread_when_nothing_is_left_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "POLL_S", 0.001)
    watch, made = ErrorWatch(), communicator()
    watch.add(made, lambda error: None)
    watch.remove(made)
    for thread in threading.enumerate():
        if thread.name == "p2pstate-nccl-errors":
            thread.join(DEADLINE_S)
    assert not watch._running
