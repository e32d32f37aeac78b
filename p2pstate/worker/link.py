"""A worker's line to its agent: one reader thread, requests from any thread.

In: what the agent says (assignment, rounds, aborts, replies). Out: what the worker says (requests, errors, events).
Invariants: an abort of round ``e`` frees every wait that belongs to ``e`` or an older round, in every thread, before
the ``on_abort`` callback returns; a worker whose agent is gone ends at once (a dead agent is a dead node), or, where
somebody else ends it, does nothing any more.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from p2pstate.errors import EXIT_REPLACE, Retryable
from p2pstate.memory import Bound
from p2pstate.types import Part, RoundInfo, SlotRecord, Version
from rendezvous.channel import Channel, ChannelClosed
from rendezvous.store_line import store_reply_from, store_request
from rendezvous.types import StoreReply

__all__ = ["Link", "RoundAborted"]

_POLL_S = 1.0
_NEVER = 1 << 62  # a round that is aborted only when all are


class RoundAborted(Retryable):
    """The round this wait belonged to is over."""


@dataclass(slots=True)
class _Pending:
    done: threading.Event = field(default_factory=threading.Event)
    reply: dict[str, Any] | None = None
    fds: list[int] = field(default_factory=list)
    epoch: int | None = None


class Link:
    """Thread-safe. One per worker process.

    ``on_lost`` is called once when the agent is gone, in place of ending the process; every round is aborted then.
    """

    def __init__(self, channel: Channel, on_lost: Callable[[], None] | None = None) -> None:
        self._channel = channel
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)
        self._assignment: dict[str, Any] | None = None
        self._round: RoundInfo | None = None
        self._aborted_epoch = 0
        # Set before the round that a rehearsed process joins: seconds that earlier processes of its rank have counted,
        # and what its script raised last.
        self.adopted: tuple[dict[str, float], tuple[int, str]] | None = None
        self._abort_reason = ""
        self.leaving = ""  # why this node leaves: it waits until this process stands between two steps
        self.waited_s = 0.0  # how long the agents waited for a node before the newest round
        self.on_abort: Callable[[int, str], None] = lambda epoch, reason: None
        self.on_save_now: Callable[[], None] = lambda: None
        self.on_saved: Callable[[Version, str, str], None] = lambda version, error, name: None
        self.on_data_ended: Callable[[int, int, int, int, int], None] = lambda *end: None
        self._thread = threading.Thread(target=self._read, name="p2pstate-link", daemon=True)
        self._thread.start()

    # -- what the agent told us

    def wait_assignment(self, timeout_s: float = math.inf) -> dict[str, Any] | None:
        """Block until this process is given a rank. A spare waits here as long as the run lasts.

        None when time is up, or the agent is gone; ``{"refused": reason}`` when it will give none.
        """
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while self._assignment is None and time.monotonic() < until_s and not self.is_aborted(_NEVER):
                self._changed.wait(min(_POLL_S, timeout_s))
            return self._assignment

    def wait_round(self, after_epoch: int) -> RoundInfo:
        """The newest round later than ``after_epoch`` that was not aborted.

        Waits as long as the agent does (``--spare-wait``): when it gives up, it ends this process.
        """
        with self._changed:
            while True:
                info = self._round
                if info and info.epoch > max(after_epoch, self._aborted_epoch):
                    return info
                self._changed.wait(_POLL_S)

    def is_aborted(self, epoch: int) -> bool:
        return epoch <= self._aborted_epoch

    @property
    def abort_reason(self) -> str:
        return self._abort_reason

    # -- what we tell the agent

    def send(self, kind: str, /, **fields: Any) -> None:
        """Tell the agent something; nothing comes back. The process ends when the agent is gone."""
        self._tell({"t": kind, **fields})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._lost()

    def store_request(self, epoch: int, op: str, args: list[Any], deadline_s: float) -> StoreReply:
        """One operation on the round's store. Waits no longer than ``deadline_s`` and a second, nor past an abort."""
        if self.is_aborted(epoch):
            return StoreReply(ok=False, error=f"round {epoch} is over: {self._abort_reason}", ended=True)
        reply, _ = self._call(store_request(epoch, op, args, deadline_s), deadline_s + 1.0, epoch)
        if reply is None:
            if self.is_aborted(epoch):
                return StoreReply(ok=False, error=f"round {epoch} is over: {self._abort_reason}", ended=True)
            text = f"no answer to {op} within {deadline_s:.1f} s"
            return StoreReply(ok=False, error=text, timed_out=True)
        return store_reply_from(reply)

    def allocate(self, part: Part, index: int, num_bytes: int) -> int:
        """A descriptor of the memory of one slot of this node's vault; the caller closes it.

        Raises Retryable with the agent's reason (no memory) or when it does not answer within 60 s.
        """
        reply, fds = self._call({"t": "allocate", "part": list(part), "index": index, "num_bytes": num_bytes}, 60.0)
        if reply is None or not fds:
            raise Retryable(reply["error"] if reply else "the agent did not answer a request for memory within 60 s")
        return fds[0]

    def open_slot(self, slot_id: int) -> int:
        """A descriptor of an existing slot of this node's vault; the caller closes it."""
        reply, fds = self._call({"t": "open", "slot": slot_id}, 30.0)
        if reply is None or not fds:
            raise Retryable(f"slot {slot_id} is not in this node's vault any more")
        return fds[0]

    def inventory(self) -> tuple[list[SlotRecord], list[Any]]:
        """(records of this node's vault, lineage entries its agent remembers)."""
        reply, _ = self._call({"t": "inventory"}, 30.0)
        if reply is None:
            raise Retryable("the agent did not answer a request for its inventory within 30 s")
        return [SlotRecord.unpack(raw) for raw in reply["records"]], reply["lineage"]

    def room(self) -> Bound:
        """What this node's vault may hold in all."""
        reply, _ = self._call({"t": "room"}, 30.0)
        if reply is None:
            raise Retryable("the agent did not answer within 30 s how much memory there is")
        return Bound(reply["left_bytes"], reply["what"])

    # -- internals

    def _call(
        self, message: dict[str, Any], deadline_s: float, epoch: int | None = None
    ) -> tuple[dict[str, Any] | None, list[int]]:
        pending = _Pending(epoch=epoch)
        number = next(self._ids)
        self._pending[number] = pending
        try:
            self._tell({**message, "id": number})
            if epoch is not None and self.is_aborted(epoch):
                return None, []  # aborted between the check and the registration
            pending.done.wait(deadline_s)
            return pending.reply, pending.fds
        finally:
            self._pending.pop(number, None)

    def _read(self) -> None:
        try:
            while True:
                for message, fds in self._channel.receive():
                    self._handle(message, fds)
        except ChannelClosed:
            self._lost()

    def _lost(self) -> None:
        if self._on_lost is None:
            os._exit(EXIT_REPLACE)
        if not self.is_aborted(_NEVER):
            self._abort(_NEVER, "this node's agent is gone")
            self._on_lost()

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        kind = message["t"]
        if kind == "reply":
            pending = self._pending.get(message["id"])
            if pending is None:
                for fd in fds:
                    os.close(fd)
                return
            pending.reply, pending.fds = message, fds
            pending.done.set()
        elif kind == "save_now":
            self.on_save_now()
        elif kind == "saved":
            self.on_saved(Version(*message["version"]), message["error"], message["name"])
        elif kind == "data_ended":
            self.on_data_ended(*(message[key] for key in ("epoch", "rank", "step", "num_batches", "loop")))
        elif kind == "abort":
            self._abort(message["epoch"], message["reason"])
        elif kind == "round":
            with self._changed:
                self._round = RoundInfo.unpack(message["round"])
                self.waited_s = message["waited_s"]
                self._changed.notify_all()
        elif kind == "refused":
            with self._changed:
                self._assignment = {"refused": message["reason"]}
                self._changed.notify_all()
        elif kind == "adopted":
            step, signature = message["raised"]
            self.adopted = message["seconds"], (step, signature)
        elif kind == "pause":
            self.leaving = message["reason"]
        elif kind == "assign":
            with self._changed:
                message["page"] = fds[0] if fds else None
                self._assignment = message
                if message["round"] is not None:
                    self._round = RoundInfo.unpack(message["round"])
                self._changed.notify_all()

    def _abort(self, epoch: int, reason: str) -> None:
        with self._changed:
            if epoch <= self._aborted_epoch:
                return
            self._aborted_epoch, self._abort_reason = epoch, reason
            self._changed.notify_all()
        for pending in list(self._pending.values()):
            if pending.epoch is not None and pending.epoch <= epoch:
                pending.done.set()
        self.on_abort(epoch, reason)
