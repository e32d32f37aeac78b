"""What a running node tells, as numbers, as a page and as metrics; what nodes tell put together."""

import hashlib
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2pstate.observe.ledger import Ledger
from p2pstate.observe.live import LiveRun
from p2pstate.observe.metrics import exposition
from p2pstate.observe.page import POLICY, SCRIPT, as_page
from p2pstate.observe.whole import headline, merge

VIEW = {"epoch": 3, "round": 2, "places": ["n0", "n1"], "spares": ["n2"], "witnesses": ["w"], "reason": "because"}


def live_run() -> LiveRun:
    """One rank, two steps, a kill that was survived."""
    live = LiveRun(Ledger())
    events: list[dict[str, Any]] = [
        {"t": 100, "event": "view", "nonce": "a"},
        {"t": 100, "event": "worker_started", "rank": 0, "pid": 1},
        step(101, 1, {"useful": 0.9, "data": 0.1}, 1000),
        {"t": 101.5, "event": "worker_exited", "rank": 0, "pid": 1, "cause": "signal 9 (SIGKILL)"},
        {"t": 101.6, "event": "abort", "round": 1, "reason": "rank 0 on n0 died: signal 9 (SIGKILL)"},
        {"t": 102, "event": "worker_started", "rank": 0, "pid": 2},
        recovery(103),
        {"t": 103, "event": "corrupt", "slot": 1},
        step(104, 2, {"useful": 0.7, "data": 0.3}, 500),
        step(105, 3, {"useful": 1.0}, 1500),
    ]
    for event in events:
        live.ledger.add(event | {"node": "n0"})
        live.add(event | {"node": "n0"})
    return live


def step(t: float, number: int, seconds: dict[str, float], shipped: int) -> dict[str, Any]:
    fields = {"clock": {"until": t, "seconds": seconds}, "shipped_bytes": shipped, "protected": max(1, number - 2)}
    return {"t": t, "event": "step", "rank": 0, "step": number, **fields}


def recovery(t: float) -> dict[str, Any]:
    clock = {"until": t, "seconds": {"recovery.pull": 1.0}}
    fields = {"source": "own vault", "bytes": 7, "steps_lost": 1, "phases": {"pull": 0.75, "restore": 0.25}}
    return {"t": t, "event": "recovery", "rank": 0, "clock": clock, **fields}


def answer(name: str = "n0", **changes: Any) -> dict[str, Any]:
    members = {
        other: {"address": f"10.0.0.{index}:7000", "role": "node", "state": "alive", "reason": ""}
        for index, other in enumerate(("n0", "n1", "n2", "w"))
    }
    members["w"]["role"] = "witness"
    rank = {"rank": 0, "pid": 1, "phase": "loop", "step": 30, "protected": 29, "told_s_ago": 0.5}
    rank["keepers"] = ["n1"]
    return {
        "run_id": "job",
        "members": members,
        "view": VIEW,
        "verdict": None,
        "waiting": "",
        "weaknesses": [],
        "ranks": [rank],
        "num_warm": 2,
        "vault_bytes": 3 << 20,
        "page": f"http://{name}:8600/",
        "live": live_run().summary(105.0),
        **changes,
    }


def test_live_counts_what_grows_over_the_processes_of_a_rank() -> None:
    live = live_run()
    assert live.copy_bytes == 1000 + 1500
    assert live.recoveries == {"own vault": 1}
    assert live.recovery_s == {("own vault", "pull"): 0.75, ("own vault", "restore"): 0.25}
    assert live.transfer_bytes == {"own vault": 7}
    assert live.verification_failures == {"corrupt": 1}
    assert live.failures == {"process": 1}
    assert live.lost_steps == 1


def test_live_tells_the_last_minute_and_hour_apart() -> None:
    live = live_run()
    summary = live.summary(105.0 + 63)
    assert summary["seconds"]["now"] == {}
    assert summary["seconds"]["hour"]["useful"] == pytest.approx(2.6)
    assert live.summary(105.0)["seconds"]["now"]["useful"] == pytest.approx(2.6)
    assert summary["fetch_p95_s"] == 0.1


