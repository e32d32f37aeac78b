"""`p2pstate.restartable`: survivors stay in their process, everybody calls the function again, the end is the same."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import p2pstate.replicator
from cluster import Cluster
from p2pstate.errors import ConfigError

SCRIPT = str(Path(__file__).resolve().parent / "scripts" / "rerun.py")
NUM_RANKS = 4
DEADLINE_S = 120.0


def run(folder: Path, environ: dict[str, str], *faults: str, code: int = 0) -> tuple[list[torch.Tensor], Cluster]:
    out = folder / "out"
    out.mkdir(parents=True)
    script = [SCRIPT, str(out), "20", *faults]
    with Cluster(folder / "run", script, num_training=2, num_spares=0, num_workers=2, environ=environ) as cluster:
        deadline = time.monotonic() + DEADLINE_S
        while cluster.running():
            assert time.monotonic() < deadline, f"the run hangs\n{cluster.log_tails()}"
            time.sleep(0.02)
        assert set(cluster.exit_codes().values()) == {code}, cluster.log_tails()
        assert cluster.leftovers() == []
    return [torch.load(path, weights_only=True) for path in sorted(out.glob("result-*.pt"))], cluster


def attempts(folder: Path) -> dict[int, int]:
    """pid -> how often it called the function."""
    files = (folder / "out").glob("attempts-*")
    return {int(path.name.partition("-")[2]): len(path.read_text().splitlines()) for path in files}


def test_kill_exception_and_endless_loop_end_like_an_undisturbed_run_in_the_same_processes(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    expected, _ = run(tmp_path / "undisturbed", fork_server)
    faulted = tmp_path / "faulted"
    # In the loop rank 3 uses no collective while the others learn of rank 2's death: it has to be interrupted.
    found, cluster = run(faulted, fork_server, "6:1:kill", "10:0:raise", "14:3:loop", "14:2:kill")
    assert len(found) == NUM_RANKS
    # Not to the last bit: DDP lays its buckets out anew after the first step of every attempt.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    # Ranks 0 and 3 stayed for all four attempts, 1 was replaced before the second, 2 before the last.
    assert sorted(attempts(faulted).values()) == [1, 1, 3, 3, 4, 4], cluster.log_tails()


def test_second_exception_of_its_own_ends_the_run_with_its_traceback(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    _, cluster = run(tmp_path, fork_server, "3:1:raise", "5:1:raise", code=1)
    assert "ValueError: once" in cluster.log_tails(40)


def test_outside_a_run_the_function_is_called_once_as_it_is() -> None:
    calls = []
    assert p2pstate.restartable(lambda value: calls.append(value) or value)(3) == 3
    assert calls == [3]
    with pytest.raises(ValueError, match="max_failures"):
        p2pstate.restartable(max_failures=-1)(print)


def test_replicator_inside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2pstate.replicator, "current", lambda: SimpleNamespace(rerunning=True))
    with pytest.raises(ConfigError, match=r"without p2pstate\.restartable"):
        p2pstate.Replicator(torch.nn.Linear(1, 1))
