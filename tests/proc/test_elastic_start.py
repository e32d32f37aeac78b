"""p2prun --nnodes MIN:MAX: a run begins with as many nodes as there are after a last call, and keeps that number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rendezvous_cluster import ROOT
from waiting import wait_until

from ports import free_ports

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist, p2pstate

out = Path(sys.argv[1])
p2pstate.init_process_group()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = p2pstate.Replicator(model, optimizer)

def train_step():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    stop = torch.tensor(float((out / "stop").exists()))
    dist.all_reduce(stop)
    time.sleep(0.05)
    return bool(stop)

with open(out / f"{os.environ['P2PSTATE_NODE']}.worlds", "a") as file:
    for _, stop in state.run(train_step):
        print(dist.get_world_size(), file=file, flush=True)
        if stop:
            break
"""


class Nodes:
    def __init__(self, folder: Path, environ: dict[str, str], *options: str) -> None:
        self.folder = folder
        self.contacts = [f"127.0.0.1:{port}" for port in free_ports(3)]
        self._options = options
        self._environ = {**os.environ, **environ, "PYTHONPATH": str(ROOT)}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "script.py").write_text(SCRIPT)

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "p2pstate.cli", *self._options, "--contacts", ",".join(self.contacts)]
        command += ["--bind", self.contacts[len(self.running)], "--name", name, "--preset", "local"]
        command += ["--run-dir", str(self.folder), str(self.folder / "script.py"), str(self.folder)]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ
            )

    def worlds(self, name: str) -> list[str]:
        path = self.folder / f"{name}.worlds"
        return path.read_text().split() if path.exists() else []

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
        wait_until(condition, what, timeout_s, [self.folder / f"{name}.log" for name in self.running])

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait(10)


@pytest.fixture
def nodes(tmp_path: Path, fork_server: dict[str, str]) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(*options: str) -> Nodes:
        made.append(Nodes(tmp_path, fork_server, *options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.slow
def test_run_begins_with_fewer_nodes_than_max_and_keeps_their_number(nodes: Callable[..., Nodes]) -> None:
    run = nodes("--nnodes", "2:3", "--last-call", "2")
    run.start("a")
    run.start("b")
    run.wait(lambda: "last call of 2 s" in run.log("a") + run.log("b"), "the last call")
    run.wait(lambda: len(run.worlds("a")) > 2 and len(run.worlds("b")) > 2, "steps on both nodes")
    run.start("c")
    run.wait(lambda: "training on a, b, spare c" in run.log("a"), "the late node as a spare")
    run.running["a"].send_signal(signal.SIGKILL)
    run.wait(lambda: "training on c, b (" in run.log("b"), "the spare in the place of the dead node")
    run.wait(lambda: len(run.worlds("c")) > 2, "steps on the spare")
    (run.folder / "stop").touch()
    run.wait(lambda: all(run.running[name].poll() is not None for name in "bc"), "the end")
    assert [run.running[name].returncode for name in "bc"] == [0, 0]
    assert {world for name in "abc" for world in run.worlds(name)} == {"2"}


def test_run_without_a_majority_of_max_does_not_begin(nodes: Callable[..., Nodes]) -> None:
    run = nodes("--nnodes", "1:4", "--last-call", "0", "--join-timeout", "4")
    run.start("a")
    run.start("b")
    run.wait(lambda: all(process.poll() is not None for process in run.running.values()), "the end")
    assert {process.returncode for process in run.running.values()} == {78}
    assert "3 of 4 are needed (--nnodes' MAX" in run.log("a") + run.log("b")
    assert not run.worlds("a") + run.worlds("b")
