"""A process's lines to the store that its node's agent serves: one for each thread, so that nothing comes between.

Flows in: store operations, from any thread. Flows out: replies.
Invariants: a thread has at most one request under way, which it sends and whose reply it reads itself; a request waits
no longer than its deadline and twice STORE_ANSWER_S, nor past the round or the agent's end; a forked child opens lines
of its own.
Limits: the socket's name is abstract, so both ends must share a network namespace.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from typing import Any

from rendezvous.channel import Channel, ChannelClosed, Message
from rendezvous.types import STORE_ANSWER_S, StoreReply

# Set to 1, gloo asks for the addresses of all peers at once, else for one after the other and twice for each.
ENV_GLOO_ASKS_ONCE = "GLOO_ENABLE_STORE_V2_API"
_TIMEVAL = struct.Struct("ll")
AGENT_GONE = StoreReply(False, error="this node's agent is gone, and the round with it", ended=True)


class StoreLine:
    """One thread's line. OSError if no agent listens at `address` (any more)."""

    def __init__(self, address: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.connect("\0" + address)
        except OSError:
            self._sock.close()
            raise
        self._channel = Channel(self._sock, blocking=True)
        self._wait_s = 0.0
        self.pid = os.getpid()

    @property
    def closed(self) -> bool:
        return self._channel.closed

    def request(self, epoch: int, op: str, args: list[Any], deadline_s: float) -> StoreReply:
        """One operation on the round's store. A line whose reply is late is closed, so that it answers no other."""
        self._wait_at_most(deadline_s + 2 * STORE_ANSWER_S)
        received = None
        try:
            message = store_request(epoch, op, args, deadline_s)
            message["id"] = 0
            self._channel.send(message)
            received = self._channel.receive()
        except ChannelClosed:
            return AGENT_GONE
        finally:
            if not received:  # also when a signal's handler raised meanwhile
                self._channel.close()
        if not received:
            return StoreReply(False, error=f"the agent did not answer {op} in {deadline_s:g} s", timed_out=True)
        return store_reply_from(received[0][0])

    def close(self) -> None:
        self._channel.close()

    def _wait_at_most(self, wait_s: float) -> None:
        """The kernel keeps the deadline, so that waiting takes one system call."""
        if wait_s != self._wait_s:
            self._wait_s = wait_s
            timeval = _TIMEVAL.pack(int(wait_s), int(wait_s % 1.0 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


class StoreLines:
    """The lines of all threads of this process to one agent."""

    def __init__(self, address: str) -> None:
        """OSError if no agent listens there (any more)."""
        self._address = address
        self._own = threading.local()
        self._own.line = StoreLine(address)

    def request(self, epoch: int, op: str, args: list[Any], deadline_s: float) -> StoreReply:
        line: StoreLine | None = getattr(self._own, "line", None)
        if line is None or line.closed or line.pid != os.getpid():
            try:
                line = self._own.line = StoreLine(self._address)
            except OSError:
                return AGENT_GONE
        return line.request(epoch, op, args, deadline_s)


def store_request(epoch: int, op: str, args: list[Any], deadline_s: float) -> Message:
    """What an agent understands once it has a number (``id``), which the reply carries as well."""
    return {"t": "store", "epoch": epoch, "op": op, "args": args, "deadline_s": deadline_s}


def store_reply_message(number: int, reply: StoreReply) -> Message:
    """What `store_reply_from` understands."""
    fields = [reply.ok, reply.value, reply.error, reply.ended, reply.timed_out]
    return {"t": "reply", "id": number, "store": fields}


def store_reply_from(message: Message) -> StoreReply:
    return StoreReply(*message["store"])
