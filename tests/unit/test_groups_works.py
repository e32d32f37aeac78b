"""groups/works.py: futures, on which DDP waits without asking the handle, end with the operation or with an error."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from fake_groups import FakeInner, FakeWork, connected, install_solo, returning
from groups_in_processes import run_alone
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from p2pstate.groups import status as status_module


def test_work_source_rank_is_the_senders_or_zero_after_an_error() -> None:
    group, _, _ = connected(returning(FakeWork()))
    assert group.recv_anysource([torch.ones(1)], 0)._source_rank() == 1
    error = RuntimeError("connection closed by peer")
    group, status, _ = connected(returning(FakeWork(error)))
    assert group.recv_anysource([torch.ones(1)], 0)._source_rank() == 0
    assert status.error is error
    assert group.recv_anysource([torch.ones(1)], 0)._source_rank() == 0


def test_work_future_has_the_inner_result() -> None:
    inner_work = FakeWork()
    group, _, _ = connected(returning(inner_work))
    future = group.allreduce([torch.ones(1)]).get_future()
    assert not future.done()
    inner_work.future.set_result(["the result"])
    assert future.value() == ["the result"]


def test_work_future_of_a_failed_operation_has_the_echo() -> None:
    inner_work = FakeWork()
    group, status, _ = connected(returning(inner_work))
    tensors = [torch.ones(1)]
    future = group.allreduce(tensors).get_future()
    error = RuntimeError("connection closed by peer")
    inner_work.future.set_exception(error)
    assert future.value() is tensors
    assert "connection closed by peer" in str(status.error)


def test_work_future_of_an_operation_that_never_ends_is_settled_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status_module, "ABANDON_AFTER_S", 0.0)
    group, status, _ = connected(returning(FakeWork(ends=False)))
    out = torch.full((2,), float("nan"))
    future = group._allgather_base(out, torch.ones(1)).get_future()
    assert not future.done()
    status.fail(RuntimeError("elsewhere"))
    assert wait_for(future), "the future of an operation that never ends was not settled"
    assert out.tolist() == [1, 1]


def test_work_future_asked_for_after_an_error_is_settled_at_once() -> None:
    group, status, _ = connected(returning(FakeWork(ends=False)))
    work = group.allreduce([torch.ones(1)])
    status.fail(RuntimeError("elsewhere"))
    assert work.get_future().done()


@pytest.mark.parametrize("when", ["before", "after"])
def test_work_future_that_is_done_is_not_settled_again(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "ABANDON_AFTER_S", 0.0)
    inner_work = FakeWork()
    group, status, _ = connected(returning(inner_work))
    out = torch.full((2,), 5.0)
    if when == "before":
        inner_work.future.set_result([out])
    future = group._allgather_base(out, torch.ones(1)).get_future()
    if when == "after":
        inner_work.future.set_result([out])
    assert future.done()
    assert not status._unsettled, "a finished operation is kept for ever"
    status.fail(RuntimeError("elsewhere"))
    for thread in threading.enumerate():
        if thread.name == "p2pstate-settle":
            thread.join(30.0)
    assert out.tolist() == [5, 5], "a later error overwrote the outputs of a finished operation"


def test_work_future_of_an_older_round_that_fails_late_leaves_its_outputs_alone() -> None:
    inner_work = FakeWork()
    group, status, _ = connected(returning(inner_work))
    out = torch.full((2,), 5.0)
    future = group._allgather_base(out, torch.ones(1)).get_future()
    status.connect(2)
    inner_work.future.set_exception(RuntimeError("cut"))
    assert future.value() is out
    assert out.tolist() == [5, 5], "memory that the next round uses was overwritten"
    assert status.error is None


def wait_for(future: Future[Any]) -> bool:
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(30.0)


def data_parallel_backward() -> tuple[bool, str]:
    """A reduction never ends; an error is recorded from another thread while backward waits for its future."""
    registry, status = install_solo()
    model = DistributedDataParallel(nn.Linear(4, 4))
    status.loud = False
    status.connect(1)
    called = threading.Event()

    def never_ends(*_args: Any, **_kwargs: Any) -> FakeWork:
        called.set()
        return FakeWork(ends=False)

    for group in registry.groups:
        group.attach(FakeInner(never_ends))  # type: ignore[arg-type]

    def fail() -> None:
        assert called.wait(30.0)
        status.fail(RuntimeError("rank 1 died"))

    threading.Thread(target=fail).start()
    model(torch.ones(2, 4)).sum().backward()
    return all(p.grad is not None for p in model.parameters()), str(status.error)


def test_data_parallel_backward_whose_reduction_never_ends_comes_back_after_an_error() -> None:
    assert run_alone(data_parallel_backward) == (True, "rank 1 died")
