"""The page, status and metrics of a real run, asked of any node before and after a kill and a node's death."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster import Cluster
from p2pstate.cli import main

SCRIPT = str(Path(__file__).parent / "scripts" / "metered.py")
DEADLINE_S = 120.0  # only a hang takes this long


def ask(url: str, token: str = "") -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Watched:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.events: list[dict[str, Any]] = []

    def wait(self, what: str, found: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self.events += self.cluster.events.new()
            result = found()
            if result:
                return result
            time.sleep(0.02)
        raise AssertionError(f"no {what} within {DEADLINE_S:.0f} s\n{self.cluster.log_tails()}")

    def pages(self) -> dict[str, str]:
        """The address of each node's page."""
        return {event["node"]: event["url"] for event in self.events if event["event"] == "page"}

    def step(self) -> int:
        return max((event["step"] for event in self.events if event["event"] == "step"), default=0)


def test_page_of_any_node_tells_of_a_kill_and_outlives_a_node(
    tmp_path: Path, fork_server: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("sesame\n")
    options = ["--http", "127.0.0.1:0", "--http-token-file", str(token_file)]
    shape = {"num_training": 2, "num_spares": 1, "num_workers": 1}
    with Cluster(tmp_path / "run", [*options, SCRIPT], **shape, environ=fork_server | {"STEPS": "100000"}) as cluster:
        watched = Watched(cluster)
        pages = watched.wait("pages", lambda: len(watched.pages()) == 3 and watched.step() >= 5 and watched.pages())
        assert ask(pages["node2"])[0] == 401
        assert ask(pages["node2"], "sesam")[0] == 401
        assert ask(pages["node2"] + "nothing", "sesame")[0] == 404

        def run_of(node: str) -> dict[str, Any]:
            code, body = ask(pages[node] + "status.json", "sesame")
            assert code == 200, body
            found: dict[str, Any] = json.loads(body)
            return found

        before = run_of("node2")
        assert [rank["rank"] for rank in before["ranks"]] == [0, 1]
        assert [node["answered"] for node in before["nodes"]] == [True] * 3
        assert before["incidents"] == []
        assert before["goodput"]["run"]["ratio"] > 0

        victim = next(rank for rank in before["ranks"] if rank["rank"] == 1)
        os.kill(victim["pid"], signal.SIGKILL)
        after = watched.wait(
            "incident that is over", lambda: next((r for r in [run_of("node0")] if over(r["incidents"])), None)
        )
        (incident,) = after["incidents"]
        assert (incident["cause"], incident["replaced"], incident["source"]) == ("process", [1], "own vault")
        assert "SIGKILL" in incident["reason"]

        code, page = ask(pages["node1"] + "?token=sesame")
        assert code == 200
        assert "SIGKILL" in page
        assert "own vault" in page
        assert not re.findall(r"src=|https?://(?!127\.0\.0\.1)|@import|<script", page)
        assert f'href="{pages["node0"]}"' in page

        code, metrics = ask(pages["node1"] + "metrics", "sesame")
        assert code == 200, metrics
        assert 'p2pstate_failures_total{cause="process"} 1.0' in metrics
        values = {family.name: family.samples for family in text_string_to_metric_families(metrics)}
        wall_s = {sample.labels["category"]: sample.value for sample in values["p2pstate_wall_seconds"]}
        assert wall_s["useful"] > 0
        assert wall_s["recovery"] > 0

        cluster.kill_node("node0")
        last = watched.wait(
            "second incident that is over",
            lambda: next((r for r in [run_of("node1")] if len(r["incidents"]) == 2 and over(r["incidents"])), None),
        )
        assert [incident["cause"] for incident in last["incidents"]] == ["node", "process"]
        assert {rank["node"] for rank in last["ranks"]} == {"node1", "node2"}

        arguments = ["top", pages["node2"], "--once", "--token-file", str(token_file)]
        assert main(arguments) == 0
        assert "node0 is gone" in " ".join(capsys.readouterr().out.split())


def over(incidents: list[dict[str, Any]]) -> bool:
    return bool(incidents) and all(incident["seconds"] is not None for incident in incidents)
