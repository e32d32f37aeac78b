"""The plug-in of torch beside a script's own file `rendezvous.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pstate.autoload import ENV_AGENT
from rendezvous import autoload

ROOT = str(Path(__file__).resolve().parents[2])


@pytest.mark.parametrize("in_worker", [False, True])
def test_file_that_hides_the_package_is_left_alone_or_named_and_importing_torch_goes_on(
    tmp_path: Path, in_worker: bool
) -> None:
    (tmp_path / "rendezvous.py").write_text("print('run')\n")
    script = tmp_path / "train.py"
    script.write_text("from p2pstate.autoload import autoload\nautoload()\nprint('goes on')\n")
    environ = {**os.environ, "PYTHONPATH": ROOT} | ({ENV_AGENT: "/nowhere"} if in_worker else {})
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == (["run", "goes on"] if in_worker else ["goes on"])
    assert (f"Is {tmp_path / 'rendezvous.py'} yours?" in done.stderr) is in_worker


def test_variable_is_the_one_that_rendezvous_sets() -> None:
    assert ENV_AGENT == autoload.ENV_AGENT
