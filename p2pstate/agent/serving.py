"""What a node knows of its run, for whoever looks at it; and what other nodes' pages ask of this one.

In: questions of this node's page and of other nodes' agents, what an agent knows of its node. Out: what all nodes know.
Whichever node is asked asks the others, so there is none whose death takes the page away.

Invariants: whoever asks waits ``ANSWER_S`` at most for the nodes that answer; the node's state is read on the node's
thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from p2pstate.agent.describing import version_of
from p2pstate.agent.events import EventLog
from p2pstate.observe.metrics import exposition
from rendezvous.node import Node, Timer
from rendezvous.plain import count_from, list_from
from rendezvous.types import MemberKey, Role

if TYPE_CHECKING:
    from p2pstate.agent.page_server import PageServer

__all__ = ["Gatherer", "Site", "read_token"]

ANSWER_S = 0.7  # for other nodes
NODE_S = 5.0  # for the own node's thread

T = TypeVar("T")
Answers = dict[str, dict[str, Any]]


def read_token(path: str | Path) -> str:
    """Raises OSError, or ValueError for an empty file."""
    token = Path(path).read_text(encoding="utf-8").strip()
    if not token:
        raise ValueError(f"{path} is empty: put the token of the page into it")
    return token


class Site:
    """What an agent shows of its run: a page, if it is to serve one, and answers to the pages of others."""

    def __init__(self, node: Node, events: EventLog, status: Callable[[], dict[str, Any]]) -> None:
        """``status``: rendezvous.standing.standing_of and agent.status.ranks_status, and what is waited for."""
        self._node, self._events, self._status = node, events, status
        self._gatherer = Gatherer(node, self._snapshot)
        self._page: PageServer | None = None
        self.heard = self._gatherer.heard

    def serve(self, bind: str, token: str | None) -> None:
        """Raises OSError and ValueError as PageServer does."""
        from p2pstate.agent.page_server import PageServer  # what it takes to serve HTTP, most nodes of a run need not

        self._page = PageServer(bind, token, self._node.key.name, self._gatherer.gather, self._metrics)

    def start(self) -> None:
        if self._page is not None:
            self._page.start()
            self._events.emit("page", f"this run's page: {self._page.url}", url=self._page.url)

    def close(self) -> None:
        if self._page is not None:
            self._page.close()

    def _snapshot(self) -> dict[str, Any]:
        page = self._page.url if self._page is not None else None
        return self._status() | {"page": page, "live": self._events.live.summary(time.time())}

    def _metrics(self) -> bytes:
        version = version_of("p2pstate")
        return self._gatherer.on_node(lambda: exposition(self._events.live, self._status(), version))


class Gatherer:
    """Asks all nodes what they know, and answers them. Used on the node's thread, except :meth:`gather`."""

    def __init__(self, node: Node, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._node = node
        self.snapshot = snapshot
        self._number = 0
        self._answers: dict[int, tuple[Answers, Future[Answers], Timer]] = {}

    def gather(self) -> Answers:
        """From any other thread: by name, what each node that answers in time knows. Raises TimeoutError when the own
        node does not."""
        future: Future[Answers] = Future()
        self._node.call_soon_threadsafe(lambda: self._ask(future))
        return future.result(NODE_S)

    def on_node(self, function: Callable[[], T]) -> T:
        """From any other thread: what ``function`` returns, or raises, on the node's thread; or TimeoutError."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._node.call_soon_threadsafe(call)
        return future.result(NODE_S)

    def heard(self, sender: MemberKey, kind: str, body: Any) -> None:
        """``look``: somebody asks; ``seen``: somebody answers. Raises ValueError for nonsense."""
        if kind == "look":
            asked = count_from(body, "a number")
            self._node.send(sender, "seen", [asked, self.snapshot()])
            return
        number, answer = list_from(body, kind, 2)
        if count_from(number, "a number") in self._answers and isinstance(answer, dict):
            self._answers[number][0][sender.name] = answer
            self._finish_if_complete(number)

    def _ask(self, future: Future[Answers]) -> None:
        self._number += 1
        number = self._number
        timer = self._node.call_later(ANSWER_S, lambda: self._finish(number))
        self._answers[number] = ({self._node.key.name: self.snapshot()}, future, timer)
        self._node.broadcast("look", number)
        self._finish_if_complete(number)

    def _finish_if_complete(self, number: int) -> None:
        members = self._node.members()
        asked = {key.name for key, record in members.items() if record.live and record.member.role is Role.NODE}
        if asked <= self._answers[number][0].keys():
            self._finish(number)

    def _finish(self, number: int) -> None:
        answers, future, timer = self._answers.pop(number, ({}, None, None))
        if future is not None and timer is not None:
            timer.cancel()
            future.set_result(answers)
