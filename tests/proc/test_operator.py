"""p2pstate-operator as a process, under kopf, with an API server over HTTP: it is killed, and another one goes on."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from kubernetes_emulator import Emulator

from p2pstate.operator.reconcile import runs_path

yaml = pytest.importorskip("yaml")
pytest.importorskip("kopf", reason="kopf (extra operator) is not installed")
pytest.importorskip("kubernetes", reason="kubernetes (extra operator) is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "kubernetes" / "operator"
RUNS = runs_path("default")
WITHIN_S = 120.0
VERBS = ["get", "list", "watch", "create", "patch", "delete"]
RESOURCES = {
    "/api/v1": [
        ("pods", "Pod", True),
        ("services", "Service", True),
        ("configmaps", "ConfigMap", True),
        ("nodes", "Node", False),
    ],
    "/apis/p2pstate.dev/v1alpha1": [("runs", "Run", True)],
}
DISCOVERY: dict[str, Any] = {
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
    "/api": {"versions": ["v1"]},
    "/apis": {
        "groups": [
            {
                "name": "p2pstate.dev",
                "versions": [{"groupVersion": "p2pstate.dev/v1alpha1", "version": "v1alpha1"}],
                "preferredVersion": {"groupVersion": "p2pstate.dev/v1alpha1", "version": "v1alpha1"},
            }
        ]
    },
    **{
        path: {
            "groupVersion": path.partition("/")[2].partition("/")[2],
            "resources": [
                {"name": name, "singularName": "", "kind": kind, "namespaced": namespaced, "verbs": VERBS}
                for name, kind, namespaced in entries
            ],
        }
        for path, entries in RESOURCES.items()
    },
}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    emulator: Emulator

    def _any(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if query.get("watch") == "true":
            self._watch(parts.path, query)
        elif parts.path in DISCOVERY:
            self._answer(200, DISCOVERY[parts.path])
        else:
            kind = self.headers.get("Content-Type", "")
            self._answer(*self.emulator.request(self.command, parts.path, query, json.loads(data or b"null"), kind))

    do_GET = do_POST = do_PATCH = do_DELETE = _any

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _watch(self, path: str, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        kind = path.rpartition("/")[2]
        names = {"pods": "Pod", "runs": "Run"}
        told = int(query.get("resourceVersion", 0))
        while True:
            with self.emulator.changed:
                new = [event for event in self.emulator.events if event[0] > told]
                if not new:
                    self.emulator.changed.wait(0.2)
                    continue
            for version, change, each in new:
                told = version
                if each.get("kind") == names.get(kind):
                    self.wfile.write(json.dumps({"type": change, "object": each}).encode() + b"\n")
            self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class Operator:
    """The API server, and a p2pstate-operator that can be killed."""

    def __init__(self, folder: Path) -> None:
        self.server = Emulator(yaml.safe_load((FOLDER / "crd.yaml").read_text()))
        self.server.now_s = time.time() - 1000
        handler = type("Bound", (Handler,), {"emulator": self.server})
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{self._http.server_address[1]}"}}],
            "users": [{"name": "test", "user": {"token": "t"}}],
        }
        (folder / "config").write_text(yaml.safe_dump(config))
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environ = {**os.environ, "KUBECONFIG": str(self._folder / "config"), "PYTHONPATH": str(ROOT)}
        with (self._folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "p2pstate.operator.command"]
            self._process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)

    def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        process, self._process = self._process, None
        process.send_signal(number)
        return process.wait(WITHIN_S)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, f"not in time: {what}\n{(self._folder / 'log').read_text()[-3000:]}"
            time.sleep(0.05)

    def phase(self) -> str:
        _, run = self.server.request("GET", f"{RUNS}/train", {}, None, "")
        return str(run.get("status", {}).get("phase", ""))

    def close(self) -> None:
        if self._process is not None:
            self.end(signal.SIGKILL)
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    made = Operator(tmp_path)
    yield made
    made.close()


def test_operator_that_is_killed_is_taken_up_by_another_one(operator: Operator) -> None:
    server = operator.server
    operator.start()
    server.request("POST", RUNS, {}, yaml.safe_load((FOLDER / "run.yaml").read_text()), "")
    operator.wait_for(lambda: len(server.pods()) == 3, "three pods")
    for number, name in enumerate(server.pods()):
        server.run_pod(name, f"host{number}")
    operator.wait_for(lambda: operator.phase() == "Running", "the run is running")
    operator.end(signal.SIGKILL)
    server.now_s = time.time()
    server.end_pod("train-1-0", 137)
    operator.start()
    operator.wait_for(lambda: "train-1-3" in server.pods(), "the lost pod is replaced")
    server.run_pod("train-1-3", "host0")
    server.end_pod("train-1-1", 0)
    operator.wait_for(lambda: operator.phase() == "Succeeded", "the run has succeeded")
    assert operator.end(signal.SIGTERM) == 0
    assert len([line for line in server.log if line.startswith("POST") and line.endswith("/pods")]) == 4
