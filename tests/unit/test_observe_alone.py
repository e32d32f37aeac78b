"""The meter alone in one process: what it writes, what it reads back, what goes wrong."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from p2pstate.observe import RunMeter, alone
from p2pstate.observe.history import read_history
from p2pstate.observe.reading import read_run
from p2pstate.planning.measured import measured_fields


def steps_of(folder: Path) -> list[Any]:
    return [event["step"] for event in read_run(folder) if event["event"] == "step"]


def test_alone_gives_the_same_batches_and_counts_every_category(tmp_path: Path) -> None:
    with RunMeter(tmp_path, rank=3) as meter:
        for number, batch in enumerate(meter.fetching("abc")):
            with meter.step(number):
                assert batch == "abc"[number]
        with meter.saving():
            pass
        with meter.phase("evaluation"):
            pass
        assert meter.goodput().seconds["useful"] > 0
    assert steps_of(tmp_path) == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["events-rank3.jsonl"]


def test_alone_goes_on_where_a_process_that_died_stopped(tmp_path: Path) -> None:
    dead = RunMeter(tmp_path, rank=0)
    for number in (1, 2):
        with dead.step(number):
            pass
    dead.goodput()
    dead._writer.close()  # its lines are on the disk, it never said that it finished
    with RunMeter(tmp_path, rank=0) as meter:
        for number in (2, 3):
            with meter.step(number):
                pass
        found = meter.goodput()
    assert found.seconds["repeated"] > 0
    assert found.seconds["recovery.start"] > 0
    assert "recovery" in found.by_category()
    history = read_history(tmp_path)
    (failure,) = history.incidents
    assert (failure.cause, failure.source, failure.steps_lost, failure.replaced) == ("restart", "the script", 1, {0})
    fields = measured_fields(history)
    assert fields["restart_s"] == pytest.approx(history.total.by_category()["recovery"])
    assert (fields["gpu_mtbf_s"], fields["measured_load_s"]) == (history.total.wall_s, 0.0)
    assert not fields.keys() & {"overhead", "node_share"}  # it says nothing of copies
    with RunMeter(tmp_path, rank=0) as after_the_end:
        assert after_the_end.goodput().seconds["recovery.start"] == found.seconds["recovery.start"]


def test_alone_goes_on_with_a_step_after_what_is_inside_of_it(tmp_path: Path) -> None:
    """Micro-batches are fetched, and checkpoints saved, in the middle of a step."""
    with RunMeter(tmp_path, rank=0) as meter:
        batches = meter.fetching(range(4))
        for number in (1, 2):
            with meter.step(number):
                for _ in range(2):
                    next(batches)
                    time.sleep(0.02)
                with meter.phase("evaluation"), meter.saving():
                    pass
                time.sleep(0.02)
        seconds = meter.goodput().seconds
    assert seconds["useful"] >= 6 * 0.02
    assert {"data", "saving", "phase.evaluation"} <= seconds.keys()


def test_alone_counts_a_step_that_raises_as_in_vain(tmp_path: Path) -> None:
    meter = RunMeter(tmp_path, rank=0)
    with pytest.raises(RuntimeError, match="out of memory"), meter.step(1):
        raise RuntimeError("out of memory")
    assert "useful" not in meter.goodput().seconds
    assert meter.goodput().seconds["repeated"] > 0
    meter.close()


def test_alone_counts_a_process_from_its_start_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        monkeypatch.setattr(alone, "_counts_process", name == "first")
        lives_s = alone._process_age_s() if name == "first" else 0.0
        before = time.monotonic()
        with RunMeter(tmp_path / name, rank=0) as meter:
            with meter.step(1):
                pass
            found = meter.goodput()
            took_s = time.monotonic() - before
        assert lives_s <= found.seconds["startup"] <= lives_s + took_s + 0.1
        assert found.wall_s == pytest.approx(found.seconds["startup"], abs=took_s)


def test_age_of_a_process_is_what_a_clock_beside_it_says() -> None:
    """Also while the second in which the machine booted is not known to a fraction."""
    code = "import time; from p2pstate.observe import alone; print(alone._process_age_s(), time.monotonic())"
    before = time.monotonic()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    age_s, then = map(float, out.split())
    assert 0 < age_s < then - before + 0.02
    assert alone._process_age_s() > age_s


def test_alone_takes_its_rank_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SLURM_PROCID", "5")
    RunMeter(tmp_path).close()
    monkeypatch.setenv("RANK", "7")
    RunMeter(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events-rank5.jsonl", "events-rank7.jsonl"]


def test_alone_without_a_place_to_write_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        RunMeter(tmp_path / "file" / "run", rank=0)


def test_alone_writes_one_object_a_line(tmp_path: Path) -> None:
    RunMeter(tmp_path, rank=0).close()
    lines = (tmp_path / "events-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["worker_started", "clock", "finished"]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (b'{"t": 1796073426.7, "node": "rank0", "event": "st', []),  # cut off by the death of its process
        (b'{"t": 1, "event": "step", "node": "rank0", "clock": {}}\n', ["earlier_events_unknown"]),
    ],
)
def test_alone_after_damaged_lines_loses_none_of_its_own(tmp_path: Path, damage: bytes, told: list[str]) -> None:
    path = tmp_path / "events-rank0.jsonl"
    path.write_bytes(damage)
    with RunMeter(tmp_path, rank=0) as meter, meter.step(7):
        pass
    kinds = [json.loads(line)["event"] for line in path.read_bytes()[len(damage) :].splitlines() if line]
    assert kinds == [*told, "worker_started", "step", "clock", "finished"]
