"""All groups of this process, and how they are connected for a round.

In: the creation of groups (by torch, through the backend ``p2p``), and rounds. Out: every group connected to its peers
of the same round, together with connections of our own: *gate*, a group (the votes), and *replication*, a transport
(bulk state): plain TCP, or NCCL where the training state is on cards.

NCCL joins a group when that moves tensors of a card for the first time. In later rounds it is there from the beginning
if any member says so as the members meet: a newcomer may not have got that far.

Invariants: groups are identified by (members, ordinal among groups of the same members), not by creation order alone,
and connected in the order of these keys, so that ranks which belong to different sets of groups cannot wait for each
other in a circle. A cut (an abort, the first error) frees every thread that is blocked in any of them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from p2pstate.errors import ConfigError
from p2pstate.groups.group import P2PGroup
from p2pstate.groups.group_transport import GroupTransport
from p2pstate.groups.inner import Inner, build_inner, card_inner
from p2pstate.groups.mesh import Mesh
from p2pstate.groups.nccl import Communicator
from p2pstate.groups.sockets import Connections
from p2pstate.groups.status import STATUS, Status
from p2pstate.groups.tcp import TcpTransport
from p2pstate.groups.transport import Transport
from p2pstate.groups.waiting import ABANDON_AFTER_S

__all__ = ["GATE", "REGISTRY", "Built", "Registry"]

GATE = "gate"  # the key of the group that votes
OWN_TIMEOUT = timedelta(minutes=30)
MESH_TIMEOUT_S = 30.0  # between ranks that are all there
NUM_BULK_BLOCKS = 4  # of a card's processors for bulk state: training needs the others


class _Cuttable(Protocol):
    def cut(self) -> None: ...


@dataclass(slots=True)
class Built:
    """Connections of one round, not in use yet."""

    gate: Inner
    replication: Transport
    groups: dict[str, Inner] = field(default_factory=dict)


class Registry:
    def __init__(self, status: Status) -> None:
        self._status = status
        self._groups: list[P2PGroup] = []
        self._ordinals: Counter[tuple[int, ...]] = Counter()
        self._lock = threading.Lock()
        self._building: list[_Cuttable] = []
        self._cut_epoch = 0
        self.gate: Inner | None = None
        self.replication: Transport | None = None
        # Set by the worker: the store of a round, this process's rank and address, and the world.
        self.make_store: Callable[[int], Store] | None = None
        self.host = ""
        self.rank = 0
        self.world_size = 0
        # The card of the training state, where it is on one. Before it is known, when another rank is on its card
        # already: the device_id that torch was given, and this process's place on its node.
        self.card: torch.device | None = None
        self.told_card: torch.device | None = None
        self.local_rank = 0

    @property
    def groups(self) -> Sequence[P2PGroup]:
        return self._groups

    @property
    def num_collectives(self) -> int:
        """How many collectives the groups were asked for so far."""
        return sum(group._get_sequence_number_for_group() for group in self._groups)

    def create(self, members: Sequence[int], rank: int, timeout: timedelta) -> P2PGroup:
        """A new group; connected at once unless this process is alone (solo) or has seen an error."""
        ranks = tuple(members) or tuple(range(self.world_size))
        ordinal = self._ordinals[ranks]
        self._ordinals[ranks] += 1
        digest = hashlib.blake2b(repr(ranks).encode(), digest_size=6).hexdigest()
        key = f"{len(ranks):06d}-{digest}-{ordinal:04d}"
        group = P2PGroup(key, ranks, rank, timeout, self._status)
        group.connect_card = self._connect_card
        self._groups.append(group)
        if not self._status.echoing:
            try:
                group.attach(self._build(key, group.members, self._status.epoch, timeout))
            except Exception as error:
                self._status.fail(error)
        self._status.raise_if_loud()
        return group

    def build(self, epoch: int, *, own_only: bool = False) -> Built:
        """Connections of round ``epoch`` for the gate, bulk state and (unless ``own_only``) every group there is.

        Nothing is in use before :meth:`attach`, so a thread that is left behind here changes nothing. Raises what the
        store or gloo raises, or TransferFailed, when the round ends or a member does not come.
        """
        world = tuple(range(self.world_size))
        made: list[Inner | Transport] = []
        try:
            made.append(gate := self._build(GATE, world, epoch, OWN_TIMEOUT))
            made.append(replication := self._build_replication(world, epoch))
            built = Built(gate, replication)
            for group in [] if own_only else sorted(self._groups, key=lambda group: group.key):
                made.append(inner := self._build(group.key, group.members, epoch, group.timeout, group.card))
                built.groups[group.key] = inner
        except BaseException:
            for each in made:
                each.release()
            raise
        return built

    def attach(self, built: Built) -> None:
        """Use these connections. Collectives go on echoing until ``STATUS.connect``."""
        self.gate, self.replication = built.gate, built.replication
        self._status.trace.row(GATE).begin(built.gate.epoch)
        for group in self._groups:
            if group.key in built.groups:
                group.attach(built.groups[group.key])

    def cut(self, epoch: int, *, replication: bool = True) -> None:
        """Free everything that waits on connections of round ``epoch`` or an older one. Safe from any thread."""
        with self._lock:
            self._cut_epoch = max(self._cut_epoch, epoch)
            building = list(self._building)
        for connections in building:
            connections.cut()
        used: list[Inner | Transport | None] = [*(group.inner for group in self._groups), self.gate]
        for each in [*used, self.replication] if replication else used:
            if each is not None and each.epoch <= epoch:
                each.cut()

    def release(self) -> None:
        """Let go of all connections (the groups stay).

        Waits a little until gloo's threads have ended, so that none of them can still write into a tensor of the model.
        One that could not be freed receives nothing any more: its connections are cut.
        """
        gone = [group.detach() for group in self._groups]
        gone += [each.release() for each in (self.gate, self.replication) if each is not None]
        self.gate = self.replication = None
        deadline = time.monotonic() + ABANDON_AFTER_S
        for event in gone:
            if event is not None:
                event.wait(max(0.0, deadline - time.monotonic()))

    def clear(self) -> None:
        """Let go of the groups as well: whoever made them makes them anew."""
        self.release()
        self._groups.clear()
        self._ordinals.clear()

    def _build(
        self,
        key: str,
        members: tuple[int, ...],
        epoch: int,
        timeout: timedelta,
        card: torch.device | None = None,
    ) -> Inner:
        store, wants_card = self._meet(key, members, epoch, timeout, card is not None)
        connections = Connections()
        with self._under_way(connections, epoch):
            inner = build_inner(store, members.index(self.rank), len(members), self.host, epoch, timeout, connections)
        if wants_card:
            try:
                self._join_card(inner, key, members, card or self._own_card(), timeout)
            except BaseException:
                inner.release()
                raise
        return inner

    def _connect_card(self, group: P2PGroup, card: torch.device) -> None:
        """In the middle of a round, when its members call their first collective on tensors of a card."""
        assert group.inner is not None
        self._join_card(group.inner, group.key, group.members, card, group.timeout)

    def _join_card(
        self,
        inner: Inner,
        key: str,
        members: tuple[int, ...],
        card: torch.device,
        timeout: timedelta,
        num_blocks: int = 0,
    ) -> None:
        if not dist.is_nccl_available():
            raise ConfigError(
                "tensors on a card need NCCL, and this torch has no NCCL: install a build of torch for CUDA on Linux"
            )
        store, _ = self._meet(f"{key}/card", members, inner.epoch, timeout, True)
        communicator = Communicator(
            store, members.index(self.rank), members, card, timeout, name=key, num_blocks=num_blocks
        )
        with self._under_way(communicator, inner.epoch):
            inner.join_card(communicator)

    def _own_card(self) -> torch.device:
        """The card of a process that has not used one yet: the one of its place on the node."""
        if self.told_card is not None:
            return self.told_card
        if torch.cuda.is_initialized():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    def _build_replication(self, world: tuple[int, ...], epoch: int) -> Transport:
        silence_s = OWN_TIMEOUT.total_seconds()
        store, on_cards = self._meet("replication", world, epoch, OWN_TIMEOUT, self.card is not None)
        if on_cards:
            inner = card_inner(store, self.rank, self.world_size, epoch)
            card = self.card or self._own_card()
            try:
                self._join_card(inner, "replication", world, card, OWN_TIMEOUT, NUM_BULK_BLOCKS)
            except BaseException:
                inner.release()
                raise
            return GroupTransport(inner, card, silence_s)
        mesh = Mesh(silence_s)
        try:
            with self._under_way(mesh, epoch):
                mesh.connect(store, self.rank, self.world_size, self.host, MESH_TIMEOUT_S)
        except BaseException:
            mesh.close()
            raise
        return TcpTransport(epoch, mesh, silence_s)

    def _meet(
        self, key: str, members: tuple[int, ...], epoch: int, timeout: timedelta, wants_card: bool
    ) -> tuple[Store, bool]:
        """Wait for all members, which may come minutes apart (one still reads its data): gloo's own patience while
        connecting is short. Returns the store they share, and whether any of them wants NCCL."""
        assert self.make_store is not None
        store = PrefixStore(f"groups/{key}", self.make_store(epoch))
        store.set(f"here/{self.rank}", "card" if wants_card else "")
        keys = [f"here/{rank}" for rank in members]
        store.wait(keys, timeout)
        # Where there are no cards nobody can want one.
        return store, torch.cuda.is_available() and (wants_card or any(store.get(each) == b"card" for each in keys))

    @contextmanager
    def _under_way(self, connections: _Cuttable, epoch: int) -> Iterator[None]:
        """While ``connections`` are being made, a cut of their round reaches them."""
        with self._lock:
            self._building.append(connections)
            if self._cut_epoch >= epoch:
                connections.cut()
        try:
            yield
        finally:
            with self._lock:
                self._building.remove(connections)


REGISTRY = Registry(STATUS)
