"""The network as the node sees it: one small interface, so that a whole cluster can run in memory.

Flows in: frames to send, addresses to check. Flows out: frames received, broken connections, checked addresses.
Invariants: nothing blocks except `poll`, and that not longer than asked; a frame arrives whole or not at all, at most
once, and may be lost; everything is called from one thread, except `wake`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class Incoming:
    """What one `poll` found. `dialed`: (address, was the connection refused?); `readable`: watched descriptors;
    `num_unauthorised`: connections turned away because they had another key or none, or had one where none is used.
    """

    frames: list[bytes] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    dialed: list[tuple[str, bool]] = field(default_factory=list)
    readable: list[int] = field(default_factory=list)
    num_unauthorised: int = 0


class Transport(Protocol):
    @property
    def address(self) -> str:
        """Where others reach this node: an IP literal and the port that was really bound."""
        ...

    def send(self, address: str, frame: bytes) -> bool:
        """Hand over a frame for `address`; False if it was dropped because too much waits there already."""
        ...

    def dial(self, address: str, timeout_s: float) -> None:
        """Start a plain connection attempt; its outcome comes out of `poll`."""
        ...

    def forget(self, address: str) -> None:
        """Nobody is at `address` any more: drop what waits for it."""
        ...

    def watch(self, fd: int) -> None:
        """Report `fd` in `readable` while it can be read."""
        ...

    def unwatch(self, fd: int) -> None:
        """The opposite of :meth:`watch`; no error if `fd` is not watched."""

    def wake(self) -> None:
        """Make a running or the next `poll` return at once. From any thread."""
        ...

    def poll(self, timeout_s: float) -> Incoming:
        """What has arrived; waits up to `timeout_s` for the first of it."""

    def close(self, linger_s: float) -> None:
        """Give up every resource; frames still waiting get `linger_s` to leave. Idempotent."""
        ...
