"""The README's first screen must be true: its diff is code over names that exist, its command is one p2prun takes."""

import ast
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import p2pstate
from p2pstate.cli import _parser, main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def sides_of_the_diff() -> tuple[str, str]:
    found = re.search(r"```diff\n(.*?)```", README, re.DOTALL)
    assert found is not None
    lines = found.group(1).splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] in (" ", "", sign)) for sign in "-+")  # type: ignore[return-value]


def test_readme_diff_is_python_on_both_sides() -> None:
    before, after = map(ast.parse, sides_of_the_diff())
    assert "p2pstate" not in ast.unparse(before)
    assert "p2pstate" in ast.unparse(after)


def test_readme_diff_uses_only_what_exists() -> None:
    after = ast.parse(sides_of_the_diff()[1])
    calls = {ast.unparse(node.func): node for node in ast.walk(after) if isinstance(node, ast.Call)}
    for name, owner in (
        ("p2pstate.init_process_group", p2pstate.init_process_group),
        ("p2pstate.Replicator", p2pstate.Replicator.__init__),
        ("state.run", p2pstate.Replicator.run),
    ):
        parameters = inspect.signature(owner).parameters
        assert {keyword.arg for keyword in calls[name].keywords} <= set(parameters), name


def test_readme_diff_is_ten_lines_of_additions_at_most() -> None:
    assert len(re.findall(r"^\+", README, re.MULTILINE)) <= 10


def test_readme_command_is_one_that_p2prun_takes() -> None:
    found = re.search(r"^ +(p2prun (?:.*\\\n)*.*)", README, re.MULTILINE)
    assert found is not None
    command, *arguments = shlex.split(found.group(1).replace("\\\n", " "))
    options = _parser().parse_args(arguments)
    assert (command, options.script, options.nnodes, options.spares) == ("p2prun", "train.py", "2", 1)
    assert options.bind in options.contacts.split(",")


def test_meter_section_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "goodput.md").read_text()
    snippet = re.search(r"```python\n(from p2pstate\.observe import .*?)```", page, re.DOTALL)
    assert snippet is not None
    names: dict[str, Any] = {"torch": torch, "model": torch.nn.Linear(1, 1), "loader": range(200), "first": 1}
    exec(snippet.group(1), names | {"train": lambda batch: None})
    assert Path("model.pt").exists()
    assert list(Path("runs/today").glob("events-*.jsonl"))


def test_readme_data_section_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.jsonl").write_text("".join(f'{{"text": "{"word " * 300}"}}\n' for _ in range(20)))
    found = re.search(r"^ +p2pstate (data pack .*)", README, re.MULTILINE)
    snippet = re.search(r"```python\n(from p2pstate\.data import .*?)```", README, re.DOTALL)
    assert found is not None
    assert snippet is not None
    assert main(shlex.split(found.group(1))) == 0
    names: dict[str, Any] = {"torch": torch, "rank": 1, "world_size": 2}
    exec(snippet.group(1), names)
    assert [batch.shape for batch in names["loader"]] == [(8, 1025)]
