"""The demo itself, with failures at random moments, and with nodes that share no network and no memory."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from namespaces import why_not

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
LIMIT_S = 400


@pytest.fixture
def _namespaces() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def run_demo(*arguments: str) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, str(DEMO), "--json", "--report", "/dev/null", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    lines = ended.stdout.splitlines()
    assert lines, ended.stderr
    result: dict[str, Any] = json.loads(lines[-1])
    assert result["identical"], ended.stdout
    assert result["leftovers"] == []
    assert ended.returncode == 0
    assert lines[-2] == "identical: yes"
    shares = dict(re.findall(r"^(\S.*?)  +[\d.]+ s +([\d.]+) %", ended.stdout, re.MULTILINE))
    assert sum(map(float, shares.values())) == pytest.approx(100, abs=1)
    assert float(shares.get("other", 0)) < 2
    return result


def check_failures(result: dict[str, Any]) -> None:
    """A worker came back from its own node's memory, a node from its buddies', all nodes at once from disk."""
    by_kind = {failure["kind"]: failure for failure in result["failures"]}
    assert by_kind.keys() == {"worker", "node", "all"}
    assert by_kind["worker"]["source"] == "own vault"
    assert by_kind["node"]["source"] == "buddy"
    assert by_kind["all"]["source"] == "disk"
    assert 0 <= by_kind["all"]["steps_lost"] <= 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_demo_with_failures_at_random_moments_ends_identical(seed: int) -> None:
    check_failures(run_demo("--random", str(seed)))


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("_namespaces")
def test_demo_with_nodes_in_their_own_namespaces_ends_identical() -> None:
    check_failures(run_demo("--namespaces"))


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("_namespaces")
def test_demo_with_a_node_that_falls_silent_ends_identical() -> None:
    check_failures(run_demo("--namespaces", "--silent"))
