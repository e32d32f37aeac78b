"""`p2pstate chaos`: faults that a running job is asked to inject into itself, and survives bit for bit."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rendezvous_cluster import ROOT

from cluster import Cluster
from outcome import compare
from p2pstate.chaos import Fault, _Session, draw, read_schedule, standing_from

TRAIN = str(ROOT / "examples" / "train_gpt.py")
SMALL = ("--num-layers", "2", "--width", "64", "--context", "32", "--batch", "2")
NUM_STEPS, NUM_RANKS = 110, 2
DEADLINE_S = 150.0


def chaos(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-c", "import sys; from p2pstate.cli import main; sys.exit(main())", "chaos", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, env=env)
    return done.returncode, done.stdout


def test_scheduled_faults_are_injected_survived_and_leave_no_trace(tmp_path: Path, fork_server: dict[str, str]) -> None:
    shape = {"num_training": 2, "num_workers": 1, "environ": {**fork_server, "P2PSTATE_PRESET": "local"}}
    common = [TRAIN, "--steps", str(NUM_STEPS), *SMALL]
    with Cluster(
        tmp_path / "undisturbed", [*common, "--out", str(tmp_path / "expected")], num_spares=0, **shape
    ) as undisturbed:
        deadline = time.monotonic() + DEADLINE_S
        while undisturbed.running():
            assert time.monotonic() < deadline, undisturbed.log_tails()
            time.sleep(0.02)

    schedule = tmp_path / "schedule"
    faults = [
        {"action": "kill", "rank": 1, "phase": "stepping", "at_step": 3},
        {"action": "corrupt", "rank": 0},
        {"action": "stop", "rank": 0},
        {"action": "partition", "node": "node0", "seconds": 60},
        {"action": "node", "node": "node1"},
    ]
    schedule.write_text("# a comment\n" + "\n".join(map(json.dumps, faults)))
    script = ["--chaos", "--hang-floor", "1", *common, "--pace", "0.05", "--out", str(tmp_path / "out")]
    with Cluster(tmp_path / "run", script, num_spares=2, **shape) as cluster:
        where = ["--run-id", "run", "--contacts", ",".join(node.address for node in cluster.nodes.values())]
        code, text = chaos("--schedule", str(schedule), "--timeout", "60", *where)
        assert code == 0, f"{text}\n{cluster.log_tails()}"
        for words in (
            "as soon as it is stepping",
            "slots of shard 0",
            "SIGSTOP to rank 0",
            "neither hears nor is heard",
            "node0 was counted out",
            "agent is killed",
        ):
            assert words in text, text
        assert "5 faults survived" in text
        cluster.nodes["node1"].killed = True
        while cluster.running():
            assert time.monotonic() < deadline, cluster.log_tails()
            cluster.dismiss_late()  # the node that is cut off
            time.sleep(0.02)
        assert set(cluster.exit_codes().values()) == {0}
    comparison = compare(tmp_path / "out", tmp_path / "expected", NUM_RANKS)
    assert comparison.identical, "\n".join([*comparison.differences, text])


@pytest.mark.slow
def test_node_without_the_option_refuses(tmp_path: Path, fork_server: dict[str, str]) -> None:
    script = [TRAIN, "--steps", "100000", *SMALL, "--out", str(tmp_path / "out")]
    shape = {"num_training": 1, "num_spares": 0, "num_workers": 1, "environ": fork_server}
    with Cluster(tmp_path / "run", script, **shape) as cluster:
        address = cluster.nodes["node0"].address
        code, text = chaos("--run-id", "run", "--contacts", address, "--kinds", "kill", "--timeout", "60")
        assert (code, "not started with p2prun --chaos" in text) == (1, True), text


def answers(spares: list[str]) -> dict[str, dict[str, object]]:
    view = {"epoch": 2, "round": 2, "places": ["a", "b"], "spares": spares}
    ranks = {"a": [{"rank": 0, "step": 5}], "b": [{"rank": 1, "step": 6}], "s": []}
    return {name: {"view": view, "ranks": ranks[name], "verdict": None, "members": {}} for name in ("a", "b", *spares)}


def test_random_faults_repeat_with_their_seed_and_kill_no_node_while_none_is_spare() -> None:
    standing = standing_from(answers([]))
    assert (standing.step, standing.newest, standing.num_ranks) == (5, 6, 2)
    kinds = ["kill", "stop", "corrupt", "node"]
    drawn = [[draw(random.Random(seed), kinds, standing, (None, "stepping")) for seed in range(40)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert {fault.action for fault in drawn[0]} == {"kill", "stop", "corrupt"}
    assert {draw(random.Random(seed), ["node", "partition"], standing, (None,)).action for seed in range(9)} == {"kill"}
    with_spare = standing_from(answers(["s"]))
    assert any(draw(random.Random(seed), kinds, with_spare, (None,)).action == "node" for seed in range(40))
    del standing.ranks[1]  # a rank without a process
    assert standing.step == -1


class Job:
    """Stands in for the line to a job: what it tells, look by look, as (round, step of all ranks)."""

    def __init__(self, *looks: tuple[int, int]) -> None:
        self.looks = list(looks)

    def ask(self, *_: object) -> dict[str, dict[str, Any]]:
        round_, step = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        view = {"epoch": round_, "round": round_, "places": ["a"], "spares": []}
        return {"a": {"view": view, "ranks": [{"rank": 0, "step": step}], "members": {}, "verdict": None}}

    def ask_one(self, *_: object) -> dict[str, str]:
        return {"done": "SIGKILL to rank 0 as soon as it is stepping"}


def test_steps_that_come_before_a_fault_does_its_harm_do_not_count_as_survival(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("p2pstate.chaos.POLL_S", 0.0)
    options = argparse.Namespace(seed=0, count=1, every=0.0, survive_within=0.1, timeout=1.0)
    job: Any = Job((1, 1), (1, 5), (1, 90), (2, 90), (2, 91), (2, 92))
    assert _Session(job, options, ["kill"]).run([Fault("kill", rank=0, phase="stepping")]) == 0
    assert "all ranks at step 92" in capsys.readouterr().out
    harmless: Any = Job((1, 1), (1, 5), (1, 90))
    assert _Session(harmless, options, ["kill"]).run([Fault("kill", rank=0, phase="stepping")]) == 1
    assert "nobody noticed it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kill 1", "line 2"),
        ('{"action": "explode"}', "kill, stop, corrupt, node, partition"),
        ('{"action": "kill", "phase": "sleeping"}', "stepping"),
        ('{"act": "kill"}', "unexpected keyword"),
    ],
)
def test_bad_schedule_names_the_line_and_what_is_possible(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_schedule(["", line])
    assert read_schedule(["# nothing"]) == []
    assert read_schedule(['{"action": "kill", "rank": 1}']) == [Fault("kill", 1)]
