"""What `p2pstate verdict` makes of the events that nodes left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2pstate.cli import main


def write(folder: Path, node: str, *events: dict[str, object]) -> None:
    lines = [json.dumps({"node": node, **event}) + "\n" for event in events]
    (folder / f"events-{node}.jsonl").write_text("".join(lines))


def verdict(t: float, code: int, text: str, scope: str = "run") -> dict[str, object]:
    return {"t": t, "event": "verdict", "code": code, "text": text, "scope": scope}


def test_verdict_of_the_run_counts_more_than_a_later_end_of_one_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "a", {"t": 1, "event": "step"}, verdict(2, 0, "finished"))
    write(tmp_path, "b", verdict(3, 143, "SIGTERM", scope="node"))
    write(tmp_path, "c", {"t": 1, "event": "step"})
    assert main(["verdict", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "node a: finished (exit code 0)\n"


@pytest.mark.parametrize("code", [1, 75, 77])
def test_verdict_is_the_exit_code_of_the_command(tmp_path: Path, code: int) -> None:
    write(tmp_path, "a", verdict(2, code, "so it ended"))
    assert main(["verdict", str(tmp_path)]) == code


def test_verdict_of_nodes_that_were_all_asked_to_end_is_the_last_ones(tmp_path: Path) -> None:
    write(tmp_path, "a", verdict(5, 143, "SIGTERM", scope="node"))
    write(tmp_path, "b", verdict(4, 76, "no workers can be made", scope="node"))
    assert main(["verdict", str(tmp_path)]) == 143


def test_verdict_with_no_node_left_to_tell_is_to_try_again(tmp_path: Path) -> None:
    write(tmp_path, "a", {"t": 1, "event": "step"})
    with (tmp_path / "events-a.jsonl").open("a") as file:
        file.write('{"t": 2, "node": "a", "event": "verdict", "code": 0{"t": 3}\n')  # the disk was full, then was not
        file.write('{"t": 2, "node": "a", "event": "verdict", "code": 0')  # it died while it wrote
    assert main(["verdict", str(tmp_path)]) == 75


def test_verdict_without_events_says_that_no_node_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verdict", str(tmp_path)]) == 78
    assert f"no events in {tmp_path}" in capsys.readouterr().out
    assert main(["verdict", str(tmp_path / "none")]) == 78
    assert "cannot be read" in capsys.readouterr().err
