"""groups/group.py and works.py: nothing is missing, nothing raises, nothing blocks, with and without peers.

What installs the backend runs in a process of its own (see groups_in_processes.py), so that this one stays clean.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups_in_processes import run_alone, run_ranks
from torch import nn
from torch.distributed import AllreduceOptions, HashStore, ProcessGroup, Work
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from p2pstate.errors import ConfigError
from p2pstate.groups import status as status_module
from p2pstate.groups import waiting
from p2pstate.groups.group import P2PGroup
from p2pstate.groups.install import install, installed
from p2pstate.groups.registry import Registry
from p2pstate.groups.status import PeerLost, Status
from p2pstate.groups.works import EchoWork, GuardedWork

TIMEOUT = timedelta(seconds=30)

# What dir(ProcessGroup) lists and P2PGroup leaves to torch, because it does not talk to other ranks ...
DO_NOT_COMMUNICATE = {
    *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"),
    *("_backend_id", "_get_backend_name", "_register_backend", "_set_default_backend"),
    *("_enable_collectives_timing", "_has_hooks", "_register_on_completion_hook", "_wait_for_pending_works"),
    *("_id", "_pybind11_conduit_v1_", "boxed", "unbox", "bound_device_id", "get_group_store"),
    "use_pg_for_symm_mem_rendezvous",
}
# ... or because torch offers it for backends that can do it only, and ours says that it cannot.
REFUSED_BY_TORCH = {"split_group", "merge_remote_group"}

WORK_LEFT_TO_TORCH = {
    *("_get_duration", "_get_op_type", "_pybind11_conduit_v1_", "boxed", "unbox"),
    "get_future_result",  # of NCCL's watchdog
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


# -- a group over a fake inner one: errors are values


class FakeWork:
    """Ends well, or as ``error`` says, or (``ends=False``) never."""

    def __init__(self, error: Exception | None = None, *, ends: bool = True) -> None:
        self.error, self.ends = error, ends
        self.future: Future[Any] = Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ends:
            raise RuntimeError("timed out")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.ends

    def _source_rank(self) -> int:
        if self.error is not None:
            raise self.error
        return 1

    def get_future(self) -> Future[Any]:
        return self.future


class FakeInner:
    """Connections of round ``epoch``; every collective calls ``operation``."""

    card = None

    def __init__(self, operation: Callable[..., Any], epoch: int = 1) -> None:
        self.operation, self.epoch = operation, epoch
        self.calls: list[str] = []
        self.released = False
        self.timeout: timedelta | None = None
        self.group = self

    def __getattr__(self, name: str) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return self.operation(*args, **kwargs)

        return collective

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def watch(self, on_error: Callable[[Exception], None]) -> None:
        """Nothing of it is on a card."""

    def release(self) -> None:
        self.released = True


def connected(operation: Callable[..., Any], *, num_members: int = 2) -> tuple[P2PGroup, Status, FakeInner]:
    status = Status()
    status.loud = False  # as inside a training loop
    status.connect(1)
    group = P2PGroup("key", tuple(range(num_members)), 0, TIMEOUT, status)
    inner = FakeInner(operation)
    group.attach(inner)  # type: ignore[arg-type]
    return group, status, inner


def raising(error: Exception) -> Callable[..., Any]:
    def operation(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    return operation


def returning(work: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: work


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


@pytest.mark.parametrize("error", [TypeError("no such argument"), ValueError("sizes differ"), NotImplementedError()])
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


def test_work_source_rank_is_the_senders_or_zero_after_an_error() -> None:
    group, _, _ = connected(returning(FakeWork()))
    assert group.recv_anysource([torch.ones(1)], 0)._source_rank() == 1
    error = RuntimeError("connection closed by peer")
    group, status, _ = connected(returning(FakeWork(error)))
    assert group.recv_anysource([torch.ones(1)], 0)._source_rank() == 0
    assert status.error is error
    assert group.recv_anysource([torch.ones(1)], 0)._source_rank() == 0


# -- futures: DDP waits on them without asking the handle


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


# -- alone: what a newcomer does before it has peers

WORLD, RANK = 4, 1


def install_solo() -> tuple[Registry, Status]:
    status = Status()
    status.solo = True
    registry = Registry(status)
    registry.rank, registry.world_size = RANK, WORLD
    install(registry, HashStore)
    dist.init_process_group("p2p", store=HashStore(), rank=RANK, world_size=WORLD)
    return registry, status


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def solo_collectives() -> dict[str, Any]:
    install_solo()
    own = torch.tensor([1.0, 2.0])
    found: dict[str, Any] = {"installed": installed(), "is p2p": isinstance(dist.group.WORLD, P2PGroup)}
    found["size"] = (dist.get_world_size(), dist.get_rank(), dist.get_backend())
    dist.barrier()
    reduced = own.clone()
    dist.all_reduce(reduced, op=dist.ReduceOp.AVG)
    found["all_reduce"] = reduced.tolist()
    listed = [torch.full((2,), float("nan")) for _ in range(WORLD)]
    dist.all_gather(listed, own)
    found["all_gather"] = [each.tolist() for each in listed]
    flat = torch.full((2 * WORLD,), float("nan"))
    dist.all_gather_into_tensor(flat, own)
    found["all_gather_into_tensor"] = flat.tolist()
    piece = torch.full((2,), float("nan"))
    dist.reduce_scatter_tensor(piece, torch.arange(2.0 * WORLD))
    found["reduce_scatter_tensor"] = piece.tolist()
    exchanged = [torch.full((1,), float("nan")) for _ in range(WORLD)]
    dist.all_to_all(exchanged, list(torch.arange(float(WORLD)).split(1)))
    found["all_to_all"] = [each.item() for each in exchanged]
    single = torch.full((WORLD,), float("nan"))
    dist.all_to_all_single(single, torch.arange(float(WORLD)))
    found["all_to_all_single"] = single.tolist()
    told = own.clone()
    dist.broadcast(told, src=0)
    found["broadcast"] = told.tolist()
    received = torch.full((2,), float("nan"))
    found["recv"] = (dist.recv(received, src=0), dist.recv(received), received.tolist())
    dist.send(own, dst=0)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, own, 0), dist.P2POp(dist.irecv, received, 0)])
    found["batch_isend_irecv"] = [work.wait() for work in works]
    with dist.distributed_c10d._coalescing_manager():  # type: ignore[attr-defined]
        dist.all_reduce(reduced)
    objects: list[Any] = [None] * WORLD
    dist.all_gather_object(objects, {"rank": 1})
    found["all_gather_object"] = objects
    return found


def test_solo_collectives_have_defined_results() -> None:
    assert run_alone(solo_collectives) == {
        "installed": True,
        "is p2p": True,
        "size": (WORLD, RANK, "p2p"),
        "all_reduce": [1, 2],
        "all_gather": [[1, 2]] * WORLD,
        "all_gather_into_tensor": [1, 2] * WORLD,
        "reduce_scatter_tensor": [2, 3],
        "all_to_all": [0, 1, 2, 3],
        "all_to_all_single": [0, 1, 2, 3],
        "broadcast": [1, 2],
        "recv": (0, 0, [0, 0]),
        "batch_isend_irecv": [True, True],
        "all_gather_object": [{"rank": 1}] * WORLD,
    }


def train(model: nn.Module, num_steps: int = 3) -> bool:
    """Three steps: DDP lays its buckets out anew after the first. Whether every number stayed finite."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(num_steps):
        loss = model(torch.ones(4, 8) + torch.eye(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = [p.detach().to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    before = [p.to_local() if isinstance(p, DTensor) else p for p in before]
    changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return changed and bool(loss.isfinite()) and all(bool(p.isfinite().all()) for p in after)


def solo_data_parallel() -> bool:
    install_solo()
    return train(DistributedDataParallel(net()))


def solo_compiled() -> bool:
    install_solo()
    model = torch.compile(DistributedDataParallel(net()), backend="eager")
    return train(model)


def solo_sharded() -> tuple[bool, list[int]]:
    install_solo()
    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    shapes = [p.to_local().shape[0] for p in model.parameters() if isinstance(p, DTensor)]
    return train(model), shapes


def solo_hybrid_sharded() -> bool:
    install_solo()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train(fully_shard(net(), mesh=mesh))


@pytest.mark.parametrize("trains", [solo_data_parallel, solo_compiled, solo_hybrid_sharded])
def test_solo_training_runs_whole_steps(trains: Callable[[], bool]) -> None:
    assert run_alone(trains)


def test_solo_fully_sharded_training_runs_whole_steps_on_its_own_shards() -> None:
    assert run_alone(solo_sharded) == (True, [4, 4, 4, 4, 1, 1])


def solo_meshes_and_groups() -> dict[str, Any]:
    registry, _ = install_solo()
    line = init_device_mesh("cpu", (WORLD,))
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    # every process makes every group, also those that it is no member of
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    again = dist.new_group([0, 1], backend="gloo")
    named = dist.new_group([1, 3], backend="cpu:gloo,cuda:nccl")
    keys = [group.key for group in registry.groups]
    return {
        "line": line.get_local_rank(),
        "plane": plane.get_coordinate(),
        "members": [group.members for group in registry.groups],
        "unique": len(keys) == len(set(keys)),
        "ours": [isinstance(group, P2PGroup) for group in (halves[0], again, named)],
        "other half": halves[1] is dist.GroupMember.NON_GROUP_MEMBER,
        "ranks": dist.get_process_group_ranks(named),
    }


def test_solo_meshes_and_groups_are_ours_and_told_apart() -> None:
    found = run_alone(solo_meshes_and_groups)
    assert found["line"] == 1
    assert list(found["plane"]) == [0, 1]
    assert found["unique"]
    assert found["ours"] == [True, True, True]
    assert found["other half"]
    assert found["ranks"] == [1, 3]
    members = set(found["members"])
    assert {(0, 1, 2, 3), (1, 3), (0, 1)} <= members
    assert all(RANK in each for each in members), f"a group that this rank is no member of was registered: {members}"


def unknown_backend() -> str:
    install_solo()
    try:
        dist.new_group([0, 1], backend="mpi")
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_new_group_of_a_backend_that_cannot_be_repaired_is_refused_by_name() -> None:
    assert "'mpi'" in run_alone(unknown_backend)


# -- the swap, for real


def swap(_line: Any, rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Train connected, cut everything, step on echoes, connect again in round 2: the model never notices."""
    from groups_in_processes import registry_of

    status = Status()
    status.loud = False
    status.connect(1)
    registry = registry_of(rank, num_ranks, folder, status)
    install(registry, HashStore)
    dist.init_process_group("p2p", store=HashStore(), rank=rank, world_size=num_ranks)
    model = DistributedDataParallel(nn.Linear(2, 2, bias=False))

    def gradient() -> list[list[float]]:
        model.zero_grad()
        model(torch.full((1, 2), float(rank + 1))).sum().backward()
        grad = next(model.parameters()).grad
        assert grad is not None
        return grad.tolist()

    found: dict[str, Any] = {"together": gradient()}
    gradient()
    dist.barrier()
    registry.attach(registry.build(1, own_only=True))
    status.fail(RuntimeError("a peer died"))
    found["alone"] = gradient()
    registry.cut(1)
    registry.release()
    registry.attach(registry.build(2))
    found["before connect"] = gradient()
    status.connect(2)
    found["together again"] = gradient()
    found["error"] = status.error
    return found


def test_swapped_group_reduces_again_under_a_model_that_was_not_rebuilt(tmp_path: Any) -> None:
    for rank, found in enumerate(run_ranks(swap, tmp_path, 2)):
        assert found["together"] == found["together again"] == [[1.5, 1.5], [1.5, 1.5]]
        alone = [[(rank + 1) / 2] * 2] * 2  # DDP divides by two ranks, and echoes keep its own part
        assert found["alone"] == found["before connect"] == alone
        assert found["error"] is None


def load(_line: Any, rank: int, num_ranks: int, folder: str) -> list[float]:
    """Weights that only rank 0 has, into a sharded model. Returns the values of all its elements."""
    from groups_in_processes import registry_of

    status = Status()
    status.connect(1)
    install(registry_of(rank, num_ranks, folder, status), HashStore)
    dist.init_process_group("p2p", store=HashStore(), rank=rank, world_size=num_ranks)
    model = net()
    weights = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights if rank == 0 else {}, options=options)
    whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in model.state_dict().values()]
    return sorted({float(element) for value in whole for element in value.flatten()})


def test_weights_that_one_rank_has_are_loaded_into_a_sharded_model(tmp_path: Any) -> None:
    for found in run_ranks(load, tmp_path, 2):
        assert found == [2.0]


def give_up(_line: Any, rank: int, num_ranks: int, folder: str) -> list[str]:
    """Rank 0 calls every collective while rank 1, alive and connected, takes part in none; then an error is recorded,
    but no connection is cut. Returns those that were waited for longer than an error takes."""
    from groups_in_processes import registry_of

    status = Status()
    registry = registry_of(rank, num_ranks, folder, status)
    status.on_first_error = lambda error, epoch: None
    waiting.ABANDON_AFTER_S = 0.0
    patient = []
    for epoch, (name, arguments) in enumerate(collectives(num_ranks).items(), 1):
        built = registry.build(epoch, own_only=True)
        if rank > 0:
            continue
        group = P2PGroup("all", tuple(range(num_ranks)), rank, TIMEOUT, status)
        group.attach(built.gate)
        status.connect(epoch)
        work = getattr(group, name)(*arguments)
        threading.Timer(0.05, status.fail, [RuntimeError("rank 1 died")]).start()
        began = time.monotonic()
        work.wait()
        if time.monotonic() - began > TIMEOUT.total_seconds() / 3:
            patient.append(name)
    assert registry.make_store is not None
    store = registry.make_store(0)
    if rank == 0:
        store.set("done", "")
    store.wait(["done"], timedelta(seconds=60))
    return patient


def collectives(num_ranks: int) -> dict[str, tuple[Any, ...]]:
    """Arguments for one call of each, as rank 0 makes it."""
    one, all_ = [torch.ones(2)], torch.ones(2 * num_ranks)
    many = [torch.ones(2) for _ in range(num_ranks)]
    return {
        "allreduce": (one,),
        "allreduce_coalesced": (one,),
        "broadcast": (one,),
        "reduce": (one,),
        "barrier": (),
        "allgather": ([many], one),
        "allgather_coalesced": ([one for _ in range(num_ranks)], one),
        "gather": ([many], one),
        "_allgather_base": (all_, *one),
        "allgather_into_tensor_coalesced": ([all_], one),
        "reduce_scatter": (one, [many]),
        "_reduce_scatter_base": (*one, all_),
        "reduce_scatter_tensor_coalesced": (one, [all_]),
        "alltoall": (many, [tensor.clone() for tensor in many]),
        "alltoall_base": (all_, all_.clone(), [], []),
        "recv": (one, 1, 0),
        "recv_anysource": (one, 0),
    }


def test_group_collectives_whose_peer_does_not_come_are_all_given_up_after_an_error(tmp_path: Any) -> None:
    assert run_ranks(give_up, tmp_path, 2)[0] == []
