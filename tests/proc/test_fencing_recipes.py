"""The fencing commands in examples/fencing, with stand-ins for scontrol and kubectl that say what the real ones say."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "fencing"
STARTED_US = 1_767_225_600_000_000  # 2026-01-01T00:00:00Z
UP = "NodeName=n7 Arch=x86_64 State={state} BootTime={booted} SlurmdStartTime=2025-12-01T10:00:00"


def ask(recipe: str, tool: str, script: str, folder: Path) -> tuple[int, str]:
    stand_in = folder / tool
    stand_in.write_text(f"#!/bin/sh\n{script}\n")
    stand_in.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "P2PSTATE_FENCE_STARTED_US": str(STARTED_US), "TZ": "UTC"}
    command = [str(RECIPES / recipe), "n7", "10.0.0.7:7000"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("node", "code"),
    [
        (UP.format(state="DOWN*+NOT_RESPONDING", booted="2025-12-31T10:00:00"), 1),
        (UP.format(state="ALLOCATED", booted="2025-12-31T10:00:00"), 1),
        (UP.format(state="DOWN", booted="2026-01-01T00:10:00"), 0),
        (UP.format(state="IDLE+CLOUD+POWERED_DOWN", booted="None"), 0),
        (UP.format(state="DOWN", booted="None"), 2),
    ],
)
def test_slurm_recipe_knows_a_host_that_was_switched_off_or_booted_since(node: str, code: int, tmp_path: Path) -> None:
    script = f'test "$*" = "--oneliner show node n7" || exit 9\necho "{node}"'
    assert ask("slurm.sh", "scontrol", script, tmp_path)[0] == code


@pytest.mark.parametrize(
    ("pod", "code"),
    [
        ("2025-12-31T10:00:00Z Running", 1),
        ("2025-12-31T10:00:00Z Unknown", 1),
        ("2025-12-31T10:00:00Z Failed", 0),
        ("2026-01-01T00:10:00Z Running", 0),
        ("", 0),
    ],
)
def test_kubernetes_recipe_knows_a_pod_that_is_no_more(pod: str, code: int, tmp_path: Path) -> None:
    script = f'test "$1 $2 $3 $4" = "get pod n7 --ignore-not-found" || exit 9\nprintf "%s" "{pod}"'
    assert ask("kubernetes.sh", "kubectl", script, tmp_path)[0] == code


@pytest.mark.parametrize(("recipe", "tool"), [("slurm.sh", "scontrol"), ("kubernetes.sh", "kubectl")])
def test_recipe_knows_nothing_when_the_scheduler_does_not_answer(recipe: str, tool: str, tmp_path: Path) -> None:
    assert ask(recipe, tool, "echo unable to connect >&2; exit 1", tmp_path)[0] == 2
