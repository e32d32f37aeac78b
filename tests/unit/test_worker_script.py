"""script: a user sees of an exception what python would show, whoever ran the script for him."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2pstate.worker import main, script

FAILING = "def inner():\n    raise ArithmeticError('of the user')\ninner()\n"


def files_in(text: str) -> list[str]:
    return re.findall(r'File "([^"]+)"', text)


@pytest.mark.parametrize("of_torchrun", [False, True], ids=["p2prun", "torchrun"])
def test_traceback_begins_in_the_script(
    of_torchrun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    if of_torchrun:
        monkeypatch.setattr(script, "run_exit_handlers", lambda: None)  # this process goes on
        code = script.python_main([str(path)])
    else:
        context = SimpleNamespace(failing=False)
        code, _ = main._run_script(str(path), [], False, context)  # type: ignore[arg-type]
        assert context.failing
    said = capsys.readouterr().err
    assert code == 1
    assert files_in(said) == [str(path)] * 2, said
    assert "ArithmeticError: of the user" in said
