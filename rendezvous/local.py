"""The line between a node's agent process and the other processes of its host: a Unix socket, framed messages.

Flows in: requests of a launcher and of workers. Flows out: replies and news of the agent.
Invariants: only processes of the same user are served; a request is answered once; a client waits no longer than its
deadline, nor past the agent's end; a client that does not read cannot block the agent.
Limits: the socket's name is abstract, so both ends must share a network namespace.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rendezvous.channel import Channel, ChannelClosed, Message
from rendezvous.node import Node
from rendezvous.types import StoreReply

_FLUSH_INTERVAL_S = 0.02
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class LocalServer:
    """The agent's end, on the node's thread. `address` is what `LocalClient.connect` takes."""

    def __init__(
        self,
        node: Node,
        on_message: Callable[[Channel, Message, list[int]], None],
        on_closed: Callable[[Channel], None],
    ) -> None:
        self._node = node
        self._on_message = on_message
        self._on_closed = on_closed
        self._channels: set[Channel] = set()
        self.address = f"p2pstate-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        node.add_reader(self._listener.fileno(), self._accept)

    def adopt(self, channel: Channel) -> None:
        """Serve a channel that exists already."""
        self._channels.add(channel)
        self._node.add_reader(channel.fileno(), lambda: self._read(channel))

    def tell(self, channel: Channel, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send; who does not take its messages any more is dropped."""
        if channel not in self._channels:
            return
        try:
            channel.send(message, fds)
        except ChannelClosed:
            self.drop(channel)
        else:
            self._flush(channel)

    def drop(self, channel: Channel) -> None:
        if channel in self._channels:
            self._channels.remove(channel)
            self._node.remove_reader(channel.fileno())
            channel.close()
            self._on_closed(channel)

    def close(self) -> None:
        self._node.remove_reader(self._listener.fileno())
        self._listener.close()
        for channel in list(self._channels):
            self.drop(channel)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(raw)[1] != os.getuid():
                sock.close()
                continue
            self.adopt(Channel(sock, blocking=False))

    def _read(self, channel: Channel) -> None:
        try:
            for message, fds in channel.receive():
                self._on_message(channel, message, fds)
        except ChannelClosed:
            self.drop(channel)
        except (TypeError, ValueError, KeyError):
            self.drop(channel)  # one broken process must not take the node's agent with it

    def _flush(self, channel: Channel) -> None:
        """Go on sending what a full socket held back, until it is through."""
        if channel not in self._channels:
            return
        try:
            if channel.flush():
                return
        except ChannelClosed:
            self.drop(channel)
            return
        self._node.call_later(_FLUSH_INTERVAL_S, lambda: self._flush(channel))


@dataclass(slots=True)
class _Pending:
    done: threading.Event = field(default_factory=threading.Event)
    reply: Message | None = None


class LocalClient:
    """A process's end. Requests from any thread; news come on a thread of this object's own."""

    def __init__(
        self,
        channel: Channel,
        on_news: Callable[[Message], None] = lambda message: None,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._channel = channel
        self._on_news = on_news
        self._on_closed = on_closed
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self.closed = False
        self._thread = threading.Thread(target=self._read, name="rendezvous-local", daemon=True)
        self._thread.start()

    @staticmethod
    def connect(address: str) -> LocalClient:
        """OSError if no agent listens there (any more)."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect("\0" + address)
        except OSError:
            sock.close()
            raise
        return LocalClient(Channel(sock, blocking=True))

    def send(self, kind: str, **fields: Any) -> None:
        """Tell the agent something; lost if it is gone."""
        try:
            self._channel.send({"t": kind, **fields})
        except ChannelClosed:
            self._end()

    def call(self, kind: str, wait_s: float, **fields: Any) -> Message | None:
        """The agent's reply; None if it does not come in time or when the agent is gone."""
        number, pending = next(self._numbers), _Pending()
        self._pending[number] = pending
        try:
            self.send(kind, id=number, **fields)
            if not self.closed:
                pending.done.wait(wait_s)
            return pending.reply
        finally:
            self._pending.pop(number, None)

    def store_request(self, epoch: int, op: str, args: list[Any], deadline_s: float) -> StoreReply:
        """One operation on the round's store. Waits no longer than `deadline_s` and a second."""
        reply = self.call("store", deadline_s + 1.0, epoch=epoch, op=op, args=args, deadline_s=deadline_s)
        if reply is not None:
            return StoreReply(reply["ok"], reply["value"], reply["error"], reply["ended"], reply["timed_out"])
        if self.closed:
            return StoreReply(False, error="this node's agent is gone, and the round with it", ended=True)
        return StoreReply(False, error=f"the agent did not answer {op} in {deadline_s:g} s", timed_out=True)

    def close(self) -> None:
        """Give up the line; the agent sees the end of it."""
        self._channel.shutdown()
        self._thread.join(1.0)
        self._channel.close()

    def _read(self) -> None:
        try:
            while True:
                for message, fds in self._channel.receive():
                    for fd in fds:
                        os.close(fd)
                    self._handle(message)
        except ChannelClosed:
            self._end()

    def _handle(self, message: Message) -> None:
        if message["t"] != "reply":
            self._on_news(message)
            return
        pending = self._pending.get(message["id"])
        if pending is not None:
            pending.reply = message
            pending.done.set()

    def _end(self) -> None:
        if self.closed:
            return
        self.closed = True
        for pending in list(self._pending.values()):
            pending.done.set()
        self._on_closed()


def store_reply_message(number: int, reply: StoreReply) -> Message:
    """What `LocalClient.store_request` understands."""
    return {
        "t": "reply",
        "id": number,
        "ok": reply.ok,
        "value": reply.value,
        "error": reply.error,
        "ended": reply.ended,
        "timed_out": reply.timed_out,
    }
