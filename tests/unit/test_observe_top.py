"""``p2pstate top``: whom it asks."""

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rich.console import Console

from p2pstate.cli import main
from p2pstate.observe.top import _Pages, _render


@contextmanager
def page(run: dict[str, object]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(run).encode()
            self.send_response(200 if self.headers["Authorization"] == "Bearer secret" else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_top_goes_on_with_the_page_of_another_node_when_the_one_it_asked_is_gone() -> None:
    with page({"asked": "second", "nodes": []}) as second:
        with page({"asked": "first", "nodes": [{"page": None}, {"page": second}]}) as first:
            pages = _Pages(first.removeprefix("http://"), "secret")
            assert pages.ask()["asked"] == "first"
        assert pages.ask()["asked"] == "second"
        assert pages.ask()["asked"] == "second"
    with pytest.raises(OSError, match="refused"):
        pages.ask()


def test_top_in_a_narrow_terminal_cuts_nothing_off() -> None:
    incident = {"s_ago": 3.0, "cause": "node", "reason": "node n0 is gone", "seconds": 0.9}
    run: dict[str, Any] = {
        "run_id": "job",
        "view": {},
        "verdict": None,
        "waiting": [],
        "weaknesses": [],
        "slow": [],
        "starved": [[1, "it waits 0.40 s a step for its batch"]],
        "nodes": [
            {"name": "n1", "part": "training", "state": "alive", "vault_bytes": 9, "if_it_dies": "n2 takes over"}
        ],
        "ranks": [{"rank": 7, "node": "n1", "pid": 4711, "phase": "loop", "step": 123456, "protected": 123455}],
        "incidents": [incident | {"steps_lost": 1, "protected_s": 1.25}],
        "goodput": {window: {"seconds": {"useful": 3.0, "data": 1.0}} for window in ("now", "hour", "run")},
        "fetch_p95_s": 0.02,
        "on_disk": {"step": 100000, "s_ago": 7.0},
    }
    run["ranks"][0]["keepers"] = ["n2"]
    for width, has_process in ((40, False), (100, True)):
        console = Console(width=width, file=io.StringIO())
        console.print(_render(run, console.width))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert max(map(len, shown.splitlines())) <= width
        assert "…" not in shown
        for word in ("training, protected", "123456", "123455", "gone", "0.90 s", "100000", "starved", "75.0 %"):
            assert word in shown
        assert ("4711" in shown) == has_process


def test_top_asks_nobody_but_pages() -> None:
    with pytest.raises(ValueError, match="no http:// address"):
        _Pages("file:///etc/passwd", "").ask()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--interval", "-1"], "--interval -1: give seconds"),
        (["--interval", "nan"], "--interval nan: give seconds"),
        (["--token-file", "/nowhere/token"], "--token-file cannot be read"),
        ([], "127.0.0.1:1 tells nothing"),
    ],
)
def test_top_says_what_is_wrong(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "127.0.0.1:1", *options]) == 1
    assert says in capsys.readouterr().err
