"""The durable tier with real processes: what is lost in memory comes back from disk, and disk never stops training."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.registry import register_implementation
from object_store import ObjectStore
from observed_runs import DEADLINE_S, SMALL, TRAIN, Run, launch_two

from outcome import compare
from p2pstate.durable.catalog import damaged_files, list_checkpoints
from p2pstate.durable.remote import open_storage
from p2pstate.durable.storage import Directory

NUM_STEPS = 60
SHAPE = (2, 1)
EVERY = ("--checkpoint-every", "6", "--pace", "0.05")  # so that saves end long before training does


UNPACED = ("--pace", "0")


@pytest.fixture
def start(tmp_path: Path, fork_server: dict[str, str]) -> Iterator[Callable[..., Run]]:
    """Runs of two ranks on two nodes, which all write to one folder and leave their final state in another."""
    runs: list[Run] = []

    def make(*args: str, **options: Any) -> Run:
        places = ("--out", str(tmp_path / "out"), "--checkpoint", str(tmp_path / "ck"))
        folder = tmp_path / str(len(runs))
        runs.append(Run(folder, fork_server, *places, *EVERY, *args, shape=SHAPE, steps=NUM_STEPS, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.cluster.stop()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, fork_server: dict[str, str]) -> Path:
    """The outcome of an undisturbed run that writes no checkpoint."""
    run = Run(tmp_path_factory.mktemp("expected"), fork_server, shape=SHAPE, steps=NUM_STEPS)
    assert set(run.end().values()) == {0}
    return run.out


def assert_identical(run: Run, out: Path, expected: Path) -> None:
    comparison = compare(out, expected, 2)
    assert comparison.identical, "\n".join([*comparison.differences, run.cluster.log_tails()])


def wait_saved(run: Run, step: int) -> None:
    run.wait_for(f"save of step {step}", lambda e: e["event"] == "saved" and e["step"] >= step)


def test_all_nodes_killed_the_same_command_resumes_from_the_newest_good_checkpoint(
    start: Callable[..., Run], expected: Path, tmp_path: Path
) -> None:
    first = start()
    wait_saved(first, 12)
    for name in ("node0", "node1"):
        first.cluster.kill_node(name)
    newest, second_newest = [each for each in list_checkpoints(Directory(tmp_path / "ck")) if not each.problem][:2]
    assert second_newest.manifest is not None
    data = next(Path(newest.path).glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    second = start(*UNPACED)
    resolved = second.wait_for("decision", lambda e: e["event"] == "resolved")
    assert (resolved["source"], resolved["step"]) == ("disk", second_newest.manifest.version.step)
    (skipped,) = [sentence for sentence in resolved["skipped"] if sentence.startswith(newest.name)]
    assert f"{data.name} is damaged" in skipped
    assert set(second.end().values()) == {0}
    assert_identical(second, tmp_path / "out", expected)


def test_rank_and_its_buddy_lost_at_once_come_back_from_disk(
    start: Callable[..., Run], expected: Path, tmp_path: Path
) -> None:
    run = start(spares=2)
    wait_saved(run, 6)
    for node in [run.cluster.nodes[name] for name in run.all("view")[-1]["places"]]:
        node.killed = True
        os.kill(node.process.pid, signal.SIGKILL)
    resumed = run.wait_for("recovery", lambda e: e["event"] == "recovery")
    assert resumed["source"] == "disk"
    assert resumed["version"][1] % 6 == 0
    assert "is the newest good checkpoint" in resumed["reason"]
    newest = max(event["step"] for event in run.all("step"))
    assert resumed["version"][1] + resumed["steps_lost"] <= newest
    assert set(run.end().values()) == {0}
    assert_identical(run, tmp_path / "out", expected)


def wait_reported(run: Run, kind: str, text: str = "") -> int:
    """Until both nodes have reported it; of which step the later one did."""
    nodes: set[str] = set()
    step = 0
    while nodes != {"node0", "node1"}:
        event = run.wait_for(f"{kind} ({text})", lambda e: e["event"] == kind and text in e.get("error", ""))
        nodes.add(event["node"])
        step = event["step"]
    return step


def mount(*arguments: str) -> None:
    """Again while a file is being written."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        done = subprocess.run(["mount", *arguments], check=False, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode == 0:
            return
        if "busy" not in done.stderr or time.monotonic() > deadline:
            raise OSError(done.stderr.strip())
        time.sleep(0.02)


