"""The faults that bench/recovery.py measures: how each run is started, what is killed, what was seen.

In: a scenario, the sizes, a folder. Out: one :class:`Incident` per kill. Runs of p2prun, of torchrun with our backend
and of torchrun with DCP write events of the same form, so one timeline (examples/timeline.py) measures all of them.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster import Cluster
from p2pstate.agent.chaos import change_bytes
from p2pstate.worker import stand_in
from timeline import Failure, Timeline

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
NUM_NODES = 2
POLL_S = 0.01
SILENCE_S = 180.0  # a run in which nothing happens for so long has failed
STEPS_BEFORE_KILL = 6
PEERS = {"nvrx": "nvidia_resiliency_ext", "torchft": "torchft"}  # by launcher: the package that it needs


class ScenarioFailed(Exception):
    """A run did not survive; the message says what was seen."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """``program``: a script of the user's with its arguments, in place of the example with a model of these sizes."""

    num_ranks: int
    num_layers: int
    width: int
    context: int
    batch: int
    program: tuple[str, ...] = ()

    @property
    def num_workers(self) -> int:
        return self.num_ranks // NUM_NODES

    def arguments(self) -> list[str]:
        named = {"num-layers": self.num_layers, "width": self.width, "context": self.context, "batch": self.batch}
        return [word for name, value in named.items() for word in (f"--{name}", str(value))]


@dataclass(frozen=True, slots=True)
class Scenario:
    """``launcher``: p2prun, torchrun (with our backend), torchrun-preloaded (whose workers are forked with torch
    imported), dcp (torchrun's c10d and DCP), dcp-preloaded, nvrx (NVRx's ft_launcher and DCP) or torchft (a torchrun
    per rank, each a replica group). ``victim``: worker, rehearsed (a worker that a rehearsed process replaces), buddy
    (a worker whose own node's copy is damaged as well), node, or silent (a node without a network)."""

    name: str
    launcher: str
    victim: str
    what: str

    @property
    def runs_any_script(self) -> bool:
        """Whether a script of the user's can be run, or the one that saves with DCP is measured."""
        return self.launcher == "p2prun" or self.has_our_backend

    @property
    def has_our_backend(self) -> bool:
        return self.launcher in ("torchrun", "torchrun-preloaded")

    @property
    def is_installed(self) -> bool:
        needed = PEERS.get(self.launcher)
        return needed is None or importlib.util.find_spec(needed) is not None

    @property
    def num_spares(self) -> int:
        return 1 if self.victim in ("node", "silent") else 0


SCENARIOS = (
    Scenario("ours_warm", "p2prun", "rehearsed", "a worker; a process has built its model and rehearsed already"),
    Scenario("ours_cold", "p2prun", "worker", "a worker; a spare process waits before the script"),
    Scenario("ours_buddy", "p2prun", "buddy", "the same, the copy on the own node damaged: the buddy serves"),
    Scenario("ours_node", "p2prun", "node", "a node; a spare node waits"),
    Scenario("ours_node_silent", "p2prun", "silent", "a node without a word: its network is cut first"),
    Scenario("torchrun_p2p", "torchrun", "worker", "a worker; torchrun with backend p2p, state from memory"),
    Scenario("torchrun_p2p_preloaded", "torchrun-preloaded", "worker", "the same with PYTHON_EXEC=p2pstate-python"),
    Scenario("torchrun_dcp", "dcp", "worker", "a worker; torchrun with c10d and dcp.async_save every 10 steps"),
    Scenario("torchrun_dcp_preloaded", "dcp-preloaded", "worker", "the same, workers forked with torch imported"),
    Scenario("nvrx_launcher", "nvrx", "worker", "the same with NVRx's ft_launcher in place of torchrun"),
    Scenario("torchft", "torchft", "worker", "torchft; one of as many replica groups as ranks, timeout 5 s"),
)


@dataclass(frozen=True, slots=True)
class Incident:
    """``seconds``: from the signal to a step beyond the last one before it, committed on all ranks."""

    seconds: float
    steps_lost: int
    source: str
    phases: Mapping[str, float]
    step_s: float  # the median of undisturbed steps of the same run


