"""Several nodes on one machine: a p2prun per node, started, watched, killed and cleaned up after.

In: a script and its arguments, names of nodes. Out: processes, their event files, and at the end a list of whatever
they left behind. Each node has its own port on the loopback interface, or, in namespaces, its own network, shared
memory and scratch directory. Every wait here has a deadline.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from namespaces import Namespaces
from ports import free_ports
from rendezvous.keys import make_key_file

STOP_S = 10.0  # how long agents may take to end when asked
MARK = "EXAMPLE_RUN_FOLDER"  # in the environment of every process of a run, to find those that are left
SETTLE_S = 5.0  # how long processes and sockets may take to vanish


def p2prun_command() -> list[str]:
    """The command of this interpreter's environment, whatever PATH says."""
    installed = Path(sys.executable).with_name("p2prun")
    return (
        [str(installed)]
        if installed.exists()
        else [sys.executable, "-c", "import sys; from p2pstate.cli import p2prun; sys.exit(p2prun())"]
    )


class EventReader:
    """Follows the event files of a run; `new` returns what was appended since the last call, in order of time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in sorted(self._folder.glob("events-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]  # a line that is being written comes next time
            if whole:
                self._offsets[path] = self._offsets.get(path, 0) + len(whole) + 1
                found += [json.loads(line) for line in whole.splitlines()]
        return sorted(found, key=lambda event: event["t"])


@dataclass(slots=True)
class Node:
    name: str
    address: str  # host:port
    process: subprocess.Popen[bytes]
    command: Sequence[str]
    killed: bool = False


class Cluster:
    """Use as a context manager: leaving it ends every process that was started."""

    def __init__(
        self,
        folder: Path,
        script: Sequence[str],
        *,
        num_training: int,
        num_spares: int,
        num_workers: int,
        environ: Mapping[str, str],
        namespaces: bool = False,
        num_later: int = 0,
        racks: Sequence[str] = (),
    ) -> None:
        """``num_later``: in namespaces, how many nodes :meth:`add_node` can add."""
        folder.mkdir(parents=True)
        self.folder = folder
        self.events = EventReader(folder)
        self._script = script
        self._racks = racks  # of the first nodes
        self._environ = {**os.environ, **environ, MARK: str(folder)}
        self._shared_memory = shared_memory()
        self._options = [
            *("--nnodes", str(num_training), "--nproc-per-node", str(num_workers), "--spares", str(num_spares)),
            *("--run-id", folder.name, "--run-dir", str(folder), "--quiet"),
        ]
        count = num_training + num_spares
        self._namespaces = Namespaces(count + num_later, folder / "scratch") if namespaces else None
        hosts = ["127.0.0.1"] * count
        if self._namespaces is not None:
            hosts = self._namespaces.addresses[:count]
            key = folder / "run.key"
            make_key_file(str(key))
            self._options += ["--key-file", str(key)]  # not on loopback: the control plane is encrypted
        self.nodes: dict[str, Node] = {}
        self._finished_at: float | None = None
        addresses = [f"{host}:{port}" for host, port in zip(hosts, free_ports(count), strict=True)]
        for address in addresses:
            self._start(address, addresses)

    def add_node(self) -> str:
        """Start one more node, which asks those that run now; returns its name."""
        (port,) = free_ports(1)
        host = "127.0.0.1" if self._namespaces is None else self._namespaces.addresses[len(self.nodes)]
        return self._start(f"{host}:{port}", [node.address for node in self.running()])

    def _start(self, address: str, contacts: Sequence[str]) -> str:
        index = len(self.nodes)
        name = f"node{index}"
        prefix = self._namespaces.prefix(index) if self._namespaces is not None else []
        command = [*prefix, *self._command(name, address, contacts), *self._script]
        self.nodes[name] = Node(name, address, self._launch(name, command), command)
        return name

    def _launch(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"agent-{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ)

    def _command(self, name: str, address: str, contacts: Sequence[str]) -> list[str]:
        """What starts the node, without the script. Others than p2prun override it."""
        index = len(self.nodes)
        label = ["--label", f"rack={self._racks[index]}"] if index < len(self._racks) else []
        where = ["--contacts", ",".join(contacts), "--bind", address, "--name", name]
        return [*p2prun_command(), *self._options, *where, *label]

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def running(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.process.poll() is None]

    def wait_end(self, timeout_s: float, *, kills: bool = False) -> None:
        """Wait until no node runs; ``kills``: what the run executes may kill nodes.

        Raises TimeoutError with the ends of the logs.
        """
        until = time.monotonic() + timeout_s
        while self.running():
            if time.monotonic() > until:
                raise TimeoutError(f"the run does not end within {timeout_s:g} s\n{self.log_tails()}")
            time.sleep(0.02)
        for node in self.nodes.values():
            node.killed = node.killed or (kills and node.process.poll() == -signal.SIGKILL)

    def dismiss_late(self) -> None:
        """End nodes that came when the run had finished: they wait for somebody who is not there any more."""
        ended = [node for node in self.nodes.values() if node.process.poll() == 0]
        self._finished_at = self._finished_at or (time.monotonic() if ended else None)
        if self._finished_at is not None and time.monotonic() - self._finished_at > SETTLE_S:
            for node in self.running():
                node.killed = True
                node.process.send_signal(signal.SIGTERM)

    def exit_codes(self) -> dict[str, int | None]:
        """Of the nodes that were not killed from here."""
        return {node.name: node.process.poll() for node in self.nodes.values() if not node.killed}

    def kill_node(self, name: str, *, silent: bool = False) -> float:
        """SIGKILL to a node's agent and everything below it. Returns when.

        Silent (in namespaces only): its network is cut before, as if its power failed; nothing refuses connections.
        """
        node = self.nodes[name]
        agent = psutil.Process(node.process.pid)
        tree = [agent, *agent.children(recursive=True)]  # read before the first dies
        node.killed = True
        killed_at = time.time()
        if silent:
            assert self._namespaces is not None, "only a network of its own can be cut"
            self.cut(name)
        for process in tree:
            signal_quietly(process, signal.SIGKILL)
        node.process.wait(SETTLE_S)
        return killed_at

    def cut(self, name: str) -> None:
        """No packet enters or leaves the node any more. In namespaces only."""
        assert self._namespaces is not None
        self._namespaces.cut(list(self.nodes).index(name))

    def mend(self, name: str) -> None:
        """The end of :meth:`cut`."""
        assert self._namespaces is not None
        self._namespaces.mend(list(self.nodes).index(name))

    def deafen(self, name: str, to: str, *, agents_too: bool) -> None:
        """What node ``to`` sends is lost on its way to the node, or all but what agents say. In namespaces only."""
        assert self._namespaces is not None
        names = list(self.nodes)
        ports = [int(node.address.rpartition(":")[2]) for node in self.nodes.values()]
        self._namespaces.deafen(names.index(name), names.index(to), [] if agents_too else ports)

    def undeafen(self, name: str, to: str) -> None:
        """The end of :meth:`deafen`."""
        assert self._namespaces is not None
        names = list(self.nodes)
        self._namespaces.undeafen(names.index(name), names.index(to))

    def kill_all(self) -> float:
        """SIGKILL to all agents that run and everything below them, at once. Returns when."""
        nodes = self.running()
        agents = [psutil.Process(node.process.pid) for node in nodes]
        tree = [*agents, *(child for agent in agents for child in agent.children(recursive=True))]
        killed_at = time.time()
        for process in tree:
            signal_quietly(process, signal.SIGKILL)
        for node in nodes:
            node.killed = True
            node.process.wait(SETTLE_S)
        return killed_at

    def start_again(self) -> None:
        """Give every node's command once more, when none runs."""
        assert not self.running()
        for index, node in enumerate(self.nodes.values()):
            if self._namespaces is not None:
                self._namespaces.mend(index)
            node.process, node.killed = self._launch(node.name, node.command), False

    def kill_process(self, pid: int) -> float:
        """SIGKILL to one process. Returns when. Raises ProcessLookupError if it has ended already."""
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        return killed_at

    def stop(self) -> None:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for node in self.running():
                node.process.send_signal(sign)
            deadline = time.monotonic() + STOP_S
            while self.running() and time.monotonic() < deadline:
                time.sleep(0.02)
        for process in self._processes_left():
            signal_quietly(process, signal.SIGKILL)
        if self._namespaces is not None:
            self._namespaces.close()

    def leftovers(self) -> list[str]:
        """What is still there of this run after its agents ended and a moment to vanish. Call it before `stop`."""
        deadline = time.monotonic() + SETTLE_S
        while (left := self._look()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _look(self) -> list[str]:
        left = [f"process {process.pid}" for process in self._processes_left()]
        left += [f"a listener on {address}" for address in self._listeners()]
        left += [f"/dev/shm/{name}" for name in sorted(unused(shared_memory() - self._shared_memory))]
        return left

    def _listeners(self) -> list[str]:
        if self._namespaces is not None:
            return [text for index in range(len(self.nodes)) for text in self._namespaces.listeners(index)]
        found = []
        for node in self.nodes.values():
            host, _, port = node.address.rpartition(":")
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    found.append(node.address)
        return found

    def _processes_left(self) -> list[psutil.Process]:
        """Processes that were started with this run's mark in their environment."""
        mark, found = str(self.folder), []
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.environ().get(MARK) == mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def log_tails(self, num_lines: int = 15) -> str:
        """The ends of all logs, for the person who has to find out what went wrong."""
        parts = []
        for path in [*sorted(self.folder.glob("agent-*.log")), *sorted(self.folder.glob("logs/*/*.log"))]:
            lines = path.read_text(errors="replace").splitlines()[-num_lines:]
            if lines:
                parts.append("\n".join([f"--- {path}", *lines]))
        return "\n".join(parts)


def shared_memory() -> set[str]:
    """Names of the segments in /dev/shm; directories are other programs' scratch space."""
    return {entry.name for entry in os.scandir("/dev/shm") if not entry.is_dir(follow_symlinks=False)}


def unused(segments: set[str]) -> set[str]:
    """Those of the segments that no process maps or holds open. What others use is not a run's that has ended."""
    used: set[int] = set()  # inodes: a semaphore's maker has mapped it under another name
    for process in psutil.process_iter() if segments else ():
        with contextlib.suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            used |= {int(line.split(maxsplit=5)[4]) for line in maps if "/dev/shm/" in line}
            used |= {os.stat(file.path).st_ino for file in process.open_files() if file.path.startswith("/dev/shm/")}
    return {name for name in segments if inode(Path("/dev/shm", name)) not in used | {None}}


def inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def signal_quietly(process: psutil.Process, sign: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(sign)
