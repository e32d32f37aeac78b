"""`p2prun status` and `p2prun stop` from outside a run: what is seen, and that it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rendezvous_cluster import ROOT

from cluster import Cluster
from p2pstate.agent.status import describe

TRAIN = str(ROOT / "examples" / "train_gpt.py")
SMALL = ("--num-layers", "2", "--width", "64", "--context", "32", "--batch", "2")
DEADLINE_S = 90.0


def p2prun(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-c", "import sys; from p2pstate.cli import p2prun; sys.exit(p2prun())", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, env=env)
    return done.returncode, done.stdout


def test_status_shows_ranks_and_copies_of_all_nodes_and_stop_ends_them(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    script = [TRAIN, "--out", str(tmp_path / "out"), "--steps", "100000", *SMALL]
    folder = tmp_path / "run"
    with Cluster(folder, script, num_training=2, num_spares=1, num_workers=1, environ=fork_server) as cluster:
        deadline = time.monotonic() + DEADLINE_S
        while not any(event["event"] == "step" and event["step"] >= 5 for event in cluster.events.new()):
            assert time.monotonic() < deadline, cluster.log_tails()
            time.sleep(0.05)
        where = ["--run-id", "run", "--contacts", cluster.nodes["node1"].address]  # one contact leads to all nodes
        code, text = p2prun("status", *where)
        assert code == 0, text
        for words in ("node0", "node2", "spare, alive", "rank 0  pid", "rank 1  pid", "protected", " of copies"):
            assert words in text, text
        code, text = p2prun("status", "--json", *where)
        answers = json.loads(text)
        assert sorted(answers) == ["node0", "node1", "node2"]
        assert [rank["rank"] for rank in answers["node1"]["ranks"]] == [1]
        assert answers["node1"]["ranks"][0]["step"] >= 5
        assert answers["node1"]["vault_bytes"] > 0

        code, text = p2prun("stop", "--reason", "tea,\nthen more", *where)
        assert code == 0, text
        cluster.wait_end(DEADLINE_S)
        assert set(cluster.exit_codes().values()) == {143}
        assert cluster.leftovers() == []
    assert ": tea, then more\n" in "".join(path.read_text() for path in folder.glob("agent-*.log"))


def test_nobody_there_is_an_error_that_says_what_to_check() -> None:
    code, text = p2prun("status", "--contacts", "127.0.0.1:1", "--timeout", "1")
    assert code == 1
    assert "nobody answered within 1 s" in text
    code, text = p2prun("stop")
    assert (code, "--contacts is missing" in text) == (78, True)


def test_description_names_who_does_not_answer_and_what_is_waited_for() -> None:
    def member(state: str, silent_s: float, reason: str = "") -> dict[str, object]:
        return {
            "address": "h:1",
            "role": "node",
            "state": state,
            "silent_s": silent_s,
            "reason": reason,
            "progress": {},
        }

    view = {"epoch": 3, "round": 2, "places": ["a", "b"], "spares": [], "witnesses": ["w"], "reason": "b died"}
    answer = {
        "run_id": "r",
        "members": {"a": member("alive", 0.0), "b": member("dead", 9.5, "no answer"), "w": member("alive", 0.1)},
        "view": view,
        "verdict": {"code": 75, "text": "no spare"},
        "ranks": [{"rank": 0, "pid": 7, "phase": "loop", "step": 4, "protected": None, "told_s_ago": 1.0}],
        "num_warm": 2,
        "vault_bytes": 1 << 20,
        "waiting": "for a node",
        "weaknesses": ["a is alone"],
    }
    assert describe({"a": answer}) == [
        "run r: view 3 (b died)",
        "  a  h:1  training, alive, 2 warm processes, 1.0 MiB of copies",
        "    rank 0  pid 7  loop, step 4 committed 1.0 s ago, nothing protected yet",
        "  b  h:1  training, dead (no answer), did not answer, heard 9.5 s ago",
        "  w  h:1  witness, alive, did not answer, heard 0.1 s ago",
        "waiting: for a node",
        "weak: a is alone",
        "ended: no spare (exit code 75)",
    ]
