"""From a signal to a ready gloo group, and single store operations: an epoch's store beside torch's TCPStore.

In: how many processes. Out: seconds until the last rank has created the group and reduced one number with all others;
operations per second of each kind. Ours as under torchrun: the ranks are other processes than the node's agent, which
runs already. TCPStore as env:// makes it: rank 0 serves it. Processes are forked from one that has imported torch,
gloo uses the loopback interface, so that no name is looked up on either side, and asks for all addresses at once on
both, as it does in our workers.
"""

import contextlib
import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist

from ports import free_ports
from rendezvous.channel import Channel, Message
from rendezvous.config import Config
from rendezvous.local import LocalServer
from rendezvous.node import Node
from rendezvous.store import worker_store
from rendezvous.store_line import ENV_GLOO_ASKS_ONCE, store_reply_message
from rendezvous.types import PassiveApplication, View

TIMEOUT = timedelta(seconds=120)
NUM_CLIENTS = 8
_fork = multiprocessing.get_context("fork")

MakeStore = Callable[[int, int], dist.Store]  # (rank, world size) -> its store


class StoreAgent(PassiveApplication):
    """A node of its own run that serves its store to the processes of this host."""

    def __init__(self, ready: Connection) -> None:
        self._ready = ready
        self.node = Node(Config("bench", "a", "127.0.0.1:0", first_view_last_call_s=0.0), self)
        self._server = LocalServer(self.node, self._on_message, lambda channel: None)

    def _on_message(self, channel: Channel, message: Message, fds: list[int]) -> None:
        number, epoch, op, args = (message[name] for name in ("id", "epoch", "op", "args"))
        reply = lambda answer: self._server.tell(channel, store_reply_message(number, answer))  # noqa: E731
        self.node.store_request(epoch, op, args, message["deadline_s"], reply)

    def on_view(self, view: View) -> None:
        self._ready.send(self._server.address)


def _serve(ready: Connection) -> None:
    StoreAgent(ready).node.run()


def _start(work: Callable[..., None], *args: Any) -> ForkProcess:
    """A process that begins with what this one has imported, which it need not search for garbage (and copy for it)."""
    gc.freeze()
    process = _fork.Process(target=work, args=args, daemon=True)
    process.start()
    return process


@contextlib.contextmanager
def our_stores() -> Iterator[MakeStore]:
    here, there = _fork.Pipe()
    agent = _start(_serve, there)
    try:
        assert here.poll(60), "the agent has no view"
        address = here.recv()
        yield lambda rank, world_size: worker_store(address, 1, "init", TIMEOUT)
    finally:
        agent.kill()
        agent.join(10)


@contextlib.contextmanager
def tcp_stores() -> Iterator[MakeStore]:
    (port,) = free_ports(1)
    yield lambda rank, world_size: dist.TCPStore("127.0.0.1", port, world_size, rank == 0, TIMEOUT, multi_tenant=True)


STORES: dict[str, Callable[[], contextlib.AbstractContextManager[MakeStore]]] = {
    "ours": our_stores,
    "tcpstore": tcp_stores,
}


def _run_all(world_size: int, work: Callable[[int, Connection], None]) -> list[Any]:
    """`work(rank, pipe)` in as many processes; they start together once all are there. -> what each one sent."""
    processes: list[tuple[ForkProcess, Connection]] = []
    try:
        for rank in range(world_size):
            here, there = _fork.Pipe()
            process = _start(work, rank, there)
            there.close()
            processes.append((process, here))
        for _, pipe in processes:
            assert pipe.poll(120), "a process did not start"
            pipe.recv()
        for _, pipe in processes:
            pipe.send("go")
        answers = []
        for _, pipe in processes:
            assert pipe.poll(180), "a process did not get ready"
            answers.append(pipe.recv())
        for _, pipe in processes:
            pipe.send("stop")
        return answers
    finally:
        for process, pipe in processes:
            process.join(5)
            process.kill()
            process.join(5)
            pipe.close()


def init_s(kind: str, world_size: int) -> dict[str, float]:
    """{"total": seconds from the signal until the last rank was ready, "store", "group", "first": medians of parts}."""
    with STORES[kind]() as make_store:

        def work(rank: int, pipe: Connection) -> None:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            os.environ[ENV_GLOO_ASKS_ONCE] = "1"
            torch.set_num_threads(1)
            pipe.send("here")
            pipe.recv()
            times = [time.monotonic()]
            store = make_store(rank, world_size)
            times.append(time.monotonic())
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
            times.append(time.monotonic())
            dist.all_reduce(torch.ones(1))
            times.append(time.monotonic())
            pipe.send(times)
            pipe.recv()
            os._exit(0)

        answers = _run_all(world_size, work)
    parts = {
        name: statistics.median(times[index + 1] - times[index] for times in answers)
        for index, name in enumerate(("store", "group", "first"))
    }
    return {"total": max(times[3] for times in answers) - min(times[0] for times in answers), **parts}


OPERATIONS: dict[str, Callable[[dist.Store, int, int], object]] = {
    "set": lambda store, rank, index: store.set(f"set/{rank}/{index}", b"x" * 64),
    "get": lambda store, rank, index: store.get("get"),
    "add": lambda store, rank, index: store.add("add", 1),
    "compare_set": lambda store, rank, index: store.compare_set(f"compare/{rank}/{index}", "", "x"),
    "check": lambda store, rank, index: store.check(["get"]),
    "multi_get": lambda store, rank, index: store.multi_get(["get"] * 4),
}


def store_ops(kind: str, seconds: float) -> dict[str, dict[str, float]]:
    """{operation: {"per_s": all clients together, "latency_s": median of one}} with NUM_CLIENTS processes at once."""
    with STORES[kind]() as make_store:

        def work(rank: int, pipe: Connection) -> None:
            store = make_store(rank, NUM_CLIENTS)
            store.set("get", b"x" * 64)
            pipe.send("here")
            pipe.recv()
            found = {}
            for name, operation in OPERATIONS.items():
                store.barrier(f"before {name}", NUM_CLIENTS, TIMEOUT)
                took_s: list[float] = []
                began_s = last_s = time.monotonic()
                while last_s - began_s < seconds:
                    operation(store, rank, len(took_s))
                    now = time.monotonic()
                    took_s.append(now - last_s)
                    last_s = now
                found[name] = len(took_s) / (last_s - began_s), statistics.median(took_s)
            pipe.send(found)
            pipe.recv()
            os._exit(0)

        answers = _run_all(NUM_CLIENTS, work)
    return {
        name: {
            "per_s": sum(answer[name][0] for answer in answers),
            "latency_s": statistics.median(answer[name][1] for answer in answers),
        }
        for name in OPERATIONS
    }
