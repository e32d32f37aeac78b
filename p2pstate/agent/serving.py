"""A node's page, its metrics and its status over HTTP; and what other nodes' pages ask of this one.

In: requests of browsers, scrapers and other nodes' agents, what an agent knows of its node. Out: ``/`` (the whole run,
as a page), ``/status.json``, ``/metrics`` (this node). Whichever node is asked asks the others, so there is none whose
death takes the page away.

Invariants: read only, GET and HEAD; whoever asks waits ``ANSWER_S`` at most for the nodes that answer; requests are
served by threads of their own and read the node's state on the node's thread only. With a token nothing is told
without it (``Authorization: Bearer TOKEN``, or ``?token=TOKEN``).
"""

from __future__ import annotations

import hmac
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from p2pstate.agent.describing import version_of
from p2pstate.agent.events import EventLog
from p2pstate.observe.metrics import exposition
from p2pstate.observe.page import POLICY, as_page
from p2pstate.observe.whole import merge
from rendezvous.node import Node, Timer
from rendezvous.types import MemberKey, Role

__all__ = ["Gatherer", "PageServer", "Site", "read_token"]

ANSWER_S = 0.7  # for other nodes
NODE_S = 5.0  # for the own node's thread
CLIENT_S = 10.0  # for a client that sends or reads slowly

T = TypeVar("T")
Answers = dict[str, dict[str, Any]]


def read_token(path: str) -> str:
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
            self._node.send(sender, "seen", [int(body), self.snapshot()])
            return
        number, answer = body
        if number in self._answers and isinstance(answer, dict):
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


class PageServer:
    """Raises OSError when it cannot listen at ``bind`` (HOST:PORT; port 0: any), ValueError when that is none."""

    def __init__(self, bind: str, token: str | None, name: str, gather: Callable[[], Answers],
                 metrics: Callable[[], bytes]) -> None:  # fmt: skip
        host, _, port = bind.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdigit():
            raise ValueError(f"{bind!r} is no HOST:PORT to serve the page at, such as 127.0.0.1:8600")
        server = _Server6 if ":" in host else _Server
        self._server = server((host, int(port)), _Handler)
        self._server.token, self._server.node_name = token, name
        self._server.gather, self._server.metrics = gather, metrics
        bound = f"[{host}]" if ":" in host else host
        self.url = f"http://{bound}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="p2pstate-page", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    token: str | None
    node_name: str
    gather: Callable[[], Answers]
    metrics: Callable[[], bytes]


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_S
    server_version = "p2pstate"
    sys_version = ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        token = parse_qs(parts.query).get("token", [""])[0]
        if not self._may_ask(token):
            self._answer(401, "text/plain", b"this page wants a token: Authorization: Bearer TOKEN, or ?token=TOKEN\n")
            return
        try:
            if parts.path == "/":
                page = as_page(merge(self.server.gather()), self.server.node_name, token)
                self._answer(200, "text/html", page.encode())
            elif parts.path == "/status.json":
                self._answer(200, "application/json", json.dumps(merge(self.server.gather())).encode())
            elif parts.path == "/metrics":
                self._answer(200, "text/plain; version=0.0.4", self.server.metrics())
            else:
                self._answer(404, "text/plain", b"there are /, /status.json and /metrics\n")
        except FutureTimeout:
            self._answer(503, "text/plain", b"this node does not answer at the moment\n")
        except ValueError as error:
            self._answer(501, "text/plain", f"{error}\n".encode())

    do_HEAD = do_GET

    def _may_ask(self, token: str) -> bool:
        wanted = self.server.token
        given = self.headers.get("Authorization", "").removeprefix("Bearer ") or token
        return wanted is None or hmac.compare_digest(given.encode(), wanted.encode())

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: requests come every few seconds."""