def test_storage_that_fails_is_reported_everywhere_and_never_stops_training(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    """Gone while a rank dies; a writer that hangs and is killed in the middle of a save; full; read-only."""
    run = start("--steps", "100000")
    root, away = tmp_path / "ck", tmp_path / "away"
    wait_saved(run, 6)
    root.rename(away)
    root.write_text("no directory any more")
    wait_reported(run, "save_failed", "storage")
    run.cluster.kill_process([e["pid"] for e in run.all("worker_started") if e["rank"] == 1][-1])
    recovered = run.wait_for("recovery", lambda e: e["event"] == "recovery" and e["rank"] == 1)
    assert recovered["source"] == "own vault", "memory does not depend on disk"
    root.unlink()
    away.rename(root)
    wait_saved(run, recovered["version"][1] + 1)
    num_recoveries = len(run.all("recovery"))

    pid = [event["pid"] for event in run.all("writer_started") if event["node"] == "node1"][-1]
    os.kill(pid, signal.SIGSTOP)
    wait_reported(run, "save_late")  # training goes on to where the next save is due
    os.kill(pid, signal.SIGKILL)
    wait_saved(run, wait_reported(run, "save_failed", "SIGKILL") + 1)
    try:
        mount("-t", "tmpfs", "-o", "size=64k", "none", str(root))
    except OSError as error:
        pytest.skip(f"a file system that is really full, or read-only, cannot be mounted here: {error}")
    try:
        for _ in range(3):
            wait_reported(run, "save_failed", "No space left")
        assert len(list(root.iterdir())) <= 1, "what a failed save has left takes the room of the next"
        mount("-o", "remount,ro", str(root))
        failed = wait_reported(run, "save_failed", "Read-only")
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)
    wait_saved(run, failed + 1)
    assert len(run.all("recovery")) == num_recoveries, "storage is no reason to stop"


def test_object_storage_that_fails_costs_saves_and_has_the_newest_version_after_a_signal_to_every_agent(
    start: Callable[..., Run], expected: Path, tmp_path: Path
) -> None:
    url = f"objects://{tmp_path}/bucket/run"
    register_implementation("objects", ObjectStore, clobber=True)
    fault = tmp_path / "bucket" / "FAULT"
    places = ("--checkpoint", url, "--checkpoint-stage", str(tmp_path / "stage"))
    first = start(*places, "--pace", "0.1")
    wait_saved(first, 6)
    fault.write_text("gone")
    failed = wait_reported(first, "save_failed", f"{url}: Refused")
    fault.write_text("slow 0.1")
    wait_saved(first, failed + 1)
    for node in first.cluster.running():
        node.process.send_signal(signal.SIGTERM)
    assert set(first.end().values()) <= {128 + signal.SIGTERM, 75}
    drained = first.all("drained")
    assert any(event["error"] == "" and "is on disk" in event["text"] for event in drained), drained
    fault.unlink()
    newest, *_ = [found for found in list_checkpoints(open_storage(url)) if not found.problem]
    assert newest.step >= max(event["step"] for event in first.all("saved"))

    second = start(*places, *UNPACED)
    assert len(list((tmp_path / "stage").glob("*/*"))) == 1, "the stage keeps one save"
    resolved = second.wait_for("decision", lambda e: e["event"] == "resolved")
    assert (resolved["step"], resolved["path"]) == (newest.step, newest.path)
    assert set(second.end().values()) == {0}
    assert_identical(second, tmp_path / "out", expected)


FAILING = f"""
import os, runpy, sys
sys.path.insert(0, {str(Path(TRAIN).parent)!r})
from outcome import Recorder

committed = Recorder.committed

def fails(self, step, loss):
    committed(self, step, loss)
    if step == 12 and os.environ["RANK"] == "1":
        raise RuntimeError("made to fail")

Recorder.committed = fails
runpy.run_path({TRAIN!r}, run_name="__main__")
"""


@pytest.mark.parametrize("cause", ["no spare", pytest.param("user code", marks=pytest.mark.slow)])
def test_verdict_writes_the_newest_whole_version_before_the_end(
    cause: str, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    """Without a spare node 0's shard comes from its buddy's copy; a script that fails leaves all vaults as they are."""
    script = TRAIN
    if cause == "user code":
        script = str(tmp_path / "failing.py")
        Path(script).write_text(FAILING)
    folders = ("--out", str(tmp_path / "out"), "--checkpoint", str(tmp_path / "ck"))
    options = ("--steps", "100000", "--checkpoint-every", "100000", *SMALL)
    nodes = launch_two(tmp_path, fork_server, "--spare-wait", "1", script, *folders, *options)
    if cause == "no spare":
        deadline = time.monotonic() + DEADLINE_S
        while not _has_committed(tmp_path / "out", 10) and time.monotonic() < deadline:
            time.sleep(0.05)
        nodes[0].kill()
    _, stderr = nodes[1].communicate(timeout=DEADLINE_S)
    nodes[0].communicate(timeout=DEADLINE_S)
    assert nodes[1].returncode == (75 if cause == "no spare" else 1), stderr
    (found,) = list_checkpoints(Directory(tmp_path / "ck"))
    assert found.problem == ""
    assert damaged_files(found) == []
    assert found.step >= 10
    assert "before the end (" in stderr


def _has_committed(out: Path, step: int) -> bool:
    return any(f'"step": {step},' in path.read_text() for path in out.glob("positions-1.*"))
