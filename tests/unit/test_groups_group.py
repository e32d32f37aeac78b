"""groups/group.py and works.py: nothing is missing, nothing raises, and errors are values."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fake_groups import TIMEOUT, FakeInner, FakeWork, connected, raising, returning
from torch.distributed import AllreduceOptions, ProcessGroup, Work

from p2pstate.groups.group import P2PGroup
from p2pstate.groups.status import PeerLost
from p2pstate.groups.works import EchoWork, GuardedWork

# What dir(ProcessGroup) lists and P2PGroup leaves to torch, because it does not talk to other ranks ...
DO_NOT_COMMUNICATE = {
    *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"),
    *("_backend_id", "_get_backend_name", "_register_backend", "_set_default_backend"),
    *("_enable_collectives_timing", "_has_hooks", "_register_on_completion_hook", "_wait_for_pending_works"),
    *("_id", "_pybind11_conduit_v1_", "boxed", "unbox", "bound_device_id", "get_group_store"),
    "use_pg_for_symm_mem_rendezvous",
}
# ... or because torch offers it for backends that can do it only, and ours says that it cannot.
REFUSED_BY_TORCH = {
    *("split_group", "merge_remote_group"),
    *("get_reconfigure_handle", "reconfigure", "new_window"),
    *(f"{what}register_{when}_hook" for what in ("", "un") for when in ("abort", "pre", "post")),
}

WORK_LEFT_TO_TORCH = {
    *("_get_duration", "_get_op_type", "_pybind11_conduit_v1_", "boxed", "unbox"),
    "get_future_result",  # of NCCL's watchdog
    *("_get_sequence_number", "timeout"),  # for traces of torch's own
}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("__")}


def test_group_methods_that_torch_lists_are_all_accounted_for() -> None:
    unknown = public(ProcessGroup) - set(vars(P2PGroup)) - DO_NOT_COMMUNICATE - REFUSED_BY_TORCH
    assert not unknown, f"this torch has methods that P2PGroup neither forwards nor declines: {sorted(unknown)}"


@pytest.mark.parametrize("kind", [EchoWork, GuardedWork])
def test_work_methods_that_torch_lists_are_all_accounted_for(kind: type) -> None:
    unknown = public(Work) - set(vars(kind)) - WORK_LEFT_TO_TORCH
    assert not unknown, f"this torch has methods that {kind.__name__} does not answer: {sorted(unknown)}"


def test_group_collective_that_ends_well_is_the_inner_one() -> None:
    group, status, inner = connected(returning(FakeWork()))
    tensors = [torch.ones(2)]
    work = group.allreduce(tensors)
    assert work.wait()
    assert work.result() is tensors
    assert inner.calls == ["allreduce"]
    assert status.error is None


@pytest.mark.parametrize("lost", [False, True])
def test_group_mean_of_whole_numbers_is_their_sum_divided_or_in_an_echo_the_own_value(lost: bool) -> None:
    def add(tensors: list[torch.Tensor], options: AllreduceOptions) -> FakeWork:
        assert options.reduceOp == dist.ReduceOp.SUM, "gloo refuses the mean of whole numbers"
        tensors[0].add_(8)  # what the other rank has
        return FakeWork()

    group, _, _ = connected(raising(RuntimeError("connection closed by peer")) if lost else add)
    options, tensors = AllreduceOptions(), [torch.tensor([3])]
    options.reduceOp = dist.ReduceOp.AVG
    work = group.allreduce(tensors, options)
    assert work.wait()
    assert work.result() is tensors
    assert tensors[0].tolist() == ([3] if lost else [5])  # 11 / 2


@pytest.mark.parametrize("when", ["at the call", "at the wait"])
def test_group_collective_that_fails_is_recorded_and_echoes_from_then_on(when: str) -> None:
    error = RuntimeError("connection closed by peer")
    group, status, inner = connected(raising(error) if when == "at the call" else returning(FakeWork(error)))
    told: list[tuple[BaseException, int]] = []
    status.on_first_error = lambda error, epoch: told.append((error, epoch))
    out = torch.full((4,), float("nan"))
    assert group._allgather_base(out, torch.tensor([1.0, 2.0])).wait()
    assert out.tolist() == [1, 2, 1, 2]
    assert status.error is error
    assert told == [(error, 1)]
    group.allreduce([torch.ones(1)]).wait()
    assert inner.calls == ["_allgather_base"], "a collective after the first error went to the network"


def test_group_error_of_one_group_makes_every_other_group_echo() -> None:
    group, status, _ = connected(raising(RuntimeError("connection closed by peer")))
    other = P2PGroup("other", (0, 1), 0, TIMEOUT, status)
    healthy = FakeInner(returning(FakeWork()))
    other.attach(healthy)  # type: ignore[arg-type]
    group.barrier()
    received = torch.full((2,), float("nan"))
    other.recv([received], 1, 0).wait()
    assert received.tolist() == [0, 0]
    assert healthy.calls == []


@pytest.mark.parametrize("when", ["at the call", "at the wait"])
def test_group_collective_that_fails_outside_a_training_loop_raises(when: str) -> None:
    error = RuntimeError("connection closed by peer")
    group, status, _ = connected(raising(error) if when == "at the call" else returning(FakeWork(error)))
    status.loud = True
    with pytest.raises(PeerLost, match="connection closed by peer"):
        group.allreduce([torch.ones(1)]).wait()
    assert status.error is error
    with pytest.raises(PeerLost):
        group.barrier()
    with pytest.raises(PeerLost):
        group.monitored_barrier()


def test_group_second_error_does_not_replace_the_first() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    group, status, _ = connected(raising(first))
    group.barrier()
    status.fail(second)
    assert status.error is first


@pytest.mark.parametrize(
    "error",
    [
        TypeError("no such argument"),
        ValueError("sizes differ"),
        NotImplementedError(),
        RuntimeError("Backend gloo does not support gather_single"),
    ],
)
def test_group_mistake_of_the_caller_is_raised_and_no_failure(error: Exception) -> None:
    group, status, _ = connected(raising(error))
    with pytest.raises(type(error)):
        group.allreduce([torch.ones(1)])
    assert status.error is None


def test_group_error_of_an_older_round_is_no_error_of_this_one() -> None:
    work = FakeWork(RuntimeError("cut"))
    group, status, _ = connected(returning(work))
    guarded = group.allreduce([torch.ones(1)])
    status.connect(2)
    assert guarded.wait()
    assert status.error is None


def test_group_work_whose_operation_never_ends_is_completed_once_there_is_an_error() -> None:
    group, status, _ = connected(returning(FakeWork(ends=False)))
    guarded = group.allreduce([torch.ones(1)])
    assert not guarded.is_completed()
    status.fail(RuntimeError("elsewhere"))
    assert guarded.is_completed()


def test_group_attached_to_new_connections_lets_go_of_the_old_ones() -> None:
    group, _, old = connected(returning(FakeWork()))
    new = FakeInner(returning(FakeWork()), epoch=2)
    group.attach(new)  # type: ignore[arg-type]
    group.barrier()
    assert old.released
    assert (old.calls, new.calls) == ([], ["barrier"])
    group.shutdown()
    assert new.released
    group.set_timeout(timedelta(seconds=1))
    assert new.timeout is None


def test_group_timeout_reaches_the_connections() -> None:
    group, _, inner = connected(returning(FakeWork()))
    group.set_timeout(timedelta(seconds=7))
    assert inner.timeout == group.timeout == timedelta(seconds=7)


def test_group_monitored_barrier_that_fails_is_recorded() -> None:
    group, status, _ = connected(raising(RuntimeError("rank 1 failed to pass")))
    group.monitored_barrier()
    assert "rank 1" in str(status.error)
    group.monitored_barrier()
