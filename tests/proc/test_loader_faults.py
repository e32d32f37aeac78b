"""Kill a rank, a node, a loader worker or the whole run, in several epochs: the batches are those of an unfaulted run.

Sample indices and the bits of what their augmentation drew, at every delivery; see scripts/loader_epochs.py.
"""

from __future__ import annotations

import multiprocessing
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster import Cluster
from outcome import compare, read_positions

DEADLINE_S = 150.0  # only a hang takes this long
SCRIPT = str(Path(__file__).resolve().parent / "scripts" / "loader_epochs.py")
STEPS_PER_EPOCH, NUM_EPOCHS = 6, 3  # of two ranks
GLOBAL_BATCH = 4  # as in the script


def start(folder: Path, out: Path, environ: dict[str, str], kills: Sequence[str], workers: int) -> Cluster:
    arguments = ["--out", str(out), "--workers", str(workers), *(word for kill in kills for word in ("--kill", kill))]
    return Cluster(
        folder, [SCRIPT, *arguments], num_training=2, num_spares=int(bool(kills)), num_workers=1, environ=environ
    )


def samples_by_step(out: Path, num_ranks: int) -> dict[int, dict[int, list[int]]]:
    """Step -> index -> the bits of what its augmentation drew, of all ranks; of the last time it was delivered."""
    found: dict[int, dict[int, list[int]]] = {}
    size = GLOBAL_BATCH // num_ranks
    for rank in range(num_ranks):
        for line in read_positions(out, rank)[0]:
            if "step" in line:
                indices, bits = line["positions"][:size], line["positions"][size:]
                of_step = {index: bits[at * 4 : at * 4 + 4] for at, index in enumerate(indices)}
                found.setdefault(line["step"], {}).update(of_step)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_run_killed_as_a_whole_goes_on_from_disk_with_the_unfaulted_sequence_on_the_same_and_on_fewer_ranks(
    workers: int, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    def begin(name: str, out: Path, num_ranks: int, *options: str) -> Cluster:
        script = [SCRIPT, "--out", str(out), "--workers", str(workers), *options]
        sizes = {"num_training": num_ranks, "num_spares": 0, "num_workers": 1}
        return Cluster(tmp_path / name, script, **sizes, environ=fork_server)

    def end(cluster: Cluster) -> None:
        with cluster:
            for node in cluster.nodes.values():
                node.process.wait(DEADLINE_S)
            assert set(cluster.exit_codes().values()) == {0}, cluster.log_tails()

    undisturbed, out, fewer = tmp_path / "undisturbed", tmp_path / "out", tmp_path / "fewer"
    end(begin("a", undisturbed, 2))
    folder = tmp_path / "ck"
    with begin("b", out, 2, "--checkpoint", str(folder), "--pace", "0.2") as first:
        deadline = time.monotonic() + DEADLINE_S
        while not any(e["event"] == "saved" and e["step"] > STEPS_PER_EPOCH for e in first.events.new()):
            assert time.monotonic() < deadline, first.log_tails()
            time.sleep(0.02)
        for name in first.nodes:
            first.kill_node(name)
    shutil.copytree(folder, tmp_path / "copy")
    end(begin("c", out, 2, "--checkpoint", str(folder)))
    comparison = compare(out, undisturbed, 2)
    assert comparison.identical, "\n".join(comparison.differences)
    end(begin("d", fewer, 1, "--checkpoint", str(tmp_path / "copy")))
    expected, found = samples_by_step(undisturbed, 2), samples_by_step(fewer, 1)
    assert 0 < len(found) < len(expected) == STEPS_PER_EPOCH * NUM_EPOCHS
    assert found == {step: expected[step] for step in found}


def run_script(arguments: list[str]) -> None:
    sys.argv = [SCRIPT, *arguments]
    runpy.run_path(SCRIPT, run_name="__main__")


@pytest.mark.parametrize(
    ("workers", "kills"),
    [
        # in the first, second and last epoch; twice in one epoch; at an epoch's first and last step
        (1, ("2:0:worker", "3:1:rank", "6:0:rank", "7:1:rank", "9:1:worker", "9:0:rank", "15:1:node", "18:0:worker")),
        (0, ("4:1:rank", "8:0:node")),
    ],
)
def test_loader_of_killed_ranks_nodes_and_workers_delivers_the_unfaulted_sequence(
    workers: int, kills: Sequence[str], tmp_path: Path, fork_server: dict[str, str]
) -> None:
    undisturbed, faulted = tmp_path / "undisturbed", tmp_path / "faulted"
    with (
        start(tmp_path / "a", undisturbed, fork_server, (), 1 - workers) as without,
        start(tmp_path / "b", faulted, fork_server, kills, workers) as with_kills,
    ):
        deadline = time.monotonic() + DEADLINE_S
        while without.running() or with_kills.running():
            assert time.monotonic() < deadline, f"a run hangs\n{without.log_tails()}\n{with_kills.log_tails()}"
            time.sleep(0.02)
        tails = with_kills.log_tails()
        codes = sorted(code or 0 for code in with_kills.exit_codes().values())
        assert set(without.exit_codes().values()) == {0}, without.log_tails()
        assert codes == [-signal.SIGKILL] * sum(kill.endswith("node") for kill in kills) + [0, 0], tails
    for kill in kills:
        assert (faulted / f"killed-{kill}").exists(), f"the kill {kill} did not happen\n{tails}"
    comparison = compare(faulted, undisturbed, 2)
    assert comparison.identical, "\n".join([*comparison.differences, tails])
    seen = [line["positions"][:2] for rank in (0, 1) for line in read_positions(undisturbed, rank)[0] if "step" in line]
    assert len(seen) == 2 * STEPS_PER_EPOCH * NUM_EPOCHS
    assert with_kills.leftovers() == []


def test_loader_of_a_run_killed_as_a_whole_again_and_again_delivers_the_unfaulted_sequence(tmp_path: Path) -> None:
    def run(out: Path, *options: str) -> int | None:
        """The script in a fork of this process, which has torch already. Its exit code."""
        arguments = ["--alone", "--out", str(out), *options]
        process = multiprocessing.get_context("fork").Process(target=run_script, args=(arguments,))
        process.start()
        process.join(DEADLINE_S)
        process.kill()
        return process.exitcode

    undisturbed, faulted = tmp_path / "undisturbed", tmp_path / "faulted"
    assert run(undisturbed, "--workers", "0") == 0
    # within an epoch twice, at its end, in later ones; with other numbers of workers each time
    kills = [word for step in (3, 5, 12, 30) for word in ("--kill", f"{step}:0:rank")]
    for workers in (2, 1, 0, 4):
        assert run(faulted, "--workers", str(workers), *kills) == -signal.SIGKILL
    assert run(faulted, "--workers", "1", *kills) == 0
    comparison = compare(faulted, undisturbed, 1)
    assert comparison.identical, "\n".join(comparison.differences)
