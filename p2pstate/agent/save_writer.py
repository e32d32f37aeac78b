"""The process of a node that writes saves, as its agent sees it: started, given orders, killed when it is not wanted.

In: orders for durable/writer.py. Out: its replies to whoever gave the order, the word that it has ended.

Invariants: one order at a time; the reply to an order that was dropped reaches nobody; a process that was busy with one
is killed, because storage may hold it for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2pstate.agent.events import EventLog
from p2pstate.agent.helpers import Helper, Helpers
from rendezvous.channel import Message

__all__ = ["SaveWriter"]


@dataclass(slots=True)
class _Order:
    """What the process is doing."""

    serial: int
    reply: Callable[[Message], None]


class SaveWriter:
    """Everything on the node's thread. ``on_ended`` is told why a process has ended that nobody killed here."""

    def __init__(self, helpers: Helpers, events: EventLog, on_ended: Callable[[str], None]) -> None:
        self._helpers, self._events, self._on_ended = helpers, events, on_ended
        self._process: Helper | None = None
        self._order: _Order | None = None
        self._serial = 0

    def start(self) -> bool:
        """Have a process; False: none can be started now."""
        if self._process is None:
            self._process = self._helpers.start("writer", self._heard, self._ended)
        return self._process is not None

    def give_slot(self, slot: int, fd: int) -> None:
        """For the next order."""
        assert self._process is not None
        self._helpers.tell(self._process, {"t": "slot", "slot": slot}, (fd,))

    def order(self, kind: str, where: list[str], reply: Callable[[Message], None], **fields: Any) -> None:
        assert self._process is not None
        self._serial += 1
        self._order = _Order(self._serial, reply)
        self._helpers.tell(self._process, {"t": kind, "serial": self._serial, "where": where, **fields})

    def drop_order(self) -> None:
        """Nobody wants any more what it is doing."""
        if self._order is not None and self._process is not None:
            self._helpers.kill(self._process)
            self._process = self._order = None

    def _heard(self, message: Message) -> None:
        if message["t"] == "writer_ready":
            self._events.emit("writer_started", pid=message["pid"])
            return
        order = self._order
        if order is not None and message["serial"] == order.serial:
            self._order = None
            order.reply(message)

    def _ended(self, cause: str) -> None:
        self._process = self._order = None
        self._on_ended(cause)
