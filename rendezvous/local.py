"""The line between a node's agent process and the other processes of its host: a Unix socket, framed messages.

Flows in: what a launcher and workers say. Flows out: replies and news of the agent.
Invariants: only processes of the same user are served; a client that does not read cannot block the agent.
Limits: the socket's name is abstract, so both ends must share a network namespace.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from rendezvous.channel import NO_DESCRIPTOR, Channel, ChannelClosed, Message, is_of_this_user
from rendezvous.node import Node

_FLUSH_INTERVAL_S = 0.02


class LocalServer:
    """The agent's end, on the node's thread. `address` is what `store_line.StoreLines` takes."""

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
        self._listen()

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
            if channel.is_behind:
                self._node.call_later(_FLUSH_INTERVAL_S, lambda: self._flush(channel))

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
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR:
                    raise
                self._pause()
                return
            if not is_of_this_user(sock):
                sock.close()
                continue
            self.adopt(Channel(sock, blocking=False))

    def _pause(self) -> None:
        """No descriptor is free: look again when there may be one, and not all the time."""
        self._node.remove_reader(self._listener.fileno())
        self._node.call_later(_FLUSH_INTERVAL_S, self._listen)

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._node.add_reader(self._listener.fileno(), self._accept)

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


class LocalClient:
    """A launcher's end. Sends from any thread; news come on a thread of this object's own."""

    def __init__(
        self,
        channel: Channel,
        on_news: Callable[[Message], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._on_news = on_news
        self._on_closed = on_closed
        self.closed = False
        self._thread = threading.Thread(target=self._read, name="rendezvous-local", daemon=True)
        self._thread.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Tell the agent something; lost if it is gone."""
        try:
            self._channel.send({"t": kind, **fields})
        except ChannelClosed:
            self._end()

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
                    self._on_news(message)
        except ChannelClosed:
            self._end()

    def _end(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._on_closed()
