"""The process group that a model holds: calls go to the connections of the round, errors become values.

In: the calls of ``torch.distributed``, DDP, FSDP2, DTensor and DeviceMesh. Out: what the inner group returns while all
is well; echoes (see echo.py) in solo mode and after the first error anywhere in the process.

The first collective on tensors of a card, which all members call together, connects NCCL; later rounds do so at once.

Invariants: no method raises into forward or backward because a peer failed, unless ``Status.on_echo`` does; replacing
``inner`` needs nothing from whoever holds this object; a coalesced call that was begun is ended, whatever happens in
between. The methods are those that ``dir(ProcessGroup)`` lists; a test compares.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BarrierOptions
from torch.distributed import ProcessGroup, ReduceOp

from p2pstate.errors import ConfigError
from p2pstate.groups import echo
from p2pstate.groups.inner import Inner
from p2pstate.groups.journal import Recording, Replay
from p2pstate.groups.nccl import wait_on_host
from p2pstate.groups.status import Status
from p2pstate.groups.uncompiled import uncompiled
from p2pstate.groups.works import CardBarrier, CardWork, EchoWork, GuardedWork, StubbornWork, card_of
from p2pstate.trace import Row

__all__ = ["P2PGroup"]

Echo = Callable[[int, Sequence[Any]], Any]

# What gloo's handles wait for to the very end, whatever deadline ``wait`` is given: transfers between two ranks, and
# reductions that are scattered, which are put together from several operations.
STUBBORN = frozenset(
    {
        "send",
        "recv",
        "recv_anysource",
        "reduce_scatter",
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
    }
)


@uncompiled
class P2PGroup(ProcessGroup):
    """One group of ``members`` (global ranks), identified in every round by ``key``."""

    supports_splitting = supports_reconfigure = supports_window = False  # as torch asks before it uses any of these

    def __init__(self, key: str, members: tuple[int, ...], rank: int, timeout: timedelta, status: Status) -> None:
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self.key = key
        self.members = members
        self.timeout = timeout
        self.inner: Inner | None = None
        self.card: torch.device | None = None  # whose tensors it has been asked to move
        self.connect_card: Callable[[P2PGroup, torch.device], None] | None = None
        self._coalescing: Inner | None = None
        self._in_coalescing = False  # torch keeps a list of what is called meanwhile
        self.broadcasts_objects = False  # into memory that nobody has initialised
        self._rank = rank
        self._status = status
        self._group_name: str | None = None
        self._group_desc = ""
        self._sequence = 0
        # What the agent sees of this group: one row, and one more for each direction between two ranks
        self._row = status.trace.row(key)
        self._rows = {key: self._row}

    # -- the swap

    def attach(self, inner: Inner) -> None:
        self.detach()
        self.inner = inner
        self._watch(inner)
        for row in self._rows.values():
            row.begin(inner.epoch)

    def _watch(self, inner: Inner) -> None:
        status, epoch = self._status, inner.epoch
        inner.watch(lambda error: status.fail(error, epoch))

    def _reaches(self, inner: Inner, card: torch.device | None) -> bool:
        """Whether ``inner`` can be used now, for tensors of ``card``: connects it where that is to be done first."""
        if card is not None and inner.card is None and self.connect_card is not None:
            try:
                self.connect_card(self, card)
                self._watch(inner)
            except ConfigError:
                raise
            except Exception as error:
                self._status.fail(error, inner.epoch)
        return not self._status.echoing

    def detach(self) -> threading.Event | None:
        inner, self.inner = self.inner, None
        return inner.release() if inner is not None else None

    @property
    def carries_messages(self) -> bool:
        """Whether it was asked for messages from one rank to another one, as between the stages of a pipeline."""
        return len(self._rows) > 1

    def _between(self, sender: int | None, receiver: int | None) -> Row:
        """The row of messages from one rank of this group to another one, which both ends count alike."""
        if sender is None or receiver is None:
            return Row()
        text = f"{self.key}:{sender}:{receiver}"
        key = "p2p-" + hashlib.blake2b(text.encode(), digest_size=10).hexdigest()
        if key not in self._rows:
            self._rows[key] = self._status.trace.row(key)
            self._rows[key].begin(self.inner.epoch if self.inner is not None else 0)
        return self._rows[key]

    def _run(
        self, name: str, echoed: Echo, args: tuple[Any, ...], kwargs: dict[str, Any], row: Row | None = None
    ) -> Any:
        self._status.refuse_between_steps(name)
        inner = self.inner
        self._sequence += 1
        number = self._sequence
        values = (*args, *kwargs.values())
        card = card_of(values)
        self.card = card or self.card
        if not self._status.echoing and inner is not None and self._reaches(inner, card):
            row = row or self._row
            entered = row.enter(name)

            def on_end() -> None:
                row.leave(entered)
                if isinstance(self._status.journal, Recording):
                    self._status.journal.ended(self.key, number, name, value)

            value = values[0] if values else None
            try:
                work = getattr(inner.group, name)(*args, **kwargs)
            except Exception as error:
                if _is_callers_mistake(error):
                    row.leave(entered)
                    raise
                self._status.fail(error, inner.epoch)
            else:
                if work is None:  # NCCL has queued it on the caller's own stream: there is nothing to wait for
                    on_end()
                    return None
                handle = _handle_of(name, card)
                return handle(work, self._status, inner.epoch, lambda: echoed(self._rank, values), value, on_end)
        self._status.raise_if_loud()
        if self._status.error is not None and not self._in_coalescing:
            self._status.on_echo()
        with torch.no_grad():
            value = values[0] if values else None
            if isinstance(self._status.journal, Replay) and self._status.journal.answer(self.key, number, name, value):
                return EchoWork(value)
            return EchoWork(echoed(self._rank, values))

    # -- collectives

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and getattr(args[1], "reduceOp", None) == ReduceOp.AVG and _whole_numbers_on_cpu(args[0]):
            return self._average(*args)
        return self._run("allreduce", echo.keep, args, kwargs)

    def _average(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """gloo has no mean of whole numbers: their sum, divided as NCCL does."""
        options.reduceOp = ReduceOp.SUM
        self._run("allreduce", echo.keep, (tensors, options), {}).wait()
        if not self._status.echoing:
            for tensor in tensors:
                tensor.div_(self.size(), rounding_mode="trunc")
        return EchoWork(tensors)

    def allreduce_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("allreduce_coalesced", echo.keep, args, kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("broadcast", echo.zeros if self.broadcasts_objects else echo.keep, args, kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("reduce", echo.keep, args, kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        for options in (*args, *kwargs.values()):
            if isinstance(options, BarrierOptions):
                options.asyncOp = True  # or NCCL waits itself, where no deadline and no error ends it
        return self._run("barrier", echo.keep, args, kwargs)

    def allgather(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("allgather", echo.gather, args, kwargs)

    def allgather_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("allgather_coalesced", echo.gather_lists, args, kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("gather", echo.gather, args, kwargs)

    def gather_single(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("gather_single", echo.gather_flat, args, kwargs)

    gather_into_tensor = gather_single  # torch 2.14 has both names

    def _allgather_base(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("_allgather_base", echo.gather_flat, args, kwargs)

    def all_gather_single(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("all_gather_single", echo.gather_flat, args, kwargs)

    def allgather_into_tensor_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("allgather_into_tensor_coalesced", echo.gather_coalesced, args, kwargs)

    def all_gather_single_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("all_gather_single_coalesced", echo.gather_coalesced, args, kwargs)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("reduce_scatter", echo.reduce_scatter, args, kwargs)

    def _reduce_scatter_base(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("_reduce_scatter_base", echo.reduce_scatter, args, kwargs)

    def reduce_scatter_single(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("reduce_scatter_single", echo.reduce_scatter, args, kwargs)

    def reduce_scatter_tensor_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("reduce_scatter_tensor_coalesced", echo.reduce_scatter, args, kwargs)

    def reduce_scatter_single_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("reduce_scatter_single_coalesced", echo.reduce_scatter, args, kwargs)

    def alltoall(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("alltoall", echo.all_to_all, args, kwargs)

    def alltoall_base(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("alltoall_base", echo.all_to_all, args, kwargs)

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("all_to_all_single", echo.all_to_all, args, kwargs)

    def scatter(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("scatter", echo.scatter, args, kwargs)

    def send(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("send", echo.keep, args, kwargs, self._between(self._rank, _peer(args, kwargs)))

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("recv", echo.zeros, args, kwargs, self._between(_peer(args, kwargs), self._rank))

    def recv_anysource(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("recv_anysource", echo.zeros, args, kwargs, Row())

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        self._status.refuse_between_steps("monitored_barrier")
        inner = self.inner
        if not self._status.echoing and inner is not None:
            try:
                with self._row.inside("monitored_barrier"):
                    inner.group.monitored_barrier(*args, **kwargs)
            except Exception as error:
                self._status.fail(error, inner.epoch)
        self._status.raise_if_loud()

    # -- coalescing of several calls into one is an optimisation that gloo does not have

    def _start_coalescing(self, device: torch.device) -> None:
        inner = self.inner
        card = device if device.type == "cuda" else None
        self.card = card or self.card
        self._in_coalescing = True
        if not self._status.echoing and inner is not None and self._reaches(inner, card):
            inner.group._start_coalescing(device)
            self._coalescing = inner

    def _end_coalescing(self, device: torch.device) -> Any:
        inner, self._coalescing, self._in_coalescing = self._coalescing, None, False
        if inner is not None and inner.group is not None:
            try:
                work = inner.group._end_coalescing(device)
            except Exception as error:
                self._status.fail(error, inner.epoch)
            else:
                if work is None:  # nothing was called in between, or all of it on the caller's own stream
                    return EchoWork(None)
                handle = CardWork if device.type == "cuda" else GuardedWork
                return handle(work, self._status, inner.epoch, lambda: None, None)
        self._status.raise_if_loud()
        return EchoWork(None)

    # -- who and what this group is

    def size(self) -> int:
        return len(self.members)

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "p2p"

    def name(self) -> str:
        return "p2p"

    @property
    def _device_types(self) -> list[torch.device]:
        """Whose tensors it moves: DCP asks for it before it broadcasts or saves."""
        return [torch.device(kind) for kind in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    get_backend = _get_backend  # since torch 2.14

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> Any:
        return self._group_name

    def _set_group_desc(self, description: str) -> None:
        self._group_desc = description

    @property
    def group_desc(self) -> str:
        return self._group_desc

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        if self.inner is not None:
            self.inner.set_timeout(timeout)

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Of torch 2.14: for what the round's connections are asked until one of it has ended."""
        if self.inner is not None:
            self.inner.group._add_ephemeral_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def abort(self) -> None:
        self.detach()

    def shutdown(self) -> None:
        """What was queued on the card ends before."""
        card = self.inner.card if self.inner is not None else None
        if card is not None and not self._status.echoing:
            queued = torch.cuda.current_stream(card).record_event()
            wait_on_host(queued.query, lambda: self._status.echoing, self.timeout.total_seconds())
        self.detach()


def _handle_of(name: str, card: torch.device | None) -> type[GuardedWork]:
    """What an operation's handle has to do when it is waited for."""
    if card is not None:
        return CardBarrier if name == "barrier" else CardWork
    return StubbornWork if name in STUBBORN else GuardedWork


def _is_callers_mistake(error: Exception) -> bool:
    """The same on every rank, and not a failure of a peer."""
    return isinstance(error, TypeError | ValueError | NotImplementedError) or "does not support" in str(error)


def _whole_numbers_on_cpu(tensors: list[torch.Tensor]) -> bool:
    return all(tensor.device.type == "cpu" and not tensor.is_floating_point() for tensor in tensors)


def _peer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The other rank of a ``send`` or ``recv``."""
    peer = args[1] if len(args) > 1 else kwargs.get("dstRank", kwargs.get("srcRank"))
    return peer if isinstance(peer, int) else None
