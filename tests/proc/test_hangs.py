"""Workers that live and do not go on: the one at fault is found and replaced, all others keep their processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from mishaps import DEADLINE_S, NUM_STEPS, SCRIPT, Outcome, train

from cluster import Cluster


def test_each_kind_of_hang_replaces_the_rank_at_fault_and_ends_identical(
    tmp_path: Path, fork_server: dict[str, str], without_mishaps: Callable[..., Outcome]
) -> None:
    kinds = ["6:1:backward-stop", "12:2:forward-lock", "18:3:forward-loop", "24:0:backward-gil", "30:1:fetch-lock"]
    harmless = ["9:3:forward-slow", "35:2:forward-busy"]
    undisturbed = without_mishaps()
    outcome = train(tmp_path / "hung", fork_server, *kinds, *harmless)
    assert undisturbed.codes == outcome.codes == {"node0": 0, "node1": 0}, outcome.log_tails
    assert len(list((tmp_path / "hung" / "out").glob("mishap-*"))) == len(kinds) + len(harmless)
    hangs = outcome.all("hang")
    assert [event["rank"] for event in hangs] == outcome.replaced() == [1, 2, 3, 0, 1], outcome.log_tails
    assert outcome.digests == undisturbed.digests
    for event, function in zip(hangs, ["_stop", "_lock", "_loop", "_gil", "_lock"], strict=True):
        log = outcome.log(event["rank"])
        assert event["reason"] in log
        assert function in log or "py-spy, if installed" in log, log


def test_rank_that_is_stopped_while_another_one_dies_is_replaced_as_well(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    """It cannot leave the round that the death ends: the others wait for it by its own bound, not for minutes."""
    outcome = train(tmp_path, fork_server, "8:0:backward-die", "8:3:backward-stop")
    assert outcome.codes == {"node0": 0, "node1": 0}, outcome.log_tails
    assert sorted(outcome.replaced()) == [0, 3], outcome.log_tails


def test_node_that_is_stopped_and_comes_back_is_fenced(tmp_path: Path, fork_server: dict[str, str]) -> None:
    """Agent and workers are stopped at once, as by a suspended host, and go on when a spare has taken their place."""
    out = tmp_path / "out"
    out.mkdir()
    script = [SCRIPT, "--out", str(out), "--steps", str(NUM_STEPS)]
    with Cluster(tmp_path / "run", script, num_training=2, num_spares=1, num_workers=2, environ=fork_server) as cluster:
        history: list[dict[str, Any]] = []

        def wait_for(kind: str, **fields: Any) -> dict[str, Any]:
            deadline = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline:
                history.extend(cluster.events.new())
                for event in history:
                    if event["event"] == kind and all(event.get(key) == value for key, value in fields.items()):
                        return event
                time.sleep(0.02)
            raise AssertionError(f"no {kind} {fields}\n{cluster.log_tails()}")

        places = wait_for("view", epoch=1)["places"]
        wait_for("step", step=6, rank=0)
        victim = cluster.nodes[next(name for name in places if name != "node0")]
        agent = psutil.Process(victim.process.pid)
        tree = [agent, *agent.children(recursive=True)]
        workers = [each["pid"] for each in history if each["event"] == "worker_started" and each["node"] == victim.name]
        assert len(workers) == 2
        for process in [*tree, *map(psutil.Process, workers)]:
            process.send_signal(signal.SIGSTOP)
        lost_rank = 2 * places.index(victim.name)
        assert wait_for("recovery", rank=lost_rank)["node"] not in places
        for process in [*tree, *map(psutil.Process, workers)]:
            process.send_signal(signal.SIGCONT)
        cluster.wait_end(DEADLINE_S)
        codes = cluster.exit_codes()
        assert codes.pop(victim.name) == 76, cluster.log_tails()
        assert set(codes.values()) == {0}, cluster.log_tails()
        assert cluster.leftovers() == []
    assert all((out / f"digest-{rank}").exists() for rank in range(4))
