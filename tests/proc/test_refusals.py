"""Bad input: wrong options and failing scripts end the run with one sentence that says why."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from observed_runs import DEADLINE_S, ROOT, launch, script

GOOD = """
    import torch, torch.distributed as dist, p2pstate
    dist.init_process_group({backend})
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    class Odd:
        def state_dict(self): return {{"inner": {{"callback": print}}}}
        def load_state_dict(self, state): pass
    p2pstate.Replicator(model, optimizer{more})
"""


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--nnodes", "2", "--contacts", "127.0.0.1"], 78, "contact '127.0.0.1' is not"),
        (["--nnodes", "2", "--contacts", "127.0.0.1:1", "--join-timeout", "2"], 78, "check --contacts (127.0.0.1:1)"),
        (["--nnodes", "2"], 78, "--contacts is missing"),
        (["--nnodes", "3:2"], 78, "MIN must not be above MAX"),
        (["--nnodes", "x"], 78, "give a number"),
        (["--nproc-per-node", "0"], 78, "at least one worker"),
        (["--bind", "10.255.255.1:0"], 78, "--key-file"),
        (["--key-file", "/dev/null/none"], 78, "/dev/null/none"),
    ],
)
def test_wrong_option_is_refused_with_one_sentence(
    options: list[str], code: int, sentence: str, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    process = launch(tmp_path, fork_server, *options, "--name", "n", script(tmp_path, "pass"))
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, stderr
    assert sentence in stderr
    assert "Traceback" not in stderr


def test_taken_port_is_refused_with_one_sentence(tmp_path: Path, fork_server: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = launch(tmp_path, fork_server, "--bind", f"127.0.0.1:{port}", script(tmp_path, "pass"))
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 78
    assert f"127.0.0.1:{port} is taken" in stderr
    assert "Traceback" not in stderr


def test_missing_script_is_refused_before_anything_starts(tmp_path: Path, fork_server: dict[str, str]) -> None:
    process = launch(tmp_path, fork_server, "nowhere.py")
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 78
    assert "there is no script 'nowhere.py'" in stderr


def test_any_usual_backend_gives_groups_that_can_be_repaired(tmp_path: Path, fork_server: dict[str, str]) -> None:
    body = """
        import torch, torch.distributed as dist
        from p2pstate.groups.group import P2PGroup
        for backend in (None, "gloo", "nccl", "cpu:gloo,cuda:nccl", "p2p"):
            dist.init_process_group(backend)
            assert isinstance(dist.group.WORLD, P2PGroup), backend
            x = torch.ones(1)
            dist.all_reduce(x)
            assert x.item() == 2, backend
            dist.destroy_process_group()
    """
    process = launch(tmp_path, fork_server, "--nproc-per-node", "2", script(tmp_path, body))
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, stderr


@pytest.mark.parametrize(
    ("body", "code", "sentence"),
    [
        (GOOD.format(backend='"mpi"', more=""), 78, "process group backend 'mpi' cannot be repaired"),
        (GOOD.format(backend="", more=", Odd()"), 1, "odd0/inner/callback"),
        (GOOD.format(backend="", more=", data=[1, 2]"), 1, "data= of type list has no state_dict"),
        (GOOD.format(backend="", more="").replace("model, optimizer", "model"), 1, "at least one optimizer"),
        ("import p2pstate, torch\np2pstate.Replicator(torch.nn.Linear(1, 1))", 78, "rank 0 cannot take part: "),
        ("raise ZeroDivisionError('mine')", 1, "ZeroDivisionError: mine"),
        ("import sys; sys.exit(5)", 5, "sys.exit(5)"),
    ],
)
def test_failing_script_ends_the_run_with_its_reason(
    body: str, code: int, sentence: str, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    process = launch(tmp_path, fork_server, script(tmp_path, body))
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, stderr
    assert sentence in stderr


def test_replicator_outside_of_a_launcher_says_what_to_change(tmp_path: Path) -> None:
    body = """
        import torch, torch.distributed as dist, p2pstate
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.Linear(2, 2)
        p2pstate.Replicator(model, torch.optim.SGD(model.parameters(), lr=0.1))
    """
    done = subprocess.run(
        [sys.executable, script(tmp_path, body)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "start it as `p2prun --nproc-per-node N script.py`" in done.stderr
