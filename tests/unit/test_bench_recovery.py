"""The recovery benchmark: what it counts, and the damage it does."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from p2pstate.slots import HEADER_BYTES
from timeline import Timeline

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import recovery
import recovery_allocation
from recovery_scenarios import SCENARIOS, Incident, damage_own_copies, incident


def test_summary_tells_median_worst_and_the_phases_of_all() -> None:
    incidents = [
        Incident(1.0, 0, "own vault", {"detect": 0.1, "pull": 0.2}, 0.5),
        Incident(5.0, 1, "buddy", {"detect": 0.3}, 0.5),
        Incident(2.0, 0, "own vault", {"detect": 0.2, "pull": 0.4}, 0.6),
    ]
    found = recovery.summarise(incidents)
    assert (found["median_s"], found["worst_s"], found["best_s"]) == (2.0, 5.0, 1.0)
    assert (found["steps_lost"], found["kills"], found["source"]) == (1, 3, "buddy, own vault")
    assert found["phases"] == {"detect": 0.2, "pull": 0.2}
    assert recovery.ratio({"torchrun_dcp": {"median_s": 10.0}, "ours_cold": found}, "ours_cold") == 5.0


def test_peers_that_are_not_installed_are_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    args = argparse.Namespace(only=["ours_warm", "nvrx_launcher", "torchft"], script=None, quick=False)
    assert [scenario.name for scenario in recovery.chosen(args)] == ["ours_warm"]
    assert "left out: torchft: torchft is not installed (extra bench-peers)" in capsys.readouterr().out


def test_settings_that_are_nobodys_defaults_are_told() -> None:
    sizes = recovery.sizes_of(argparse.Namespace(parameters=None, quick=False, script=None, ranks=4))
    told = recovery.described(sizes, 5)
    assert "4 ranks on 2 nodes; 25.2 M parameters, FSDP2; 5 kills of each kind" in told
    assert "--monitor-interval 0.1" in told


def test_seconds_count_until_all_ranks_are_beyond_the_step_before_the_kill() -> None:
    def step(rank: int, number: int, t: float) -> dict[str, object]:
        return {"t": t, "node": "n", "event": "step", "rank": rank, "step": number, "seconds": 0.5, "loss": None}

    timeline = Timeline(2)
    started = {"event": "worker_started", "node": "n", "t": 0.0}
    timeline.add([started | {"rank": rank, "pid": 10 + rank} for rank in range(2)])
    timeline.add([step(0, 7, 9.0), step(1, 6, 9.1)])
    timeline.add([{"event": "injected", "kind": "worker", "what": "rank 1", "t": 10.0, "victims": [1]}])
    timeline.add([{"t": 10.2, "node": "n", "event": "worker_exited", "rank": 1, "pid": 11, "cause": "signal 9"}])
    resumed = {
        "t": 11.0,
        "node": "n",
        "event": "recovery",
        "version": [1, 6],
        "bytes": 0,
        "steps_lost": 1,
        "phases": {},
    }
    timeline.add([resumed | {"rank": 0, "source": "survivor"}, resumed | {"rank": 1, "source": "buddy"}])
    timeline.add([step(0, 7, 11.5), step(1, 7, 11.6), step(0, 8, 12.0)])
    assert timeline.recovering  # rank 1 has not passed step 7
    timeline.add([step(1, 8, 12.5)])
    (failure,) = timeline.failures
    found = incident(failure, 0.5)
    assert found == Incident(2.5, 1, "buddy", {"detect": pytest.approx(0.2)}, 0.5)


def test_damage_hits_both_slots_of_the_rank_once_each_and_nobody_elses() -> None:
    names = ["own1-0", "own1-1", "own10-0", "shared1-0"]
    slots = {name: os.memfd_create(f"p2pstate-{name}") for name in names}
    also = os.dup(slots["own1-0"])  # as a mapping keeps one
    try:
        for fd in slots.values():
            os.write(fd, b"\0" * (HEADER_BYTES + 100))
        damage_own_copies(os.getpid(), 1)
        changed = {name for name, fd in slots.items() if any(os.pread(fd, 100, HEADER_BYTES))}
        assert changed == {"own1-0", "own1-1"}
        assert all(not any(os.pread(fd, HEADER_BYTES, 0)) for fd in slots.values())
    finally:
        for fd in [*slots.values(), also]:
            os.close(fd)


def test_sizes_follow_the_number_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["recovery.py", "--parameters", "25000000"])
    sizes = recovery.sizes_of(recovery.arguments())
    found = recovery.NUM_LAYERS * recovery.PARAMETERS_PER_LAYER_AND_SQUARE * sizes.width**2
    assert abs(found / 25e6 - 1) < 0.05
    assert sizes.num_workers == 2


def test_odd_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["recovery.py", "--ranks", "3"])
    with pytest.raises(SystemExit):
        recovery.arguments()
    assert "--ranks 3" in capsys.readouterr().err


def test_script_of_the_user_is_measured_where_no_other_way_to_save_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    command = ["recovery.py", "--quick", "--script", str(script), "--", "--steps", "9"]
    monkeypatch.setattr(sys, "argv", command)
    args = recovery.arguments()
    assert recovery.sizes_of(args).program == (str(script), "--steps", "9")
    assert [scenario.name for scenario in recovery.chosen(args)] == ["ours_warm", "ours_node", "torchrun_p2p"]
    monkeypatch.setattr(sys, "argv", ["recovery.py", "--script", str(tmp_path / "none.py")])
    with pytest.raises(SystemExit):
        recovery.arguments()
    assert "there is no such file" in capsys.readouterr().err


def test_hosts_of_an_allocation_measure_what_they_are_enough_for(tmp_path: Path) -> None:
    env = {"P2PSTATE_CONTACTS": "a:1, b:1,c:1", "SLURM_NODEID": "2"}
    three = recovery_allocation.Allocation.from_env(tmp_path, env)
    assert (three.contacts, three.index) == (("a:1", "b:1", "c:1"), 2)
    two = recovery_allocation.Allocation.from_env(
        tmp_path, {"P2PSTATE_CONTACTS": "a:1,b:1", "P2PSTATE_HOST_INDEX": "0"}
    )
    fitting = {
        len(each.contacts): [s.name for s in SCENARIOS if recovery_allocation.fits(s, each, 6)] for each in (two, three)
    }
    assert fitting == {
        2: ["ours_warm", "ours_cold", "ours_buddy"],
        3: ["ours_warm", "ours_cold", "ours_buddy", "ours_node"],
    }
    for missing in ({"P2PSTATE_CONTACTS": "a:1,b:1"}, {**env, "SLURM_NODEID": "3"}, {"SLURM_NODEID": "0"}):
        with pytest.raises(ValueError, match="P2PSTATE_HOST_INDEX"):
            recovery_allocation.Allocation.from_env(tmp_path, missing)
