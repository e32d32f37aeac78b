"""A Replicator under stock `torchrun --rdzv-backend=p2p`: all workers start anew and resume from memory."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchrun_cluster import ROOT, torchruns

from cluster import Cluster, EventReader
from outcome import compare
from p2pstate.agent.status import describe
from p2pstate.durable.catalog import list_checkpoints
from p2pstate.durable.storage import Directory
from p2pstate.observe.history import read_history
from p2pstate.operating import addresses_of
from p2pstate.worker import stand_in
from rendezvous.config import Config
from rendezvous.operator import Line
from rendezvous.zmq_transport import ZmqTransport

NUM_RANKS = 2
NUM_STEPS = 20
OPTIONS = ("--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-conf", "last_call_timeout=0.5,timeout=60")


def script(out: Path, *more: str) -> list[str]:
    small = ["--num-layers", "2", "--width", "64", "--context", "32", "--batch", "2", "--steps", str(NUM_STEPS)]
    return [str(ROOT / "examples" / "train_gpt.py"), "--out", str(out), *small, *more]


def status(address: str, run_id: str) -> dict[str, Any]:
    config = Config(run_id=run_id, name="tester", bind="127.0.0.1:0", contacts=(address,))
    transport = ZmqTransport(config)
    try:
        return Line(config, transport).ask("status", None, 10.0, addresses_of)
    finally:
        transport.close(0.0)


class Heard:
    """Called: the run's events so far, of one kind and with these fields."""

    def __init__(self, folder: Path) -> None:
        self._reader, self._seen = EventReader(folder), list[dict[str, Any]]()

    def __call__(self, kind: str, **fields: object) -> list[dict[str, Any]]:
        self._seen += self._reader.new()
        return [e for e in self._seen if e["event"] == kind and all(e.get(name) == v for name, v in fields.items())]


def drained_step(logs: str) -> int:
    """What torchrun's agents say that they have left on disk."""
    return max(int(step) for step in re.findall(r"before the end \(.*\): step (\d+) is on disk", logs))


def test_run_whose_worker_hangs_node_dies_and_torchruns_are_asked_to_end_resumes_and_ends_bit_identical(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    sizes = {"num_training": 2, "num_spares": 0, "num_workers": 1}
    with Cluster(tmp_path / "run", script(tmp_path / "expected"), **sizes, environ=fork_server) as undisturbed:
        for node in undisturbed.running():
            assert node.process.wait(60.0) == 0, undisturbed.log_tails()
    folder = tmp_path / "torchrun"
    folder.mkdir()
    kills = ["--kill", "10:0:backward:node", "--pace", "0.1"]
    storage = Directory(tmp_path / "ck")
    command = script(folder / "out", *kills, "--checkpoint", storage.where, "--checkpoint-every", "4")
    with torchruns(folder, "2", *OPTIONS, script=command) as running:
        settings = {"P2PSTATE_RUN_DIR": str(folder), "P2PSTATE_HANG_FLOOR": "1", "P2PSTATE_HTTP": "127.0.0.1:0"}
        running.start("a", **settings)
        running.start("b", **settings)
        heard = Heard(folder)
        running.wait(lambda: heard("step", rank=1, step=3), "step 3")
        os.kill(heard("worker_started", rank=1)[-1]["pid"], signal.SIGSTOP)
        answers = status(running.endpoint.partition(",")[0], folder.name)
        told = "\n".join(describe(answers))
        for rank in range(NUM_RANKS):
            assert re.search(rf"rank {rank}  pid \d+  loop, step \d+ committed", told), told
        page = heard("page", node="a")[0]["url"]
        running.wait(lambda: heard("recovery", rank=0), "recovery")
        with urllib.request.urlopen(page + "status.json", timeout=20) as answer:
            shown = json.loads(answer.read())
        assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]
        assert [incident["cause"] for incident in shown["incidents"]] == ["hang"]
        hung = heard("page", node=heard("hang")[0]["node"])[0]["url"]
        with urllib.request.urlopen(hung + "metrics", timeout=20) as answer:
            assert b'p2pstate_failures_total{cause="hang"} 1.0' in answer.read()
        running.wait(lambda: heard("step", rank=1, step=13), "step 13, after the death of a node")
        for node in running.nodes.values():
            node.send_signal(signal.SIGTERM)
        assert running.codes("ab", timeout_s=240.0) == [1, 1]
        (hang,) = heard("hang")
        logs = running.log("a") + running.log("b")
    assert hang["rank"] == 1
    assert "stopped by a signal" in hang["reason"]
    assert (folder / "out" / "killed-10-0-backward-node").exists()
    history = read_history(folder)
    assert [incident.cause for incident in history.incidents] == ["hang", "node"]
    assert all(incident.seconds and incident.protected_s for incident in history.incidents)
    assert history.total.by_category().keys() >= {"useful", "recovery"}
    resumed = re.findall(r"rank (\d) resumed step (\d+) from ([a-z ]+) \((\d) steps? lost\)", logs)
    assert len(resumed) == 2 * NUM_RANKS, logs
    assert {source for _, _, source, _ in resumed} == {"own vault", "buddy"}
    assert all(int(lost) <= 1 for *_, lost in resumed), logs

    step = drained_step(logs)
    newest = list_checkpoints(storage)[0]
    assert newest.step == step >= 12
    assert newest.problem == "", logs
    (tmp_path / "again").mkdir()
    with torchruns(tmp_path / "again", "2", *OPTIONS, script=command) as running:
        running.start("a", P2PSTATE_RUN_DIR=str(tmp_path / "again"))
        running.start("b", P2PSTATE_RUN_DIR=str(tmp_path / "again"))
        assert running.codes("ab", timeout_s=240.0) == [0, 0]
        logs = running.log("a") + running.log("b")
    assert f"rank 0 resumed step {step} from disk" in logs
    assert read_history(tmp_path / "again").verdict is not None
    comparison = compare(folder / "out", tmp_path / "expected", NUM_RANKS)
    assert comparison.identical, "\n".join([*comparison.differences, logs])
    assert list_checkpoints(storage)[0].step == NUM_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("who", ["worker", "torchrun"])
