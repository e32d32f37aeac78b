"""A transport whose node can be cut off for a while, as a partition of the network does, for rehearsing one.

Flows in: another transport, and when the cut ends. Flows out: nothing meanwhile, in either direction.
Invariants: what was sent or arrived during the cut is lost for ever; nobody hears a refusal, so nothing proves a death.
Limits: only what goes through this transport is cut; connections that other processes of the host have stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rendezvous.transport import Incoming, Transport


class CutTransport:
    """rendezvous.transport.Transport, around `inner`, which belongs to it."""

    def __init__(self, inner: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._clock = clock
        self._until_s = float("-inf")

    def cut(self, seconds: float) -> None:
        """From now on, and no longer than this."""
        self._until_s = self._clock() + seconds

    @property
    def is_cut(self) -> bool:
        return self._clock() < self._until_s

    @property
    def address(self) -> str:
        return self._inner.address

    def send(self, address: str, frame: bytes) -> bool:
        return True if self.is_cut else self._inner.send(address, frame)

    def dial(self, address: str, timeout_s: float) -> None:
        self._inner.dial(address, timeout_s)

    def forget(self, address: str) -> None:
        self._inner.forget(address)

    def watch(self, fd: int) -> None:
        self._inner.watch(fd)

    def unwatch(self, fd: int) -> None:
        self._inner.unwatch(fd)

    def wake(self) -> None:
        self._inner.wake()

    def poll(self, timeout_s: float) -> Incoming:
        incoming = self._inner.poll(timeout_s)
        if self.is_cut:
            incoming.frames.clear()
            incoming.lost.clear()
            incoming.dialed = [(address, False) for address, _ in incoming.dialed]
        return incoming

    def close(self, linger_s: float) -> None:
        self._inner.close(linger_s)
