"""Workers that live and do not go on: the one at fault is found and replaced, all others keep their processes."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil

from cluster import Cluster

SCRIPT = str(Path(__file__).with_name("scripts") / "hangs.py")
DEADLINE_S = 120.0  # only a hang that nobody finds takes this long
NUM_STEPS = 40


def train(folder: Path, environ: dict[str, str], *hangs: str, floor_s: float = 0.6) -> tuple[list[str], Cluster]:
    """Digests of the final state of all ranks. Fails unless the run ends well, with nothing left behind."""
    out = folder / "out"
    out.mkdir(parents=True)
    specs = [part for hang in hangs for part in ("--hang", hang)]
    script = ["--hang-floor", str(floor_s), SCRIPT, "--out", str(out), "--steps", str(NUM_STEPS), *specs]
    with Cluster(folder / "run", script, num_training=2, num_spares=0, num_workers=2, environ=environ) as cluster:
        deadline = time.monotonic() + DEADLINE_S
        while cluster.running():
            assert time.monotonic() < deadline, f"the run does not end\n{cluster.log_tails()}"
            time.sleep(0.02)
        assert cluster.exit_codes() == {"node0": 0, "node1": 0}, cluster.log_tails()
        assert cluster.leftovers() == []
    return [(out / f"digest-{rank}").read_text() for rank in range(4)], cluster


def test_each_kind_of_hang_replaces_the_rank_at_fault_and_ends_identical(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    kinds = ["6:1:stop", "12:2:lock", "18:3:loop", "24:0:gil", "30:1:loader"]
    harmless = ["9:3:slow", "35:2:busy"]
    undisturbed, _ = train(tmp_path / "undisturbed", fork_server)
    digests, cluster = train(tmp_path / "hung", fork_server, *kinds, *harmless)
    events: list[dict[str, Any]] = cluster.events.new()
    marks = {path.name for path in (tmp_path / "hung" / "out").glob("hung-*")}
    assert len(marks) == len(kinds) + len(harmless), marks
    hangs = [event for event in events if event["event"] == "hang"]
    assert [event["rank"] for event in hangs] == [1, 2, 3, 0, 1], hangs
    started = [event["rank"] for event in events if event["event"] == "worker_started"]
    assert sorted(started[:4]) == [0, 1, 2, 3]
    assert started[4:] == [1, 2, 3, 0, 1], cluster.log_tails()
    assert digests == undisturbed
    for event, function in zip(hangs, ["backward", "forward", "forward", "backward", "__iter__"], strict=True):
        (log,) = (cluster.folder / "logs").glob(f"*/{event['rank']}.{event['pid']}.log")
        assert event["reason"] in log.read_text()
        assert function in log.read_text() or "py-spy, if installed" in log.read_text(), log.read_text()


def test_rank_that_is_stopped_while_another_one_dies_is_replaced_as_well(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    """It cannot leave the round that the death ends: the others wait for it by its own bound, not for minutes."""
    digests, cluster = train(tmp_path / "hung", fork_server, "8:0:die", "8:3:stop")
    started = [event["rank"] for event in cluster.events.new() if event["event"] == "worker_started"]
    assert sorted(started[4:]) == [0, 3], cluster.log_tails()
    assert len(set(digests)) == 1


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
        deadline = time.monotonic() + DEADLINE_S
        while cluster.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        codes = cluster.exit_codes()
        assert codes.pop(victim.name) == 76, cluster.log_tails()
        assert set(codes.values()) == {0}, cluster.log_tails()
        assert cluster.leftovers() == []
    assert len({(out / f"digest-{rank}").read_text() for rank in range(4)}) == 1
