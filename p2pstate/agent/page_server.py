"""A node's page, its metrics and its status over HTTP.

In: requests of browsers and scrapers; what all nodes know, and this node's metrics, asked for anew at each request.
Out: ``/`` (the whole run, as a page), ``/status.json``, ``/metrics`` (this node).

Invariants: read only, GET and HEAD; requests are served by threads of their own, at most MAX_CLIENTS at once and none
for longer than CLIENT_S: others are hung up on, so that neither a crowd nor who sends a byte now and then takes the
agent's threads and descriptors. With a token nothing is told without
it (``Authorization: Bearer TOKEN``, or ``?token=TOKEN``).
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any
from urllib.parse import parse_qs, urlsplit

from p2pstate.observe.page import POLICY, as_page
from p2pstate.observe.whole import merge

__all__ = ["PageServer"]

CLIENT_S = 10.0  # for a client that sends or reads slowly, and for all of one request
MAX_CLIENTS = 64


class PageServer:
    """Raises OSError when it cannot listen at ``bind`` (HOST:PORT; port 0: any), ValueError when that is none."""

    def __init__(
        self,
        bind: str,
        token: str | None,
        name: str,
        gather: Callable[[], dict[str, dict[str, Any]]],
        metrics: Callable[[], bytes],
    ) -> None:
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
    gather: Callable[[], dict[str, dict[str, Any]]]
    metrics: Callable[[], bytes]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._places = threading.Semaphore(MAX_CLIENTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        limit = threading.Timer(CLIENT_S, _hang_up, [request])
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no reason to fill the run's console with tracebacks, as socketserver does."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        request.shutdown(socket.SHUT_RDWR)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_S
    server_version = "p2pstate"
    sys_version = ""

    def do_GET(self) -> None:
        try:
            parts = urlsplit(self.path)
        except ValueError as error:
            self._answer(400, "text/plain", f"{error}\n".encode())
            return
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
        except (KeyError, TypeError, AttributeError) as error:
            text = f"some node tells what this one does not know: is it of another release of p2pstate? ({error!r})\n"
            self._answer(500, "text/plain", text.encode())

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
