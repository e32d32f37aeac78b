"""One whole core of rendezvous on a bench: the test speaks for all others and owns the clock."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from rendezvous import events
from rendezvous.config import Config
from rendezvous.core import Core
from rendezvous.effects import Effect, Send
from rendezvous.messages import Join, Message, Status
from rendezvous.types import Member, MemberKey, PassiveApplication, View
from rendezvous.wire import Envelope


class Oracle(PassiveApplication):
    def progress(self) -> Mapping[str, Any]:
        return {"step": 3}


def member(name: str, incarnation: int = 1, port: int | None = None, **more: Any) -> Member:
    return Member(name, incarnation, f"127.0.0.1:{port or 7000 + ord(name)}", **more)


def view_of(names: str, epoch: int = 1, nonce: str = "nonce") -> View:
    return View(nonce, epoch, 1, tuple(map(member, names)), (), (), "before")


class Bench:
    """Core a; the test speaks for the others and owns the clock."""

    def __init__(self, **config: Any) -> None:
        settings = {"num_nodes_min": 2, "num_nodes_max": 2, **config}
        me = member("a")
        self.core = Core(me, Config("run", "a", me.address, **settings), Oracle(), random.Random(1), 0.0)
        self.now = 0.0

    def step(self, event: events.Event, now: float | None = None) -> list[Effect]:
        self.now = self.now if now is None else now
        return self.core.step(event, self.now)

    def hear(self, sender: Member, message: Message, *, nonce: str = "", run: str = "run", to: int = 1) -> list[Effect]:
        envelope = Envelope(run, nonce, sender.key, sender.address, MemberKey("a", to), message)
        return self.step(events.Received(envelope))

    def know(self, *members: Member) -> None:
        for one in members:
            self.hear(one, Join(one))

    def status(self, one: Member) -> Status:
        return self.core.membership.records[one.key].status


def sent(effects: list[Effect], kind: type[Any]) -> list[tuple[str, Any]]:
    return [(e.address, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]
