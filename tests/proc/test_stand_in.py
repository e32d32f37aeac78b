"""p2pstate-python: what torchrun starts in place of a python, and the process behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from p2pstate.worker import stand_in
from rendezvous.autoload import ENV_AGENT

SCRIPT = """
import os, signal, sys, time
import torch.distributed
print(os.getpid(), os.getppid(), os.getcwd(), os.environ["COLOUR"], sys.argv[1:], __name__, flush=True)
print(sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers["env"].__module__, sys.stdin.readline())
what = sys.argv[1]
if what == "exit":
    sys.exit(3)
if what == "raise":
    raise KeyError("of the script")
if what == "die":
    os.kill(os.getpid(), signal.SIGSEGV)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("waits", flush=True)
time.sleep(60)
"""


class StandIn:
    def __init__(self, folder: Path, agent: str, *arguments: str) -> None:
        (folder / "script.py").write_text(SCRIPT)
        command = [sys.executable, "-c", "from p2pstate.worker.stand_in import main; main()", "-u", "script.py"]
        self.process = subprocess.Popen(
            [*command, *arguments],
            cwd=folder,
            env={**os.environ, ENV_AGENT: agent, "COLOUR": "red"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("a line\n")
        self.process.stdin.flush()
        pid, parent, *self.said = self.process.stdout.readline().split(maxsplit=2)
        self.pid, self.parent = int(pid), int(parent)

    def end(self) -> tuple[int, str, str]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return self.process.wait(60), self.process.stdout.read(), self.process.stderr.read()


@pytest.fixture
def agent(fork_server: dict[str, str]) -> str:
    """Beside which a process waits to be forked."""
    name = fork_server["P2PSTATE_FORKSERVER"].removeprefix("@").removesuffix("-python")
    assert stand_in.address(name) == fork_server["P2PSTATE_FORKSERVER"]
    return name


@pytest.mark.parametrize(("what", "code"), [("exit", 3), ("raise", 1), ("die", -signal.SIGSEGV)])
def test_script_runs_in_a_forked_process_and_its_end_is_told(tmp_path: Path, agent: str, what: str, code: int) -> None:
    started = StandIn(tmp_path, agent, what, "--more")
    assert started.pid != started.process.pid != started.parent
    assert started.said == [f"{tmp_path} red ['{what}', '--more'] __main__\n"]
    found, out, err = started.end()
    assert (found, out) == (code, "rendezvous.autoload a line\n\n")
    assert ("Traceback" in err, "runpy" in err) == (what == "raise", False)


def test_signals_reach_the_script_and_it_does_not_outlive_what_stands_in_for_it(tmp_path: Path, agent: str) -> None:
    for number, code in ((signal.SIGTERM, 7), (signal.SIGKILL, -signal.SIGKILL)):
        started = StandIn(tmp_path, agent, "wait")
        assert started.process.stdout is not None
        while started.process.stdout.readline() != "waits\n":
            pass
        started.process.send_signal(number)
        assert started.process.wait(60) == code
        until_s = time.monotonic() + 30
        while psutil.pid_exists(started.pid) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert not psutil.pid_exists(started.pid)


@pytest.mark.slow
def test_python_itself_starts_where_nothing_can_be_forked(tmp_path: Path) -> None:
    started = StandIn(tmp_path, "p2pstate-nobody", "exit")
    assert (started.pid, started.parent) == (started.process.pid, os.getpid())
    assert started.end()[0] == 3
