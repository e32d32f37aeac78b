"""Every kill point x {worker, node} x {FSDP2, DDP with BatchNorm} ends bit-identical to the undisturbed run.

The kills of a cell group share one running cluster; a node that dies is replaced by a new spare, as an operator or a
scheduler does. Each run is checked for what it leaves behind. The short form takes half of the points in each group, so
that every point meets both victims and both parallelisms; the slow one takes all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from cluster import Cluster
from kill_points import PHASES, Kill
from outcome import compare

NUM_RANKS = 4
FIRST_STEP, STEPS_BETWEEN = 5, 5
EVEN, ODD = PHASES[::2], PHASES[1::2]
SMALL = ("--num-layers", "2", "--width", "64", "--context", "32", "--batch", "2")
PARALLELISMS = {"fsdp2": (), "ddp": ("--ddp", "--batch-norm")}
DEADLINE_S = 120.0  # only a hang takes this long

SCRIPT = str(Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py")


def train(
    folder: Path, parallelism: str, num_points: int, kills: list[Kill], environ: dict[str, str], num_spares: int
) -> Cluster:
    """Run until there has been time for so many kills, replacing nodes that die. Asserts a clean end."""
    out = folder / "out"
    num_steps = FIRST_STEP + STEPS_BETWEEN * num_points
    specs = [arg for kill in kills for arg in ("--kill", spec(kill))]
    script = [SCRIPT, "--out", str(out), "--steps", str(num_steps), *SMALL, *PARALLELISMS[parallelism], *specs]
    deadline = time.monotonic() + DEADLINE_S
    with Cluster(
        folder / "run", script, num_training=2, num_spares=num_spares, num_workers=2, environ=environ
    ) as cluster:
        while cluster.running():
            assert time.monotonic() < deadline, f"the run hangs\n{cluster.log_tails()}"
            for node in list(cluster.nodes.values()):
                if node.process.poll() == -9 and not node.killed:
                    node.killed = True
                    # Not after the last kill: a node that comes when the run has ended would wait for one to begin.
                    if sum(each.killed for each in cluster.nodes.values()) < len(kills):
                        cluster.add_node()
            cluster.dismiss_late()
            time.sleep(0.02)
        codes = cluster.exit_codes()
        assert set(codes.values()) == {0}, f"{codes}\n{cluster.log_tails()}"
        assert cluster.leftovers() == []
    for kill in kills:
        assert (out / kill.marker).exists(), f"the kill {spec(kill)} did not happen"
    return cluster


def spec(kill: Kill) -> str:
    return f"{kill.step}:{kill.rank}:{kill.phase}" + (":node" if kill.node else "")


def kills(victim: str, phases: Sequence[str]) -> list[Kill]:
    """One kill per phase, the victims taking turns."""
    return [
        Kill(FIRST_STEP + STEPS_BETWEEN * index, (index + (victim == "node")) % NUM_RANKS, phase, victim == "node")
        for index, phase in enumerate(phases)
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, fork_server: dict[str, str]) -> Callable[[str, int], Path]:
    """Of a parallelism and a number of kills: where the outcome of an undisturbed run of that length is."""

    @cache
    def outcome(parallelism: str, num_points: int) -> Path:
        folder = tmp_path_factory.mktemp(f"undisturbed-{parallelism}-{num_points}")
        train(folder, parallelism, num_points, [], fork_server, num_spares=0)
        return folder / "out"

    return outcome


@pytest.mark.parametrize(
    ("parallelism", "victim", "phases"),
    [
        ("fsdp2", "worker", EVEN),
        ("fsdp2", "node", ODD),
        ("ddp", "worker", ODD),
        ("ddp", "node", EVEN),
        *(
            pytest.param(parallelism, victim, PHASES, marks=pytest.mark.slow)
            for parallelism in PARALLELISMS
            for victim in ("worker", "node")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} points",
)
def test_kill_at_every_point_ends_bit_identical(
    parallelism: str,
    victim: str,
    phases: Sequence[str],
    undisturbed: Callable[[str, int], Path],
    tmp_path: Path,
    fork_server: dict[str, str],
) -> None:
    num_points = max(len(phases), len(EVEN))  # one length for both halves
    expected = undisturbed(parallelism, num_points)
    num_spares = 1 if victim == "node" else 0
    cluster = train(tmp_path, parallelism, num_points, kills(victim, phases), fork_server, num_spares)
    comparison = compare(tmp_path / "out", expected, NUM_RANKS)
    assert comparison.identical, "\n".join([*comparison.differences, cluster.log_tails()])
    recoveries = [event for event in cluster.events.new() if event["event"] == "recovery"]
    assert len(recoveries) >= NUM_RANKS * len(phases)
    for event in recoveries:
        at_once = [e for e in recoveries if e["epoch"] == event["epoch"]]
        allowed = 1 + max(e["steps_skipped"] for e in at_once)  # versions all ranks skipped because shipping was late
        assert event["steps_lost"] <= allowed, f"{event} (allowed: {allowed})"
