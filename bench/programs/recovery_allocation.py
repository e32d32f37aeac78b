"""bench/recovery.py on the hosts of an allocation: every host runs the same command, and the first injects the faults.

In: a folder that all hosts see, addresses and the key from the environment, as p2prun reads them. Out: the same
incidents as on one machine. Every host starts its node of each run in turn, without a word to the others: run ids count
up, and a run ends for all nodes when the first host stops it.
Limits: p2prun's scenarios only; faults are asked for over the control plane (`p2prun --chaos`), milliseconds before
they come, and times of several hosts are compared, so clocks have to be synchronised.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recovery_scenarios import EXAMPLES, Scenario, ScenarioFailed, Sizes

from cluster import EventReader, p2prun_command
from rendezvous.config import Config
from rendezvous.operator import Line
from rendezvous.zmq_transport import ZmqTransport

END_WITHIN_S = 60.0
RUN_LIMIT_S = 1800.0
ANSWER_S = 5.0
JOIN_S = 600.0


@dataclass(frozen=True, slots=True)
class Allocation:
    """``contacts``: one address per host, in the same order everywhere; ``index``: which of them is this host."""

    folder: Path
    contacts: tuple[str, ...]
    index: int

    @staticmethod
    def from_env(folder: Path, env: Mapping[str, str]) -> Allocation:
        """P2PSTATE_CONTACTS, and P2PSTATE_HOST_INDEX or Slurm's SLURM_NODEID. ValueError says what is missing."""
        contacts = tuple(each.strip() for each in env.get("P2PSTATE_CONTACTS", "").split(",") if each.strip())
        index = env.get("P2PSTATE_HOST_INDEX", env.get("SLURM_NODEID", ""))
        if len(contacts) < 2 or not index.isdigit() or int(index) >= len(contacts):
            raise ValueError(
                "an allocation needs P2PSTATE_CONTACTS=host:port,host:port,... with an address per host, and "
                "P2PSTATE_HOST_INDEX (or SLURM_NODEID): which of them this host is, from 0"
            )
        return Allocation(folder, contacts, int(index))

    def num_nodes(self, scenario: Scenario) -> int:
        """Those that train."""
        return len(self.contacts) - scenario.num_spares


class Run:
    """What recovery_scenarios.py wants of a cluster, for a run whose nodes are on other hosts as well."""

    def __init__(self, allocation: Allocation, scenario: Scenario, sizes: Sizes, number: int, seed: int) -> None:
        self._allocation = allocation
        self._run_id = f"recovery-{number}"
        self.folder = allocation.folder / self._run_id
        (self.folder / "out").mkdir(parents=True, exist_ok=True)
        self._reader = EventReader(self.folder)
        self._ranks: dict[int, tuple[int, str]] = {}  # process -> its rank and node
        num_nodes = allocation.num_nodes(scenario)
        num_workers = sizes.num_ranks // num_nodes
        options = ["--nnodes", str(num_nodes), "--nproc-per-node", str(num_workers)]
        options += ["--spares", str(scenario.num_spares), "--run-id", self._run_id, "--run-dir", str(self.folder)]
        options += ["--name", f"host{allocation.index}", "--bind", allocation.contacts[allocation.index]]
        options += ["--contacts", ",".join(allocation.contacts), "--join-timeout", str(JOIN_S), "--chaos", "--quiet"]
        if scenario.victim == "rehearsed":
            options += ["--rehearse", str(num_workers)]
        common = ["--steps", "1000000", "--seed", str(seed), "--out", str(self.folder / "out"), *sizes.arguments()]
        script = list(sizes.program) or [str(EXAMPLES / "train_gpt.py"), *common]
        environ = {"OMP_NUM_THREADS": "1", **os.environ}
        with (self.folder / f"agent-host{allocation.index}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*p2prun_command(), *options, *script], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
            )

    @property
    def events(self) -> Run:
        return self

    def new(self) -> list[dict[str, Any]]:
        events = self._reader.new()
        for event in events:
            if event["event"] == "worker_started":
                self._ranks[event["pid"]] = event["rank"], event["node"]
        return events

    def running(self) -> bool:
        """This host's node may be one that was killed; silence tells of the others."""
        return True

    def kill_process(self, pid: int) -> float:
        rank, node = self._ranks[pid]
        return self._inject(node, "kill", rank)

    def damage(self, rank: int, node: str) -> None:
        self._inject(node, "corrupt", rank)

    def kill_node(self, name: str, *, silent: bool = False) -> float:
        assert not silent, "a network of real hosts is not cut"
        return self._inject(name, "node", None)

    def log_tails(self) -> str:
        return "\n".join(f"--- {path}\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("agent-*.log")))

    def stop(self) -> None:
        with self._line() as line:
            for address in self._allocation.contacts:
                if line.ask_one(address, "stop", "measured", ANSWER_S):
                    break
        self.wait(END_WITHIN_S)

    def wait(self, limit_s: float) -> None:
        """Until this host's node has ended; kills it when time is over."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _inject(self, node: str, action: str, rank: int | None) -> float:
        address = self._allocation.contacts[int(node.removeprefix("host"))]
        at = time.time()
        with self._line() as line:
            answer = line.ask_one(address, "chaos", {"action": action, "rank": rank}, ANSWER_S)
        if not answer or "done" not in answer:
            raise ScenarioFailed(f"{node} was asked for {action} of rank {rank}: {answer}\n{self.log_tails()}")
        return at

    @contextmanager
    def _line(self) -> Iterator[Line]:
        host = self._allocation.contacts[self._allocation.index].rpartition(":")[0]
        config = Config.from_env(run_id=self._run_id, name="driver", bind=f"{host}:0", contacts=())
        transport = ZmqTransport(config)
        try:
            yield Line(config, transport)
        finally:
            transport.close(0.0)


def fits(scenario: Scenario, allocation: Allocation, num_ranks: int) -> bool:
    """Whether it can be measured there."""
    num_nodes = allocation.num_nodes(scenario)
    return (
        scenario.launcher == "p2prun" and scenario.victim != "silent" and num_nodes >= 2 and num_ranks % num_nodes == 0
    )


def take_part(allocation: Allocation, scenarios: Sequence[Scenario], sizes: Sizes, num_kills: int) -> None:
    """On all hosts but the first: start this host's node of every run, in the order in which the first one does."""
    number = 0
    for _ in range(num_kills):
        for scenario in scenarios:
            Run(allocation, scenario, sizes, number, seed=number).wait(RUN_LIMIT_S)
            number += 1
