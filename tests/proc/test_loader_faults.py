"""Kill a rank, a node, a loader worker or the whole run, in several epochs: the batches are those of an unfaulted run.

Sample indices and the bits of what their augmentation drew, at every delivery; see scripts/loader_epochs.py.
"""

from __future__ import annotations

import multiprocessing
import random
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from loader_epochs import loader_of, recorded

from cluster import Cluster
from outcome import compare, read_positions

DEADLINE_S = 150.0  # only a hang takes this long
SCRIPT = str(Path(__file__).resolve().parent / "scripts" / "loader_epochs.py")
STEPS_PER_EPOCH, NUM_EPOCHS = 6, 3  # of two ranks
GLOBAL_BATCH = 4  # as in the script
BITS = 4  # words of augmentation for each sample


def start(
    folder: Path, out: Path, environ: dict[str, str], kills: Sequence[str], workers: int, options: Sequence[str]
) -> Cluster:
    arguments = ["--out", str(out), "--workers", str(workers), *options]
    arguments += [word for kill in kills for word in ("--kill", kill)]
    return Cluster(
        folder, [SCRIPT, *arguments], num_training=2, num_spares=int(bool(kills)), num_workers=1, environ=environ
    )


Samples = list[tuple[int, ...]]  # each an index, and the bits of what its augmentation drew


def samples_of(positions: list[int]) -> Samples:
    size = len(positions) // (1 + BITS)
    return [(index, *positions[size + at * BITS :][:BITS]) for at, index in enumerate(positions[:size])]


def samples_by_step(out: Path, num_ranks: int) -> dict[int, Samples]:
    """Of all ranks together, in order of index; of the last time each step was done."""
    found: dict[int, dict[int, Samples]] = {}
    for rank in range(num_ranks):
        for line in read_positions(out, rank)[0]:
            if "step" in line:
                found.setdefault(line["step"], {})[rank] = samples_of(line["positions"])
    return {step: sorted(each for of_rank in ranks.values() for each in of_rank) for step, ranks in found.items()}


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


def life(
    folder: Path, chance: random.Random, num_ranks: int, options: Sequence[str], first_step: int, *, whole: bool
) -> tuple[Cluster, list[str]]:
    """A run with a few random kills, of which ``whole`` ends it; and what they are."""
    steps = range(first_step + 1, STEPS_PER_EPOCH * NUM_EPOCHS)
    num_nodes = min(2, num_ranks)
    kinds = ["worker", "rank", "rank"] if num_ranks > 1 else ["worker"]
    kills = [f"{chance.choice(steps)}:{chance.randrange(num_ranks)}:{chance.choice(kinds)}" for _ in range(3)]
    if num_nodes > 1 and not whole:
        kills.append(f"{chance.choice(steps)}:{chance.randrange(num_ranks)}:node")
    arguments = [*options, "--workers", str(chance.choice([0, 1, 4]))]
    cluster = Cluster(
        folder,
        [SCRIPT, *arguments, *(word for kill in kills for word in ("--kill", kill))],
        num_training=num_nodes,
        num_spares=int(num_nodes > 1),
        num_workers=num_ranks // num_nodes,
        environ={},
    )
    return cluster, [*arguments[-2:], *kills]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_loader_of_runs_with_random_kills_and_sizes_delivers_the_unfaulted_sequence(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    mixture = chance.random() < 0.5
    whole = loader_of(0, 1, GLOBAL_BATCH, workers=0, mixture=mixture)
    expected = {step: sorted(samples_of(recorded(*batch))) for step, batch in enumerate(whole, 1)}
    assert len(expected) == STEPS_PER_EPOCH * NUM_EPOCHS
    done, story = 0, [f"seed {seed}, mixture {mixture}"]
    for number, num_ranks in enumerate(chance.choices([1, 2, 4], k=3)):
        out, is_last = tmp_path / f"out{number}", number == 2
        options = ["--out", str(out), "--checkpoint", str(tmp_path / "checkpoint"), "--pace", "0.1"]
        options += ["--mixture"] if mixture else []
        cluster, kills = life(tmp_path / f"life{number}", chance, num_ranks, options, done, whole=not is_last)
        story.append(f"{num_ranks} ranks from about step {done}: {kills}")
        killed_at = done + chance.randrange(2, 5)
        with cluster:
            deadline, seen = time.monotonic() + DEADLINE_S, 0
            while cluster.running() and (is_last or seen < killed_at):
                assert time.monotonic() < deadline, f"{story}\n{cluster.log_tails()}"
                seen = max([seen, *(e["step"] for e in cluster.events.new() if e["event"] == "saved")])
                time.sleep(0.02)
            for name in list(cluster.nodes) if not is_last else []:
                cluster.kill_node(name)
            if is_last:
                codes = sorted(code or 0 for code in cluster.exit_codes().values())
                assert set(codes) <= {0, -signal.SIGKILL}, f"{story}\n{cluster.log_tails()}"
                assert 0 in codes, f"{story}\n{cluster.log_tails()}"
            done = seen
        found = samples_by_step(out, num_ranks)
        complete = {step: samples for step, samples in found.items() if len(samples) == GLOBAL_BATCH}
        assert complete, story
        assert complete == {step: expected[step] for step in complete}, story
        for rank in range(num_ranks):  # every delivery, of discarded steps as well
            for line in read_positions(out, rank)[0]:
                assert set(samples_of(line["positions"])) <= set(expected[line.get("step") or line["delivered"]]), story
    assert max(complete) == STEPS_PER_EPOCH * NUM_EPOCHS, story
    assert sorted(complete) == list(range(min(complete), max(complete) + 1)), story


def run_script(arguments: list[str]) -> None:
    sys.argv = [SCRIPT, *arguments]
    runpy.run_path(SCRIPT, run_name="__main__")


@pytest.mark.parametrize(
    ("workers", "options", "kills"),
    [
        # in the first, second and last epoch; twice in one epoch; at an epoch's first and last step
        (
            1,
            (),
            ("2:0:worker", "3:1:rank", "6:0:rank", "7:1:rank", "9:1:worker", "9:0:rank", "15:1:node", "18:0:worker"),
        ),
        (0, ("--mixture",), ("4:1:rank", "8:0:node")),
    ],
)
def test_loader_of_killed_ranks_nodes_and_workers_delivers_the_unfaulted_sequence(
    workers: int, options: Sequence[str], kills: Sequence[str], tmp_path: Path, fork_server: dict[str, str]
) -> None:
    undisturbed, faulted = tmp_path / "undisturbed", tmp_path / "faulted"
    with (
        start(tmp_path / "a", undisturbed, fork_server, (), 1 - workers, options) as without,
        start(tmp_path / "b", faulted, fork_server, kills, workers, options) as with_kills,
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
