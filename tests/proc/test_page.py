"""The page, status and metrics of a real run, asked of any node, and seen in a browser, before and after a kill and a
node's death. The tests share one run; each does its own harm to it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, why_none
from prometheus_client.parser import text_string_to_metric_families

from cluster import Cluster
from p2pstate.cli import main

SCRIPT = str(Path(__file__).parent / "scripts" / "metered.py")
TOKEN = "sesame"
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
    """A run of two nodes and two spares, one worker each, whose pages want a token."""

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

    def ready(self) -> dict[str, str]:
        """Once all train and all pages are there: their addresses."""
        found: dict[str, str] = self.wait("pages", lambda: len(self.pages()) == 4 and self.step() >= 5 and self.pages())
        return found

    def status(self, node: str) -> dict[str, Any]:
        code, body = ask(self.pages()[node] + "status.json", TOKEN)
        assert code == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    def survived(self, node: str, num_incidents: int) -> dict[str, Any]:
        """Once so many incidents are over and the run is protected again: what that node tells."""

        def found() -> dict[str, Any] | None:
            run = self.status(node)
            over = [each for each in run["incidents"] if each["seconds"] is not None]
            return run if len(over) == num_incidents and run["incidents"][0]["protected_s"] is not None else None

        run: dict[str, Any] = self.wait(f"end of incident {num_incidents}", found)
        return run

    def kill_process(self, run: dict[str, Any], rank: int) -> None:
        os.kill(next(each["pid"] for each in run["ranks"] if each["rank"] == rank), signal.SIGKILL)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, fork_server: dict[str, str]) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("page")
    token_file = folder / "token"
    token_file.write_text(f"{TOKEN}\n")
    options = ["--http", "127.0.0.1:0", "--http-token-file", str(token_file)]
    shape = {"num_training": 2, "num_spares": 2, "num_workers": 1}
    environ = fork_server | {"STEPS": "100000"}
    with Cluster(folder / "run", [*options, SCRIPT], **shape, environ=environ) as cluster:
        yield Watched(cluster)


def test_page_of_any_node_tells_of_a_kill_and_outlives_a_node(
    watched: Watched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = watched.ready()
    spare = watched.status("node3")["view"]["spares"][0]
    assert ask(pages[spare])[0] == 401
    assert ask(pages[spare], "sesam")[0] == 401
    assert ask(pages[spare] + "nothing", TOKEN)[0] == 404

    before = watched.status(spare)
    known = len(before["incidents"])
    assert [rank["rank"] for rank in before["ranks"]] == [0, 1]
    assert all(node["answered"] for node in before["nodes"] if node["state"] == "alive")
    assert before["goodput"]["run"]["ratio"] > 0

    watched.kill_process(before, 1)
    first, second = (rank["node"] for rank in before["ranks"])
    after = watched.survived(first, known + 1)
    incident = after["incidents"][0]
    assert (incident["cause"], incident["replaced"], incident["source"]) == ("process", [1], "own vault")
    assert "SIGKILL" in incident["reason"]
    assert [rank["keepers"] for rank in after["ranks"]] == [[second], [first]]

    code, page = ask(pages[second] + f"?token={TOKEN}")
    assert code == 200
    assert "SIGKILL" in page
    assert "own node&#x27;s memory" in page
    assert not re.findall(r"src=|https?://(?!127\.0\.0\.1)|@import|<link", page)
    assert f'href="{pages[first]}?token={TOKEN}"' in page

    code, metrics = ask(pages[second] + "metrics", TOKEN)
    assert code == 200, metrics
    assert re.search(r'p2pstate_failures_total{cause="process"} [1-9]', metrics)
    values = {family.name: family.samples for family in text_string_to_metric_families(metrics)}
    wall_s = {sample.labels["category"]: sample.value for sample in values["p2pstate_wall_seconds"]}
    assert wall_s["useful"] > 0
    assert wall_s["recovery"] > 0

    watched.cluster.kill_node(first)
    last = watched.survived(second, known + 2)
    assert [incident["cause"] for incident in last["incidents"][:2]] == ["node", "process"]
    assert last["incidents"][0]["replaced"] == [0]
    assert {rank["node"] for rank in last["ranks"]} == {second, spare}

    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    assert main(["top", pages[spare], "--once", "--token-file", str(token_file)]) == 0
    assert f"{first} is gone" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_page_in_a_browser_shows_a_kill_and_links_other_nodes_when_its_own_dies(watched: Watched) -> None:
    watched.ready()
    newest = "document.querySelector('h2 + .card').innerText"
    with Browser() as browser:
        run = watched.status(watched.cluster.running()[0].name)
        first, second = (rank["node"] for rank in run["ranks"])
        browser.open(f"{watched.pages()[first]}?token={TOKEN}")
        browser.wait("document.body.innerText.includes('training, protected')")
        assert "Any one node may die now" in browser.text()

        watched.kill_process(run, 1)  # the page renews itself
        known = len(run["incidents"])
        browser.wait(f"[...document.querySelectorAll('dt')].filter(e => e.innerText == 'Why').length == {known + 1}")
        told = browser.wait(f"{newest}.includes('yes') && {newest}")
        for words in (
            "What died\na worker process: rank 1",
            f"rank 1 on {second} died: signal 9 (SIGKILL)",
            "What it cost",
            "Protected again?\n✓ yes",
        ):
            assert words in told
        assert re.search(r"s without a new step, (no committed steps|1 committed step) lost", told)

        watched.cluster.kill_node(first)  # which serves the page
        browser.wait("!document.getElementById('gone').hidden")
        assert f"{first} has not answered" in browser.text()
        links = browser.evaluate("[...document.querySelectorAll('#gone a')].map(a => [a.innerText, a.href])")
        assert second in dict(links)
        browser.open(dict(links)[second], width=375, phone=True)
        told = browser.wait(f"{newest}.includes('a whole node') && {newest}.includes('yes') && {newest}")
        assert f"{first} is gone" in told
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")  # on a phone
