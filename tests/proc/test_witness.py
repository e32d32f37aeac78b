"""`p2prun witness` as a process, beside members of a run: its vote decides, and it ends with the run's verdict."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rendezvous_cluster import ROOT, cluster, in_view

from p2pstate.cli import p2prun
from p2pstate.errors import EXIT_CONFIG
from ports import free_ports

SIZES = {"num_nodes_min": 1, "num_nodes_max": 2, "num_witnesses_expected": 1}


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def start_witness(contact: str, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "p2pstate.cli", "witness", "--run-id", "test", "--nnodes", "1:2", "--name", "w"]
    command += ["--witnesses", "1", "--contacts", contact, "--preset", "local"]
    with log.open("wb") as file:
        return subprocess.Popen(command, stderr=file, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_survivor_of_two_goes_on_with_the_witness_when_the_other_falls_silent(address: str, tmp_path: Path) -> None:
    log = tmp_path / "witness.log"
    with cluster(**SIZES) as running:
        witness = start_witness(address, log)
        try:
            a = running.start("a", bind=address, contacts=[address])
            b = running.start("b", bind="127.0.0.1:0", contacts=[address])
            running.wait(lambda: in_view(a, "abw") and in_view(b, "abw"), "a view of a, b and the witness")
            b.signal(signal.SIGSTOP)
            running.wait(lambda: in_view(a, "aw"), "a view without the silent node")
            a.command("declare", 77, "the end")
            assert witness.wait(15) == 77
        finally:
            witness.kill()
            witness.wait(10)
    assert "the run has ended: the end" in log.read_text()


def test_witness_that_is_asked_to_end_leaves_and_the_run_goes_on(address: str, tmp_path: Path) -> None:
    with cluster(**SIZES) as running:
        witness = start_witness(address, tmp_path / "witness.log")
        try:
            a = running.start("a", bind=address, contacts=[address])
            b = running.start("b", bind="127.0.0.1:0", contacts=[address])
            running.wait(lambda: in_view(a, "abw") and in_view(b, "abw"), "a view of a, b and the witness")
            witness.send_signal(signal.SIGTERM)
            assert witness.wait(15) == 128 + signal.SIGTERM
            running.wait(lambda: in_view(a, "ab") and in_view(b, "ab"), "a view without the witness")
        finally:
            witness.kill()
            witness.wait(10)


def test_witness_without_contacts_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert p2prun(["witness", "--nnodes", "2", "--witnesses", "1"]) == EXIT_CONFIG
    assert "--contacts is missing" in capsys.readouterr().err
