"""What carries bulk state between ranks: messages, and what every carrier of them promises.

In: messages to send (a head of a few bytes, a body in memory that is somebody else's) and messages to expect. Out: the
bodies in place at the receivers, hashed on the way; the sender's digest comes last, so that the receiver can compare.

Invariants of every carrier: all messages of one exchange move at once, those from one rank to another in their order; a
body is hashed once by its sender, however many ranks it is sent to, and once by each receiver; :meth:`Transport.cut`,
from any thread, makes a blocked exchange raise; an error is the exchange's only (no training group hears of it).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from p2pstate.errors import Retryable

__all__ = [
    "DIGEST_BYTES",
    "FRAME_BYTES",
    "Body",
    "Incoming",
    "OnError",
    "Outgoing",
    "Payload",
    "TransferFailed",
    "Transport",
]

DIGEST_BYTES = 16
MAX_HEAD_BYTES = 1 << 20
_MAGIC = b"p2pbulk1"
_FRAME = struct.Struct("<8sQQ")  # magic, bytes of the head, bytes of the body
FRAME_BYTES = _FRAME.size


class Body(Protocol):
    """What is sent: a memoryview, or something that makes one of each slice."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: slice, /) -> memoryview: ...


OnError = Callable[[Exception], None]


class TransferFailed(Retryable):
    """Bulk state did not arrive: the other rank is gone, the round is over, or what came is not what was expected."""


class Payload:
    """A body to send, to one rank or to several.

    ``digest``: where it is known already. Else whoever sends the body first hashes it, and ``on_digest`` is told on
    that thread, also when the sending fails.
    """

    def __init__(
        self, body: Body, digest: bytes | None = None, on_digest: Callable[[bytes], None] = lambda digest: None
    ) -> None:
        self.body = body
        self._digest = digest
        self._on_digest = on_digest
        self._lock = threading.Lock()
        self._claimed = False
        self._known = threading.Event()
        if digest is not None:
            self._known.set()

    def claim(self) -> xxhash.xxh3_128 | None:
        """What to hash the body with, for the first sender; the others only wait for its digest."""
        with self._lock:
            if self._claimed or self._digest is not None:
                return None
            self._claimed = True
            return xxhash.xxh3_128()

    def hashed(self, digest: bytes) -> None:
        self._digest = digest
        self._known.set()
        self._on_digest(digest)

    def digest(self, timeout_s: float) -> bytes:
        """Raises TransferFailed when the first sender does not come to the body's end in time."""
        if not self._known.wait(timeout_s) or self._digest is None:
            raise TransferFailed(f"a body of {len(self.body)} bytes was not hashed within {timeout_s:.0f} s")
        return self._digest


@dataclass(frozen=True, slots=True)
class Outgoing:
    to: int
    head: bytes
    payload: Payload


@dataclass(frozen=True, slots=True)
class Incoming:
    """``accept``: the head and the size of the body -> the memory it goes to, of exactly that size; raises to refuse.
    ``arrived``: called with the digest computed here and the one the sender computed. Both on the receiving thread.
    """

    sender: int
    accept: Callable[[bytes, int], memoryview]
    arrived: Callable[[bytes, bytes], None]


class Transport(Protocol):
    """The bulk connections of one round. ``name`` says what carries it: tcp, gloo or nccl."""

    name: str
    epoch: int

    def exchange(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], on_error: OnError = lambda error: None
    ) -> None:
        """Move all messages; returns when the last one has arrived or been handed over.

        Every rank must expect exactly what the others send it. One exchange at a time. Raises the first error
        (TransferFailed, or what ``accept`` or ``arrived`` raised) once every message has moved or failed; ``on_error``
        is called with it as soon as it is known, on some thread, while the others may still move for long.
        """
        ...

    def cut(self) -> None:
        """Make a blocked exchange raise, now, and every later one. Safe from any thread."""
        ...

    def release(self) -> threading.Event:
        """Cut, and close everything in the background; the event is set once nothing of it is left."""
        ...


def whole(body: Body) -> memoryview:
    """All of it in one piece."""
    return body[: len(body)]


def pack_frame(message: Outgoing) -> bytes:
    """The first bytes of a message: sizes, and the head."""
    assert len(message.head) <= MAX_HEAD_BYTES, f"a head of {len(message.head)} bytes"
    return _FRAME.pack(_MAGIC, len(message.head), len(message.payload.body)) + message.head


def unpack_frame(raw: bytes, sender: int) -> tuple[int, int]:
    """(bytes of the head, bytes of the body) from the first FRAME_BYTES bytes. Raises TransferFailed."""
    magic, head_bytes, body_bytes = _FRAME.unpack(raw)
    if magic != _MAGIC or head_bytes > MAX_HEAD_BYTES:
        raise TransferFailed(f"rank {sender} sent something that is no message: {raw[:16]!r}")
    return head_bytes, body_bytes


def accepted(message: Incoming, head: bytes, body_bytes: int) -> memoryview:
    """The memory for a body."""
    body = message.accept(head, body_bytes)
    assert len(body) == body_bytes, f"{len(body)} bytes of room for a body of {body_bytes}"
    return body