def test_run_that_can_not_go_on_leaves_its_newest_version_on_disk(tmp_path: Path, who: str) -> None:
    """Killed without a word: a worker when no restart is left, or torchrun itself."""
    storage = Directory(tmp_path / "ck")
    endless = ("--pace", "0.1", "--steps", "100000", "--checkpoint-every", "100000")
    command = script(tmp_path / "out", *endless, "--checkpoint", storage.where)
    options = (*OPTIONS[:2], "--max-restarts", "0", *OPTIONS[4:])
    with torchruns(tmp_path, "1", *options, script=command) as running:
        running.start("a", P2PSTATE_RUN_DIR=str(tmp_path))
        heard = Heard(tmp_path)
        running.wait(lambda: heard("step", step=3) and heard("writer_started"), "step 3, and a process that can save")
        (started,) = heard("worker_started")
        os.kill(started["pid"] if who == "worker" else running.nodes["a"].pid, signal.SIGKILL)
        running.wait(lambda: "before the end (" in running.log("a"), "a checkpoint")
        assert running.codes("a") == [1 if who == "worker" else -signal.SIGKILL]
        logs = running.log("a")
    newest = list_checkpoints(storage)[0]
    assert newest.problem == ""
    assert newest.step == drained_step(logs) >= 2, logs  # the version of step 3 may have been under way


@pytest.mark.slow
def test_workers_are_forked_from_a_preloaded_process_where_torchrun_is_told_to(tmp_path: Path) -> None:
    python = tmp_path / stand_in.NAME
    python.write_text(f"#!{sys.executable}\nfrom p2pstate.worker.stand_in import main\nmain()\n")
    python.chmod(0o755)
    command = script(tmp_path / "out", "--pace", "0.1", "--steps", "100000")
    with torchruns(tmp_path, "1", "--nproc-per-node", "2", *OPTIONS[2:], script=command) as running:
        running.start("a", P2PSTATE_RUN_DIR=str(tmp_path), PYTHON_EXEC=str(python))
        heard = Heard(tmp_path)

        running.wait(lambda: heard("step", rank=1, step=3) and heard("preloaded"), "step 3, and a process to fork from")
        os.kill(heard("worker_started", rank=1)[-1]["pid"], signal.SIGKILL)
        running.wait(lambda: len(heard("recovery")) == 2, "recovery")
        pids = [event["pid"] for event in heard("worker_started")[2:]]
        parents = [psutil.Process(pid).parent() for pid in pids]
        assert all(parent is not None and "--listen" in parent.cmdline() for parent in parents)
        os.kill(pids[0], signal.SIGKILL)
        running.wait(lambda: len(heard("recovery")) == 4, "another recovery")
        assert "exitcode: -9" in running.log("a")
        running.nodes["a"].send_signal(signal.SIGTERM)
        assert running.codes("a") == [1]
        running.wait(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of the workers")