def test_metrics_are_what_prometheus_reads_in_base_units_without_ranks() -> None:
    text = exposition(live_run(), answer(), "1.2").decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["p2pstate_build_info", "1.2"] == 1
    assert values["p2pstate_failures_total", "process"] == 1
    assert values["p2pstate_recovery_seconds_total", "pull", "own vault"] == 0.75
    assert values["p2pstate_copy_bytes_total",] == 2500
    assert values["p2pstate_lost_steps_total",] == 1
    assert values["p2pstate_verification_failures_total", "corrupt"] == 1
    assert values["p2pstate_protected_lag_steps",] == 1
    assert values["p2pstate_protected_lag_seconds",] == 4  # step 3 at 105, step 1 at 101
    parts = {labels[0]: count for (name, *labels), count in values.items() if name == "p2pstate_members"}
    assert parts == {"training": 2, "spare": 1, "witness": 1}
    assert values["p2pstate_fetch_seconds_count",] == 3
    assert values["p2pstate_fetch_seconds_bucket", "+Inf"] == 3
    assert values["p2pstate_fetch_seconds_sum",] == pytest.approx(0.4)
    assert 0 < values["p2pstate_goodput_ratio",] < 1
    assert sum(v for (name, *_), v in values.items() if name == "p2pstate_wall_seconds_total") == pytest.approx(5)
    for family in families.values():
        assert family.documentation.endswith(".")
        assert re.fullmatch(r"p2pstate_[a-z_]+", family.name)
        assert not re.search(r"_(ms|kb|mb|minutes|percent)\b", family.name)
        assert all("rank" not in sample.labels for sample in family.samples)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_metrics_pass_promtool() -> None:
    text = exposition(live_run(), answer(), "1.2")
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_metrics_without_the_library_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=r"pip install 'p2pstate\[metrics\]'"):
        exposition(live_run(), answer(), "1")


def test_nodes_are_put_together() -> None:
    run = merge({"n0": answer("n0"), "n1": answer("n1", ranks=[{**answer()["ranks"][0], "rank": 1, "protected": 28}])})
    assert [(rank["rank"], rank["node"]) for rank in run["ranks"]] == [(0, "n0"), (1, "n1")]
    assert [(node["name"], node["part"], node["answered"]) for node in run["nodes"]] == [
        ("n0", "training", True),
        ("n1", "training", True),
        ("n2", "spare", False),
        ("w", "witness", False),
    ]
    assert len(run["incidents"]) == 1
    assert run["goodput"]["run"]["seconds"]["useful"] == pytest.approx(2 * 2.6)


def test_incident_is_told_as_the_node_does_that_knows_most() -> None:
    """A spare saw the death and nothing of the recovery."""
    vague = {"round": 1, "s_ago": 4.0, "cause": "node", "reason": "n1 is gone", "replaced": [], "source": "none"}
    vague |= {"bytes": 0, "steps_lost": 0, "seconds": None, "phases": {"detect": 0.1}, "ranks": [], "protected_s": None}
    vague["looked_on"] = True
    live = answer()["live"] | {"incidents": [vague]}
    for order in (("n0", "n2"), ("n2", "n0")):
        answers = {"n0": answer(), "n2": answer("n2", live=live, ranks=[])}
        (incident,) = merge({name: answers[name] for name in order})["incidents"]
        assert (incident["cause"], incident["source"], incident["steps_lost"]) == ("node", "own vault", 1)
        assert incident["seconds"] is not None


def test_incident_that_only_a_node_without_ranks_saw_was_part_of_another() -> None:
    """To those who train, a failure before there was progress belongs to the one before."""
    (known,) = answer()["live"]["incidents"]
    vague = known | {"round": 2, "ranks": [], "looked_on": True, "seconds": None}
    spare = answer("n2", live=answer()["live"] | {"incidents": [known, vague]}, ranks=[])
    assert [each["round"] for each in merge({"n0": answer(), "n2": spare})["incidents"]] == [1]
    assert [each["round"] for each in merge({"n2": spare})["incidents"]] == [1, 2]


def test_accounts_of_one_incident_are_put_together() -> None:
    """The longest phase and the last protection count, and what all nodes received."""
    (known,) = answer()["live"]["incidents"]
    assert known["protected_s"] == pytest.approx(2.5)
    later = known | {"protected_s": 4.0, "phases": {"pull": 3.0}}
    for protected_s in (4.0, None):
        live = answer()["live"] | {"incidents": [later | {"protected_s": protected_s}]}
        run = merge({"n0": answer(), "n1": answer("n1", live=live)})
        (incident,) = run["incidents"]
        assert incident["protected_s"] == protected_s
        assert incident["phases"]["pull"] == 3.0
        assert incident["bytes"] == 2 * 7
        assert ("✓ yes" in as_page(run, "n0")) == (protected_s is not None)


