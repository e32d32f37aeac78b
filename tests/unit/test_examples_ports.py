"""Ports of runs on one machine: nobody else gets them, neither another process nor an outgoing connection."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import ports
from ports import free_ports

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_ports_are_given_once_and_below_those_of_outgoing_connections() -> None:
    found = free_ports(ports.BLOCK + 1)
    assert len(set(found)) == len(found)
    assert all(ports.FIRST <= port < ports.LAST for port in found)


def test_process_beside_this_one_gets_ports_of_other_blocks() -> None:
    program = "import ports; print(*ports.free_ports(3)); input()"
    mine = {port // ports.BLOCK for port in free_ports(3)}
    for _ in range(3):
        output = subprocess.run(
            [sys.executable, "-c", program], cwd=EXAMPLES, input="\n", capture_output=True, text=True, check=True
        ).stdout
        assert not {int(port) // ports.BLOCK for port in output.split()} & mine


def test_port_that_somebody_listens_at_is_left_out() -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port + 1)):
        assert free_ports(1) != [port + 1]
