"""cut_transport: a node that is cut off hears nothing, is heard by nobody, and learns of no death."""

from __future__ import annotations

from rendezvous.cut_transport import CutTransport
from rendezvous.transport import Incoming


class Inner:
    def __init__(self) -> None:
        self.address = "127.0.0.1:1"
        self.sent: list[bytes] = []

    def send(self, address: str, frame: bytes) -> bool:
        self.sent.append(frame)
        return True

    def poll(self, timeout_s: float) -> Incoming:
        return Incoming([b"frame"], ["lost:1"], [("gone:1", True), ("there:1", False)], [7])


def test_cut_node_is_silent_and_deaf_until_it_is_over_but_serves_its_own_processes() -> None:
    now, inner = [0.0], Inner()
    transport = CutTransport(inner, lambda: now[0])  # type: ignore[arg-type]
    transport.send("a:1", b"before")
    transport.cut(5.0)
    assert transport.send("a:1", b"meanwhile")
    found = transport.poll(0.0)
    assert (found.frames, found.lost, found.readable) == ([], [], [7])
    assert found.dialed == [("gone:1", False), ("there:1", False)]
    now[0] = 5.0
    transport.send("a:1", b"after")
    assert inner.sent == [b"before", b"after"]
    found = transport.poll(0.0)
    assert (found.frames, found.lost, found.dialed[0]) == ([b"frame"], ["lost:1"], ("gone:1", True))