@pytest.mark.parametrize(
    ("changes", "name", "text"),
    [
        ({}, "n0", "n2 takes its ranks, all resume step 29"),
        ({"view": VIEW | {"spares": []}}, "n0", "waits for a node, then all resume step 29"),
        ({}, "n2", "no spare nodes left"),
        ({}, "w", "with a vote less"),
        ({"view": VIEW | {"places": ["n0"], "spares": []}}, "n0", "the run is lost"),
        ({"view": VIEW | {"places": ["n0"]}}, "n1", "no part in the run"),
        ({"ranks": []}, "n0", "not protected yet"),
    ],
)
def test_page_says_what_happens_if_a_node_dies_now(changes: dict[str, Any], name: str, text: str) -> None:
    run = merge({"n0": answer(**changes)})
    assert text in next(node for node in run["nodes"] if node["name"] == name)["if_it_dies"]


@pytest.mark.parametrize(
    ("changes", "well", "text"),
    [
        ({}, True, "training, protected"),
        ({}, True, "all ranks resume step 29 from memory.<"),
        ({"view": VIEW | {"spares": []}}, True, "once another node has joined (no spare is left)"),
        ({"waiting": "1 of 2 nodes"}, False, "waiting for a node"),
        ({"view": None}, False, "waiting for the first nodes"),
        ({"verdict": {"code": 75, "text": "given up"}}, False, "ended: given up"),
        ({"verdict": {"code": 0, "text": "finished"}}, True, "ended: finished"),
        ({"ranks": []}, False, "not protected yet"),
    ],
)
def test_page_begins_with_the_state_of_the_run(changes: dict[str, Any], well: bool, text: str) -> None:
    run = merge({"n0": answer(**changes)})
    assert headline(run)[0] is well
    assert text in as_page(run, "n0")


def test_page_tells_what_is_on_disk_and_who_is_slow() -> None:
    live = live_run()
    for event in (
        {"t": 100, "event": "saved", "step": 20},
        {"t": 104, "event": "straggler", "rank": 0, "reason": "2.5 times as long"},
    ):
        live.add(event | {"node": "n0"})
    page = as_page(merge({"n0": answer(live=live.summary(105.0)), "n1": answer("n1")}), "n0")
    assert re.search(r"step on disk.*>20<.*for 5 s", page)
    assert "Rank 0 is slow: 2.5 times as long" in page
    assert live.summary(105.0 + 120)["slow"] == []


def test_page_names_the_slowest_rank_stragglers_and_starved_ranks() -> None:
    """Of the newest window that every rank has gone through: steps 1 to 20 here, rank 1 is at step 30 as well."""

    def told(name: str, rank: int, own_s: float, fetch_s: float) -> dict[str, Any]:
        loads = [[1, rank, 20, 20.0, 20 * own_s, 20 * fetch_s, 20], [21, rank, 10, 10.0, 1.0, 0.0, 30]]
        ranks = [{**answer()["ranks"][0], "rank": rank}]
        return answer(name, live=answer()["live"] | {"loads": loads}, ranks=ranks)

    run = merge({"n0": told("n0", 0, 0.4, 0.0), "n1": told("n1", 1, 0.9, 0.3)})
    assert (run["skew"]["slowest"], run["skew"]["fastest"], run["skew"]["last_step"]) == (1, 0, 20)
    page = as_page(run, "n0")
    assert "Rank 1 is slow: a step takes 0.90 s of its own" in page
    assert "Rank 1 is starved: it waits 0.30 s a step for its batch" in page
    assert re.search(r"rank skew.*>2\.2 ×<.*rank 1 works 0\.90 s a step, rank 0 0\.40 s", page)
    assert merge({"n0": told("n0", 0, 0.4, 0.0), "n1": answer("n1")})["skew"] is None


def test_page_links_the_others_loads_nothing_and_escapes() -> None:
    evil = answer("n1", page='http://x/"><script>', weaknesses=["<script>alert(1)</script>"], ranks=[])
    page = as_page(merge({"n0": answer(), "n1": evil}), "n0")
    assert 'href="http://x/&quot;&gt;&lt;script&gt;"' in page
    assert re.findall(r"<script>(.*?)</script>", page, re.DOTALL) == [SCRIPT]  # as its policy allows, and no other
    assert page.count("<script") == 1
    assert b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode() in POLICY
    assert not re.findall(r"src=|@import|url\(|<link", page)
    assert "(this page)" in page
    assert "SIGKILL" in page