class TorchrunCluster(Cluster):
    """The same interface, with stock torchruns in place of p2prun."""

    def __init__(self, folder: Path, script: Sequence[str], scenario: Scenario, sizes: Sizes) -> None:
        self._scenario = scenario
        self._sizes = sizes
        environ = {"OMP_NUM_THREADS": "1", "P2PSTATE_RUN_DIR": str(folder), "P2PSTATE_PRESET": "local"}
        if scenario.launcher == "torchrun-preloaded":
            environ["PYTHON_EXEC"] = str(stand_in_command(folder.parent))
        if not scenario.has_our_backend:
            environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or a restart finds the addresses of the dead
        super().__init__(folder, script, num_training=NUM_NODES, num_spares=0, num_workers=1, environ=environ)

    def _command(self, name: str, address: str, contacts: Sequence[str]) -> list[str]:
        launcher, ours = self._scenario.launcher, self._scenario.has_our_backend
        endpoint = ",".join(contacts) if ours else contacts[0]
        options = ["--nnodes", str(NUM_NODES), "--nproc-per-node", str(self._sizes.num_workers)]
        options += ["--max-restarts", "1000", "--monitor-interval", "0.1", "--rdzv-id", self.folder.name]
        options += ["--rdzv-endpoint", endpoint, "--rdzv-backend", "p2p" if ours else "c10d"]
        if ours:
            options += ["--rdzv-conf", f"name={name},bind={address},last_call_timeout=0.5"]
        program = ["-m", "torch.distributed.run"]
        if launcher == "dcp-preloaded":
            program = [str(HERE / "recovery_elastic.py")]
        elif launcher == "nvrx":
            program = ["-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
            options += ["--ignore-missing-fault-tol-cfg"]
        return [sys.executable, *program, *options]


class TorchftCluster(Cluster):
    """A torchrun per rank, whose worker is a replica group of torchft's; the lighthouse is here."""

    def __init__(self, folder: Path, script: Sequence[str], sizes: Sizes) -> None:
        os.environ.setdefault("RUST_LOG", "error")  # it tells of every quorum
        coordination = importlib.import_module("torchft.coordination")
        num_groups = sizes.num_ranks
        self._lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=num_groups - 1)
        environ = {"OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": self._lighthouse.address()}
        script = [*script, "--num-replicas", str(num_groups)]
        super().__init__(folder, script, num_training=num_groups, num_spares=0, num_workers=1, environ=environ)

    def _command(self, name: str, address: str, contacts: Sequence[str]) -> list[str]:
        options = ["--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "1000", "--monitor-interval", "0.1"]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", name]
        return [sys.executable, "-m", "torch.distributed.run", *options]

    def stop(self) -> None:
        super().stop()
        self._lighthouse.shutdown()


def stand_in_command(folder: Path) -> Path:
    """The command p2pstate-python, as an installation of this interpreter's environment has it."""
    command = folder / stand_in.NAME
    command.write_text(f"#!{sys.executable}\nfrom p2pstate.worker.stand_in import main\nmain()\n")
    command.chmod(0o755)
    return command


def start(scenario: Scenario, sizes: Sizes, folder: Path, seed: int) -> Cluster:
    out = folder / "out"
    out.mkdir(parents=True)
    common = ["--steps", "1000000", "--seed", str(seed), "--out", str(out), *sizes.arguments()]
    if scenario.launcher == "torchft":
        script = [str(HERE / "recovery_torchft.py"), *common, "--events", str(folder / "run")]
        return TorchftCluster(folder / "run", script, sizes)
    if not scenario.runs_any_script:
        script = [str(HERE / "recovery_dcp.py"), *common, "--events", str(folder / "run")]
        return TorchrunCluster(folder / "run", script, scenario, sizes)
    script = list(sizes.program) or [str(EXAMPLES / "train_gpt.py"), *common]
    if scenario.has_our_backend:
        return TorchrunCluster(folder / "run", script, scenario, sizes)
    if scenario.victim == "rehearsed":
        script = ["--rehearse", str(sizes.num_workers), *script]
    return Cluster(
        folder / "run",
        script,
        num_training=NUM_NODES,
        num_spares=scenario.num_spares,
        num_workers=sizes.num_workers,
        environ={"OMP_NUM_THREADS": "1"},
        namespaces=scenario.victim == "silent",
    )


