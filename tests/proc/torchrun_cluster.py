"""Stock torchruns on loopback, each a node of its own. Every wait has a deadline.

No TCPStore can be made in any of their processes: its constructor ends the process with status 66.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
from waiting import wait_until

from ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

out = Path(sys.argv[1])
dist.init_process_group("gloo")
me = dict(node=os.environ["P2PSTATE_NAME"], rank=dist.get_rank(), world=dist.get_world_size(), pid=os.getpid())
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with open(out / f"{os.getpid()}.jsonl", "w") as file:
    for step in range(10**6):
        stop = torch.tensor(float((out / "stop").exists()))
        dist.all_reduce(stop)
        if stop:
            break
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps(me | {"step": step}), file=file, flush=True)
        if (out / "fail").exists():
            raise ValueError("the script fails on purpose")
        time.sleep(0.05)
dist.destroy_process_group()
"""
GUARD = """
import os, sys
def forbid():
    from torch._C._distributed_c10d import TCPStore
    def refuse(*args, **kwargs):
        print("A TCPSTORE WAS MADE", file=sys.stderr, flush=True)
        os._exit(66)
    TCPStore.__init__ = refuse
"""


def declare_entry_points(folder: Path) -> None:
    """What pyproject.toml declares, as an installed distribution would, and the guard; for PYTHONPATH."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for name, groups in {"p2pstate": declared, "guard": {"torch.backends": {"guard": "tcpstore_guard:forbid"}}}.items():
        info = folder / f"{name}-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in table.items()) for group, table in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
    (folder / "tcpstore_guard.py").write_text(GUARD)


class Torchruns:
    """Nodes by name; `lines` are what the workers of all nodes wrote, newest process last."""

    def __init__(self, folder: Path, nnodes: str, *options: str, script: Sequence[str] = ()) -> None:
        """``script``: with its arguments; the default is one that trains until `stop`, and does not know p2pstate."""
        self.folder = folder
        self._script = list(script) or [str(folder / "script.py"), str(folder / "out")]
        self._options = ["--nnodes", nnodes, *options]
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.endpoint = ",".join(f"127.0.0.1:{port}" for port in free_ports(3))
        (folder / "out").mkdir()
        (folder / "script.py").write_text(SCRIPT)
        (folder / "path").mkdir()
        declare_entry_points(folder / "path")

    def command(self, options: Sequence[str]) -> list[str]:
        """What starts a node, without the script."""
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=p2p", "--rdzv-id", self.folder.name]
        return [*command, "--rdzv-endpoint", self.endpoint, *self._options, *options]

    def start(self, name: str, *options: str, **environ: str) -> None:
        command = self.command(options)
        path = os.pathsep.join([str(ROOT), str(self.folder / "path")])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "P2PSTATE_PRESET": "local"}
        with open(self.folder / f"{name}.log", "ab") as log:
            self.nodes[name] = subprocess.Popen(
                [*command, *self._script],
                stdout=log,
                stderr=log,
                env={**env, "P2PSTATE_NAME": name, **environ},
                start_new_session=True,
            )

    def lines(self) -> list[dict[str, object]]:
        files = sorted((self.folder / "out").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
        texts = [line for path in files for line in path.read_text().splitlines() if line.endswith("}")]
        return [json.loads(text) for text in texts]

    def training(self, names: str) -> Callable[[], bool]:
        """Have all of these one-letter nodes, and no others, just made steps together?"""

        def holds() -> bool:
            newest: dict[object, dict[str, object]] = {line["node"]: line for line in self.lines()}
            mine = [newest.get(name, {}) for name in names]
            return all(line.get("world") == len(names) and int(str(line["step"])) > 2 for line in mine) and all(
                psutil.pid_exists(int(str(line["pid"]))) for line in mine
            )

        return holds

    def worker(self, name: str) -> int:
        return next(int(str(line["pid"])) for line in reversed(self.lines()) if line["node"] == name)

    def agent(self, name: str) -> int:
        children = psutil.Process(self.nodes[name].pid).children()
        return next(child.pid for child in children if "rendezvous.agent" in child.cmdline())

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
        wait_until(condition, what, timeout_s, [self.folder / f"{name}.log" for name in self.nodes])

    def codes(self, names: str, timeout_s: float = 60.0) -> list[int | None]:
        self.wait(lambda: all(self.nodes[n].poll() is not None for n in names), f"the end of {names}", timeout_s)
        return [self.nodes[name].returncode for name in names]

    def stop(self) -> None:
        (self.folder / "out" / "stop").touch()

    def close(self) -> None:
        for node in self.nodes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(node.pid).children(recursive=True):
                    child.kill()
            node.kill()
            node.wait(10)


@contextlib.contextmanager
def torchruns(folder: Path, nnodes: str, *options: str, script: Sequence[str] = ()) -> Iterator[Torchruns]:
    running = Torchruns(folder, nnodes, *options, script=script)
    try:
        yield running
        assert all("A TCPSTORE WAS MADE" not in running.log(name) for name in running.nodes)
    finally:
        running.close()


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
