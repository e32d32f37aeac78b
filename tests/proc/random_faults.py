"""Random faults, seeded, in a run of examples/train_gpt.py on two nodes of two workers and a spare node.

In: a seed, kinds of faults, where the nodes are (loopback, where agents do some faults on request, or namespaces, where
the network is cut). Out: the folder of the outcome and what was injected. Which faults come, and when, follows from the
seed and from what is seen of the run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster import Cluster
from rendezvous.config import Config
from rendezvous.operator import Line
from rendezvous.zmq_transport import ZmqTransport

TRAIN = str(Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py")
SMALL = ("--num-layers", "2", "--width", "64", "--context", "32", "--batch", "2")
PARALLELISMS = {"fsdp2": (), "ddp": ("--ddp", "--batch-norm")}
NUM_STEPS, NUM_FAULTS, NUM_RANKS = 120, 8, 4
PROCESSES = ("worker", "worker", "pair", "node", "segv", "term", "stop")
ON_LOOPBACK = (*PROCESSES, "phase", "damage")
SIGNALS = {"segv": signal.SIGSEGV, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
PHASES = ("fetching", "stepping", "between", "joining")
PARTITION_S = (0.4, 2.0, 4.0, 8.0, 12.0)  # some are over before anybody is counted out
DEADLINE_S = 400.0  # only a hang takes this long


class Faults:
    """What is injected into one run, and when. ``line``: to agents that do faults on request."""

    def __init__(self, seed: int, kinds: Sequence[str], cluster: Cluster, line: Line | None) -> None:
        self._chance = random.Random(seed)
        self._kinds = kinds
        self._cluster = cluster
        self._line = line
        self._next_at = float("inf")
        self._pids: dict[int, int] = {}
        self._nodes: dict[int, str] = {}  # of each rank
        self._places: list[str] = []
        self._spares: list[str] = []
        self._newest = 0
        self._whole_from = 0  # copies may be lost once a version newer than this one is in two places again
        self._whole = False
        self._apart: list[str] = []  # nodes that are cut off, as far as they still belong to the run
        self._ends: list[tuple[float, Callable[[], None]]] = []  # of faults that last
        self.injected: list[str] = []

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "worker_started":
            self._pids[event["rank"]], self._nodes[event["rank"]] = event["pid"], event["node"]
        elif event["event"] == "view":
            self._places, self._spares = event["places"], event["spares"]
            for name in set(self._apart) - set(self._places) - set(self._spares):
                self._counted_out(name)
        elif event["event"] == "step":
            if self._newest == 0:
                self._next_at = time.monotonic() + self._chance.uniform(0, 1.0)
            self._newest = max(self._newest, event["step"])
            self._whole = self._whole or (event["protected"] or 0) > self._whole_from

    def act(self) -> None:
        """Inject what is due, and end what has lasted long enough."""
        now = time.monotonic()
        for end in [end for at, end in self._ends if at <= now]:
            end()
        self._ends = [(at, end) for at, end in self._ends if at > now]
        if now < self._next_at or self._newest >= NUM_STEPS - 15 or len(self.injected) >= NUM_FAULTS:
            return
        what = self._inject(self._chance.choice(self._kinds))
        self.injected.append(f"{what} at step {self._newest}")
        self._next_at = time.monotonic() + self._chance.choice([0.05, 0.3, 0.6, 1.0, 1.5]) * self._chance.uniform(
            0.5, 1.5
        )

    def _inject(self, kind: str) -> str:
        may_lose_a_node = self._whole and self._spares and not self._apart and len(self._cluster.running()) > 2
        if kind == "node" and may_lose_a_node:
            self._lose_copies()
            name = self._chance.choice(self._places)
            self._cluster.kill_node(name)
            self._cluster.add_node()
            return name
        if kind in ("partition", "cut") and may_lose_a_node:
            return self._cut_off(kind)
        if kind in ("links", "deaf", "deaf_links"):
            return self._lose_packets(kind)
        rank = self._chance.choice(sorted(self._pids))
        if kind == "damage" and self._whole and not self._apart:
            self._lose_copies()
            damaged = self._ask("corrupt", rank, None)
            return f"damaged copies, {damaged}, and SIGKILL to rank {rank}{self._signal(rank, signal.SIGKILL)}"
        if kind == "phase":
            phase, action = self._chance.choice(PHASES), self._chance.choice(["kill", "stop"])
            return f"{action} rank {rank} while it is {phase}: {self._ask(action, rank, phase)}"
        if kind == "pair":
            pair = self._chance.sample(sorted(self._pids), 2)
            return "SIGKILL to ranks " + ", ".join(f"{each}{self._signal(each, signal.SIGKILL)}" for each in pair)
        number = SIGNALS.get(kind, signal.SIGKILL)
        return f"{number.name} to rank {rank}{self._signal(rank, number)}"

    def _lose_copies(self) -> None:
        self._whole_from, self._whole = self._newest + 2, False  # two versions may be on their way now

    def _signal(self, rank: int, number: signal.Signals) -> str:
        try:
            os.kill(self._pids[rank], number)
        except ProcessLookupError:
            return " (which was replaced a moment ago)"
        return ""

    def _ask(self, action: str, rank: int, phase: str | None) -> object:
        return self._request(self._nodes[rank], {"action": action, "rank": rank, "phase": phase})

    def _request(self, node: str, request: Mapping[str, object]) -> object:
        assert self._line is not None
        return self._line.ask_one(self._cluster.nodes[node].address, "chaos", request, 5.0)

    # -- the network

    def _cut_off(self, kind: str) -> str:
        """A whole node (``cut``), or its agent alone, whose workers go on (``partition``)."""
        self._lose_copies()
        name, seconds = self._chance.choice(self._places), self._chance.choice(PARTITION_S)
        self._apart.append(name)
        if kind == "cut":
            self._cluster.cut(name)
        else:
            self._request(name, {"action": "partition", "seconds": seconds})

        def end() -> None:
            if kind == "cut":
                self._cluster.mend(name)
            if name in self._apart:
                self._apart.remove(name)

        self._ends.append((time.monotonic() + seconds, end))
        return f"{kind} of {name} for {seconds:g} s"

    def _counted_out(self, name: str) -> None:
        """The others go on without a node that was cut off: its copies are lost, and it ends once it hears of it."""
        self._lose_copies()
        self._apart.remove(name)
        self._cluster.nodes[name].killed = True
        self._cluster.add_node()
        self.injected[-1] += f" ({name} was counted out)"

    def _lose_packets(self, kind: str) -> str:
        """Between two nodes: in both directions (``links``) or one, of workers only (``links``, ``deaf_links``)."""
        mine, other = self._chance.sample(self._places, 2)
        seconds = self._chance.choice(PARTITION_S)
        ways = [(mine, other), (other, mine)] if kind == "links" else [(mine, other)]
        for deaf, to in ways:
            self._cluster.undeafen(deaf, to)  # another fault may not be over
            self._cluster.deafen(deaf, to, agents_too=kind == "deaf")

        def end() -> None:
            for deaf, to in ways:
                self._cluster.undeafen(deaf, to)

        self._ends.append((time.monotonic() + seconds, end))
        return f"{kind} from {other} to {mine} for {seconds:g} s"


@contextlib.contextmanager
def operator_line() -> Iterator[Line]:
    config = Config(run_id="run", name="tester", bind="127.0.0.1:0", contacts=())
    transport = ZmqTransport(config)
    try:
        yield Line(config, transport)
    finally:
        transport.close(0.0)


def train(
    folder: Path,
    parallelism: str,
    environ: Mapping[str, str],
    seed: int | None = None,
    kinds: Sequence[str] = ON_LOOPBACK,
    *,
    namespaces: bool = False,
) -> tuple[Path, list[str]]:
    """Run to the end while faults are injected, without a seed undisturbed. Returns where the outcome is, and what was
    injected."""
    out = folder / "out"
    script = ["--chaos", "--hang-floor", "1", TRAIN, "--out", str(out), "--steps", str(NUM_STEPS)]
    script += [*SMALL, *PARALLELISMS[parallelism]]
    num_later = NUM_FAULTS if namespaces else 0
    shape = {"num_training": 2, "num_spares": int(seed is not None), "num_workers": 2, "num_later": num_later}
    with contextlib.ExitStack() as stack:
        cluster = Cluster(folder / "run", script, **shape, environ=environ, namespaces=namespaces)
        stack.enter_context(cluster)
        line = stack.enter_context(operator_line()) if not namespaces else None
        faults = Faults(seed, kinds, cluster, line) if seed is not None else None
        deadline = time.monotonic() + DEADLINE_S
        while cluster.running():
            injected = faults.injected if faults is not None else []
            assert time.monotonic() < deadline, f"the run hangs after {injected}\n{cluster.log_tails()}"
            for event in cluster.events.new():
                if faults is not None:
                    faults.hear(event)
            if faults is not None:
                faults.act()
            cluster.dismiss_late()
            time.sleep(0.005)
        codes = cluster.exit_codes()
        assert set(codes.values()) == {0}, f"{codes} after {injected}\n{cluster.log_tails()}"
        left = cluster.leftovers()
        assert left == [], f"{left} after {injected}"
    return out, injected
