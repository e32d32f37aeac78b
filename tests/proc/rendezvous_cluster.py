"""Starts and watches members (rendezvous_member.py) as real processes on loopback. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ports import free_ports

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """One member process; `events` grows as `pump` reads."""

    def __init__(self, arguments: dict[str, Any], prefix: Sequence[str] = ()) -> None:
        self.name = arguments["name"]
        self.events: list[dict[str, Any]] = []
        self._rest = b""
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, str(Path(__file__).with_name("rendezvous_member.py")), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def command(self, *words: Any) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(list(words)).encode() + b"\n")
        self.popen.stdin.flush()

    def signal(self, number: int) -> float:
        self.popen.send_signal(number)
        return time.monotonic()

    def read(self) -> None:
        assert self.popen.stdout is not None
        *lines, self._rest = (self._rest + os.read(self.popen.stdout.fileno(), 65536)).split(b"\n")
        self.events += [json.loads(line) for line in lines]

    def find(self, event: str, /, **fields: Any) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]


class Cluster:
    def __init__(self, **defaults: Any) -> None:
        self.defaults = {"run_id": "test", "preset": "local", "first_view_last_call_s": 20.0, **defaults}
        self.processes: list[Process] = []

    def start(self, name: str, prefix: Sequence[str] = (), **arguments: Any) -> Process:
        """`prefix`: words before the command, as Namespaces.prefix gives them."""
        process = Process({**self.defaults, "name": name, **arguments}, prefix)
        self.processes.append(process)
        return process

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = 15.0) -> None:
        """Read events until `condition` holds; AssertionError with everything seen if it does not in time."""
        until_s = time.monotonic() + timeout_s
        while not condition():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                seen = "\n".join(f"{p.name} {json.dumps(e)}" for p in self.processes for e in p.events)
                raise AssertionError(f"{what} did not happen within {timeout_s} s; events:\n{seen}")
            self._pump(min(left_s, 0.5))

    def _pump(self, timeout_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            for process in self.processes:
                if process.popen.stdout is not None and not process.popen.stdout.closed:
                    selector.register(process.popen.stdout, selectors.EVENT_READ, process)
            for key, _ in selector.select(timeout_s):
                before = len(key.data.events)
                key.data.read()
                if len(key.data.events) == before and key.data.popen.poll() is not None:
                    key.data.popen.stdout.close()

    def close(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGCONT)
                process.popen.kill()
            process.popen.wait(10)
            for stream in (process.popen.stdin, process.popen.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


@contextlib.contextmanager
def cluster(**defaults: Any) -> Iterator[Cluster]:
    running = Cluster(**defaults)
    try:
        yield running
    finally:
        running.close()


def start_three(running: Cluster, **more: Any) -> list[Process]:
    """a, b and c on known ports, all listed as contacts; returns when all are in a view that holds all three."""
    ports = free_ports(3)
    contacts = [f"127.0.0.1:{port}" for port in ports]
    processes = [
        running.start(name, bind=address, contacts=contacts, **more)
        for name, address in zip("abc", contacts, strict=True)
    ]
    running.wait(lambda: all(in_view(process, "abc") for process in processes), "a view of a, b and c")
    return processes


def in_view(process: Process, names: str) -> bool:
    """Is the newest view of `process` made of exactly these one-letter members?"""
    views = process.find("view")
    return bool(views) and sorted(name for group in views[-1]["members"] for name in group) == sorted(names)
