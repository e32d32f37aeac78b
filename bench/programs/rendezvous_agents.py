"""Agents as processes: from launch to the first view, and from a death to the next one, ours beside torchrun's c10d.

In: how many agents, how the last one dies. Out: seconds. Killed: SIGKILL. Silent: its network namespace is cut where
namespaces can be had (root), else SIGSTOP; which one is printed. torchrun's agents ask for the next rendezvous as soon
as the signal is sent, which is earlier than their workers' errors make them.
"""

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from namespaces import Namespaces
from ports import free_ports

HERE = Path(__file__).resolve().parent
DEADLINE_S = 120.0
KEY = secrets.token_hex(32)


class Agent:
    """One process of rendezvous_member.py and what it has said."""

    def __init__(self, arguments: dict[str, Any], prefix: Sequence[str] = ()) -> None:
        self.events: list[dict[str, Any]] = []
        self._rest = b""
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-P", str(HERE / "rendezvous_member.py"), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        )

    def read(self) -> None:
        assert self.process.stdout is not None
        *lines, self._rest = (self._rest + os.read(self.process.stdout.fileno(), 1 << 16)).split(b"\n")
        self.events += [json.loads(line) for line in lines]

    def times(self, event: str) -> list[float]:
        return [each["t"] for each in self.events if each["event"] == event]

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Agents:
    def __init__(self) -> None:
        self.all: list[Agent] = []

    def wait(self, condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        until_s = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > until_s:
                raise RuntimeError(f"{what} did not come within {deadline_s:g} s")
            with selectors.DefaultSelector() as selector:
                for agent in self.all:
                    if agent.process.poll() is None and agent.process.stdout is not None:
                        selector.register(agent.process.stdout, selectors.EVENT_READ, agent)
                for key, _ in selector.select(0.2):
                    key.data.read()


@contextlib.contextmanager
def agents() -> Iterator[Agents]:
    running = Agents()
    try:
        yield running
    finally:
        for agent in running.all:
            agent.close()


def ours(count: int, death: str, preset: str = "default") -> dict[str, float]:
    """{"view_s", "replace_s"}; `death`: "killed", "silent", or "cut" (in namespaces)."""
    with contextlib.ExitStack() as stack:
        network = None
        hosts = ["127.0.0.1"] * count
        if death == "cut":
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "scratch"
            network = Namespaces(count, scratch)
            stack.callback(network.close)
            hosts = network.addresses
        running = stack.enter_context(agents())
        binds = [f"{host}:{port}" for host, port in zip(hosts, free_ports(count), strict=True)]
        common = {"kind": "ours", "run_id": "bench", "contacts": binds[:3], "preset": preset, "key": KEY}
        common |= {"num_nodes_min": count // 2 or 1, "num_nodes_max": count}
        names = [f"n{index}" for index in range(count)]
        for index, (name, bind) in enumerate(zip(names, binds, strict=True)):
            prefix = network.prefix(index) if network else ()
            running.all.append(Agent({**common, "name": name, "bind": bind}, prefix))
        everybody, rest = sorted(names), sorted(names[:-1])
        running.wait(lambda: all(_views(agent)[-1:] == [everybody] for agent in running.all), "the first view")
        view_s = max(agent.times("view")[-1] for agent in running.all)
        began_s = max(agent.times("started")[0] for agent in running.all)
        time.sleep(1.0)
        victim, survivors = running.all[-1], running.all[:-1]
        died_s = time.monotonic()
        if network:
            network.cut(count - 1)
        else:
            victim.process.send_signal(signal.SIGKILL if death == "killed" else signal.SIGSTOP)
        running.wait(lambda: all(_views(agent)[-1] == rest for agent in survivors), "the next view")
        return {"view_s": view_s - began_s, "replace_s": max(a.times("view")[-1] for a in survivors) - died_s}


def _views(agent: Agent) -> list[list[str]]:
    return [event["members"] for event in agent.events if event["event"] == "view"]


def c10d(count: int) -> dict[str, float]:
    """The same with torchrun's own rendezvous and its defaults; the last agent is killed."""
    (port,) = free_ports(1)
    common = {"endpoint": f"127.0.0.1:{port}", "run_id": "bench", "min_nodes": count - 1, "max_nodes": count}
    with agents() as running:
        for index in range(count):
            parameters = {**common, "is_host": index == 0, "local_addr": "127.0.0.1"}
            running.all.append(Agent({"kind": "c10d", "parameters": parameters}))
        running.wait(lambda: all(len(agent.times("view")) == 1 for agent in running.all), "torchrun's first rendezvous")
        view_s = max(agent.times("view")[0] for agent in running.all)
        began_s = max(agent.times("started")[0] for agent in running.all)
        time.sleep(1.0)
        died_s = time.monotonic()
        running.all[-1].process.kill()
        for agent in running.all[:-1]:
            agent.say("next\n")
        survivors = running.all[:-1]
        running.wait(lambda: all(len(agent.times("view")) == 2 for agent in survivors), "torchrun's next rendezvous")
        return {"view_s": view_s - began_s, "replace_s": max(a.times("view")[1] for a in survivors) - died_s}


def false_suspicions(count: int, preset: str, seconds: float) -> dict[str, int]:
    """Suspicions and deaths among agents of whom none dies, while two idle loops run on every core."""
    with agents() as running:
        binds = [f"127.0.0.1:{port}" for port in free_ports(count)]
        common = {"kind": "ours", "run_id": "bench", "contacts": binds[:3], "preset": preset, "key": KEY}
        common |= {"num_nodes_min": count, "num_nodes_max": count}
        for index, bind in enumerate(binds):
            running.all.append(Agent({**common, "name": f"n{index}", "bind": bind}))
        running.wait(lambda: all(_views(agent) for agent in running.all), "the first view")
        spin = "while True: pass"
        burners = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2 * (os.cpu_count() or 1))]
        try:
            until_s = time.monotonic() + seconds
            running.wait(lambda: time.monotonic() >= until_s, "the end", seconds + 60.0)
        finally:
            for burner in burners:
                burner.kill()
                burner.wait(10)
        kinds = [event["kind"] for agent in running.all for event in agent.events if event["event"] == "member"]
        return {"suspected": kinds.count("suspect"), "declared_dead": kinds.count("dead")}