class Watched:
    """A run and its timeline. Raises ScenarioFailed from :meth:`look` when nothing is heard any more."""

    def __init__(self, scenario: Scenario, sizes: Sizes, cluster: Any) -> None:
        self.timeline = Timeline(sizes.num_ranks)
        self._scenario = scenario
        self._cluster = cluster
        self._times: list[float] = []  # of undisturbed steps
        self._heard = time.monotonic()

    def look(self) -> None:
        """Read what has happened."""
        events = self._cluster.events.new()
        if not self.timeline.recovering:
            self._times += [event["seconds"] for event in events if event["event"] == "step"]
        self.timeline.add(events)
        now = time.monotonic()
        self._heard = now if events else self._heard
        if now - self._heard > SILENCE_S or not self._cluster.running():
            raise ScenarioFailed(f"{self._scenario.name}: nothing more is heard\n{self._cluster.log_tails()}")
        time.sleep(POLL_S)

    @property
    def step_s(self) -> float:
        """The median of undisturbed steps."""
        return sorted(self._times)[len(self._times) // 2] if self._times else 0.0


def measure(scenario: Scenario, sizes: Sizes, folder: Path, num_kills: int, rng: random.Random) -> list[Incident]:
    """One run with so many kills, one after the other. Raises ScenarioFailed."""
    return watch(start(scenario, sizes, folder, seed=rng.randrange(1 << 16)), scenario, sizes, num_kills, rng)


def watch(started: Any, scenario: Scenario, sizes: Sizes, num_kills: int, rng: random.Random) -> list[Incident]:
    """The same of a run that has been started: a Cluster, or recovery_allocation's Run."""
    with started as cluster:
        run = Watched(scenario, sizes, cluster)
        timeline = run.timeline
        due = STEPS_BEFORE_KILL
        at: float | None = None
        while len(timeline.failures) < num_kills or timeline.recovering:
            run.look()
            if at is None and timeline.step >= due and not timeline.recovering and is_ready(scenario, timeline):
                at = time.monotonic() + rng.random() * run.step_s
            if at is not None and time.monotonic() >= at:
                kill(scenario, cluster, timeline, rng)
                due, at = timeline.step + STEPS_BEFORE_KILL, None
                if scenario.victim == "node" and len(timeline.failures) < num_kills:
                    cluster.add_node()
    return [incident(failure, run.step_s) for failure in timeline.failures]


def is_ready(scenario: Scenario, timeline: Timeline) -> bool:
    """Whether what shall step in is there."""
    if scenario.victim == "rehearsed":
        return len(timeline.rehearsed) == timeline.num_ranks
    if scenario.launcher == "torchrun-preloaded":
        return len(timeline.preloaded) == NUM_NODES
    return not scenario.num_spares or bool(timeline.spares)


def kill(scenario: Scenario, cluster: Any, timeline: Timeline, rng: random.Random) -> None:
    """What the scenario kills, and the timeline's word of it."""
    if scenario.num_spares:
        node = rng.choice(sorted(set(timeline.nodes.values())))
        victims = timeline.ranks_on(node)
        killed_at = cluster.kill_node(node, silent=scenario.victim == "silent")
        what = node
    else:
        rank = rng.choice(sorted(timeline.pids))
        victims, what = {rank}, f"rank {rank}"
        killed_at = cluster.kill_process(timeline.pids[rank])
        if scenario.victim == "buddy":
            damage(cluster, rank, timeline.nodes[rank])
    event = {"event": "injected", "kind": scenario.victim, "what": what, "t": killed_at, "victims": sorted(victims)}
    timeline.add([event])


def damage(cluster: Any, rank: int, node: str) -> None:
    if isinstance(cluster, Cluster):
        damage_own_copies(cluster.nodes[node].process.pid, rank)
    else:
        cluster.damage(rank, node)


def damage_own_copies(agent_pid: int, rank: int) -> None:
    """Change bytes of a shard in its own node's vault, through the agent's descriptors: digests fail now."""
    damaged: set[int] = set()
    for entry in Path("/proc", str(agent_pid), "fd").iterdir():
        if not (entry.is_symlink() and os.readlink(entry).startswith(f"/memfd:p2pstate-own{rank}-")):
            continue
        fd = os.open(entry, os.O_RDWR)
        try:
            if os.fstat(fd).st_ino not in damaged:  # a slot has several descriptors
                damaged.add(os.fstat(fd).st_ino)
                change_bytes(fd)
        finally:
            os.close(fd)


def incident(failure: Failure, step_s: float) -> Incident:
    assert failure.seconds is not None
    phases = failure.longest_phases()
    if failure.detected is not None:
        phases = {"detect": failure.detected - failure.t, **phases}
    return Incident(failure.seconds, failure.steps_lost, failure.source, phases, step_s)


def under_failures(
    sizes: Sizes, folder: Path, every_s: float, for_s: float, rng: random.Random
) -> tuple[float, float, int]:
    """A worker is killed every so often. Returns (useful share of the wall clock, the bound that one lost step per
    failure gives, failures)."""
    scenario = next(each for each in SCENARIOS if each.name == "ours_warm")
    with start(scenario, sizes, folder, seed=rng.randrange(1 << 16)) as cluster:
        run = Watched(scenario, sizes, cluster)
        while run.timeline.step < STEPS_BEFORE_KILL:
            run.look()
        began, first_step = time.monotonic(), run.timeline.step
        next_kill = began + every_s / 2
        while time.monotonic() < began + for_s:
            run.look()
            if time.monotonic() >= next_kill and not run.timeline.recovering:
                kill(scenario, cluster, run.timeline, rng)
                next_kill += every_s
        wall_s = time.monotonic() - began
    num_failures = len(run.timeline.failures)
    useful = (run.timeline.step - first_step) * run.step_s / wall_s
    return useful, 1 - num_failures * run.step_s / wall_s, num_failures


def load_average() -> float:
    return psutil.getloadavg()[0]
