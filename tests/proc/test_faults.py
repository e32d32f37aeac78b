"""Faults beyond the kill matrix, and bad input: each ends as promised, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from cluster import Cluster
from outcome import compare
from p2pstate.placement import partners
from ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "examples" / "train_gpt.py")
SMALL = ("--num-layers", "2", "--width", "64", "--context", "32", "--batch", "2")
NUM_STEPS = 18
ENDLESS = ("--steps", "100000", "--pace", "0.05")  # until it is ended; other tests need the processors, too
DEADLINE_S = 240.0  # only a hang takes this long


class Run:
    """A training run of 2 x 2 ranks under observation."""

    def __init__(
        self,
        folder: Path,
        environ: dict[str, str],
        *args: str,
        spares: int = 0,
        steps: int = NUM_STEPS,
        shape: tuple[int, int] = (2, 2),
    ) -> None:
        self.out = folder / "out"
        script = [TRAIN, "--out", str(self.out), "--steps", str(steps), *SMALL, *args]
        self.cluster = Cluster(
            folder / "run",
            script,
            num_training=shape[0],
            num_spares=spares,
            num_workers=shape[1],
            environ=environ,
        )
        self.history: list[dict[str, Any]] = []
        self._seen = 0

    def wait_for(self, what: str, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first event that fits, of those after the one that was waited for before."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self.history += self.cluster.events.new()
            while self._seen < len(self.history):
                self._seen += 1
                if found(self.history[self._seen - 1]):
                    return self.history[self._seen - 1]
            time.sleep(0.01)
        raise AssertionError(f"no {what} within {DEADLINE_S:.0f} s\n{self.cluster.log_tails()}")

    def wait_step(self, step: int, rank: int = 0) -> dict[str, Any]:
        return self.wait_for(f"step {step}", lambda e: e["event"] == "step" and e["rank"] == rank and e["step"] >= step)

    def pids(self) -> dict[int, int]:
        """Of all ranks, when they have started."""
        found: dict[int, int] = {}
        while len(found) < 4:
            event = self.wait_for("worker_started", lambda e: e["event"] == "worker_started")
            found[event["rank"]] = event["pid"]
        return found

    def all(self, kind: str) -> list[dict[str, Any]]:
        self.history += self.cluster.events.new()
        return [event for event in self.history if event["event"] == kind]

    def end(self) -> dict[str, int | None]:
        deadline = time.monotonic() + DEADLINE_S
        while self.cluster.running():
            assert time.monotonic() < deadline, f"the run does not end\n{self.cluster.log_tails()}"
            time.sleep(0.02)
        assert self.cluster.leftovers() == []
        return self.cluster.exit_codes()


@pytest.fixture
def start(tmp_path: Path, fork_server: dict[str, str]) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*args: str, **options: Any) -> Run:
        environ = options.pop("environ", fork_server)
        runs.append(Run(tmp_path / str(len(runs)), environ, *args, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.cluster.stop()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, fork_server: dict[str, str]) -> Path:
    """The outcome of an undisturbed run."""
    run = Run(tmp_path_factory.mktemp("expected"), fork_server)
    assert set(run.end().values()) == {0}
    return run.out


def assert_identical(run: Run, expected: Path) -> None:
    comparison = compare(run.out, expected, 4)
    assert comparison.identical, "\n".join([*comparison.differences, run.cluster.log_tails()])


@pytest.mark.parametrize("kill", ["1:1:forward", pytest.param("2:2:backward", marks=pytest.mark.slow), "2:0:in_step"])
def test_kill_in_the_first_steps_restarts_all_workers_and_ends_identical(
    kill: str, start: Callable[..., Run], expected: Path
) -> None:
    run = start("--kill", kill)
    assert set(run.end().values()) == {0}
    assert_identical(run, expected)


def test_newcomer_killed_while_it_joins_is_replaced_again(start: Callable[..., Run], expected: Path) -> None:
    run = start("--kill", "8:1:backward")
    run.pids()
    newcomer = run.wait_for("the replacement", lambda e: e["event"] == "worker_started" and e["rank"] == 1)
    time.sleep(0.2)
    os.kill(newcomer["pid"], signal.SIGKILL)
    second = run.wait_for("its replacement", lambda e: e["event"] == "worker_started" and e["rank"] == 1)
    assert second["pid"] != newcomer["pid"]
    assert set(run.end().values()) == {0}
    assert_identical(run, expected)


def test_both_workers_of_a_node_killed_at_once_resume_from_its_vault(start: Callable[..., Run], expected: Path) -> None:
    run = start()
    pids = run.pids()
    run.wait_step(8)
    for rank in (2, 3):
        os.kill(pids[rank], signal.SIGKILL)
    sources = set()
    for _ in range(2):
        event = run.wait_for("recovery", lambda e: e["event"] == "recovery" and e["rank"] in (2, 3))
        sources.add(event["source"])
    assert sources == {"own vault"}
    assert set(run.end().values()) == {0}
    assert_identical(run, expected)


def test_stopped_rank_does_not_hold_up_the_abort_of_the_others(start: Callable[..., Run], expected: Path) -> None:
    """Survivors that wait in gloo for a live but silent peer are freed while it is still silent."""
    run = start()
    pids = run.pids()
    run.wait_step(6)
    os.kill(pids[3], signal.SIGSTOP)
    time.sleep(0.5)  # the others are in a collective now, waiting for rank 3
    os.kill(pids[1], signal.SIGKILL)
    freed: set[int] = set()
    while freed != {0, 2}:
        freed.add(run.wait_for("rank freed", lambda e: e["event"] == "discarded" and e["rank"] in (0, 2))["rank"])
    os.kill(pids[3], signal.SIGCONT)
    assert set(run.end().values()) == {0}
    assert_identical(run, expected)


@pytest.mark.slow
def test_survivors_of_several_faults_keep_their_processes(start: Callable[..., Run], expected: Path) -> None:
    run = start("--kill", "6:1:forward", "--kill", "12:3:in_step", spares=1)
    before = run.pids()
    assert set(run.end().values()) == {0}
    replaced = [e["rank"] for e in run.all("worker_started") if before.get(e["rank"]) != e["pid"]]
    assert sorted(replaced) == [1, 3]
    assert_identical(run, expected)


def test_node_lost_without_a_spare_ends_the_run_with_the_reason(tmp_path: Path, fork_server: dict[str, str]) -> None:
    endless = (TRAIN, *ENDLESS, "--out", str(tmp_path / "out"), *SMALL)
    nodes = launch_two(tmp_path, fork_server, "--spare-wait", "1", *endless)
    deadline = time.monotonic() + DEADLINE_S
    while not list((tmp_path / "out").glob("positions-1.*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    nodes[0].kill()
    _, stderr = nodes[1].communicate(timeout=DEADLINE_S)
    assert nodes[1].returncode == 75, stderr
    assert "--spare-wait" in stderr
    nodes[0].communicate(timeout=DEADLINE_S)


def test_rank_and_its_buddy_lost_end_the_run_with_what_is_lost(start: Callable[..., Run]) -> None:
    """Four nodes in pairs: losing two that are not partners is survived, losing two partners is not, and is said."""
    run = start(*ENDLESS, spares=4, shape=(4, 1))
    run.wait_step(5)
    places = run.all("view")[-1]["places"]
    pairs = partners(places)
    assert pairs[0] != (1,)
    for name in places[:2]:
        run.cluster.kill_node(name)
    resumed = run.wait_for("recovery", lambda e: e["event"] == "recovery" and e["rank"] in (0, 1))
    assert resumed["source"] == "buddy"
    run.wait_step(resumed["version"][1] + 5, rank=2)
    places = max(run.all("view"), key=lambda e: e["epoch"])["places"]
    for rank in (0, *pairs[0]):
        run.cluster.kill_node(places[rank])
    codes = run.end()
    assert set(codes.values()) == {77}, f"{codes}\n{run.cluster.log_tails()}"
    assert "no live node has shard" in run.cluster.log_tails()


def test_signal_to_every_agent_ends_the_run_at_once(start: Callable[..., Run]) -> None:
    run = start(*ENDLESS)
    run.wait_step(3)
    for node in run.cluster.running():
        node.process.send_signal(signal.SIGTERM)
    assert set(run.end().values()) <= {128 + signal.SIGTERM, 75}


def test_run_without_any_tcpstore_survives_a_worker_and_a_node(start: Callable[..., Run], tmp_path: Path) -> None:
    """TCPStore's constructor ends the process, in agents, templates and workers alike."""
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "sitecustomize.py").write_text(
        textwrap.dedent("""
            import os
            import torch.distributed

            def constructed(self, *args, **kwargs):
                os.write(2, b"TCPStore was constructed\\n")
                os._exit(99)

            torch.distributed.TCPStore.__init__ = constructed
        """)
    )
    path = os.pathsep.join([str(trap), *filter(None, [os.environ.get("PYTHONPATH")])])
    check = subprocess.run(
        [sys.executable, "-c", "import torch.distributed as d; d.TCPStore('127.0.0.1', 0, 1, True)"],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert check.returncode == 99, "the trap does not work"
    environ = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    kills = ("--kill", "5:1:backward", "--kill", "10:0:backward:node")
    run = start(*kills, spares=1, steps=14, shape=(2, 1), environ=environ)
    deadline = time.monotonic() + DEADLINE_S
    while run.cluster.nodes["node0"].process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    run.cluster.nodes["node0"].killed = True
    assert set(run.end().values()) == {0}


# -- bad input


def launch(folder: Path, environ: dict[str, str], *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "p2pstate.cli", *args]
    return subprocess.Popen(
        command,
        env={**os.environ, **environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch_two(folder: Path, environ: dict[str, str], *args: str) -> list[subprocess.Popen[str]]:
    """Two training nodes of one worker each."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    common = ("--nnodes", "2", "--contacts", ",".join(addresses))
    return [
        launch(folder, environ, *common, "--bind", address, "--name", f"node{index}", *args)
        for index, address in enumerate(addresses)
    ]


def script(folder: Path, body: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(body))
    return str(path)


GOOD = """
    import torch, torch.distributed as dist, p2pstate
    dist.init_process_group({backend})
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    class Odd:
        def state_dict(self): return {{"inner": {{"callback": print}}}}
        def load_state_dict(self, state): pass
    p2pstate.Replicator(model, optimizer{more})
"""


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--nnodes", "2", "--contacts", "127.0.0.1"], 78, "contact '127.0.0.1' is not"),
        (["--nnodes", "2", "--contacts", "127.0.0.1:1", "--join-timeout", "2"], 78, "check --contacts (127.0.0.1:1)"),
        (["--nnodes", "2"], 78, "--contacts is missing"),
        (["--nnodes", "3:2"], 78, "MIN must not be above MAX"),
        (["--nnodes", "x"], 78, "give a number"),
        (["--nproc-per-node", "0"], 78, "at least one worker"),
        (["--bind", "10.255.255.1:0"], 78, "--key-file"),
        (["--key-file", "/dev/null/none"], 78, "/dev/null/none"),
    ],
)
def test_wrong_option_is_refused_with_one_sentence(
    options: list[str], code: int, sentence: str, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    process = launch(tmp_path, fork_server, *options, "--name", "n", script(tmp_path, "pass"))
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, stderr
    assert sentence in stderr
    assert "Traceback" not in stderr


def test_taken_port_is_refused_with_one_sentence(tmp_path: Path, fork_server: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = launch(tmp_path, fork_server, "--bind", f"127.0.0.1:{port}", script(tmp_path, "pass"))
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 78
    assert f"127.0.0.1:{port} is taken" in stderr
    assert "Traceback" not in stderr


def test_missing_script_is_refused_before_anything_starts(tmp_path: Path, fork_server: dict[str, str]) -> None:
    process = launch(tmp_path, fork_server, "nowhere.py")
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 78
    assert "there is no script 'nowhere.py'" in stderr


def test_any_usual_backend_gives_groups_that_can_be_repaired(tmp_path: Path, fork_server: dict[str, str]) -> None:
    body = """
        import torch, torch.distributed as dist
        from p2pstate.groups.group import P2PGroup
        for backend in (None, "gloo", "nccl", "cpu:gloo,cuda:nccl", "p2p"):
            dist.init_process_group(backend)
            assert isinstance(dist.group.WORLD, P2PGroup), backend
            x = torch.ones(1)
            dist.all_reduce(x)
            assert x.item() == 2, backend
            dist.destroy_process_group()
    """
    process = launch(tmp_path, fork_server, "--nproc-per-node", "2", script(tmp_path, body))
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, stderr


@pytest.mark.parametrize(
    ("body", "code", "sentence"),
    [
        (GOOD.format(backend='"mpi"', more=""), 78, "process group backend 'mpi' cannot be repaired"),
        (GOOD.format(backend="", more=", Odd()"), 1, "odd0/inner/callback"),
        (GOOD.format(backend="", more=", data=[1, 2]"), 1, "data= of type list has no state_dict"),
        (GOOD.format(backend="", more="").replace("model, optimizer", "model"), 1, "at least one optimizer"),
        ("import p2pstate, torch\np2pstate.Replicator(torch.nn.Linear(1, 1))", 78, "there is no process group yet"),
        ("raise ZeroDivisionError('mine')", 1, "ZeroDivisionError: mine"),
        ("import sys; sys.exit(5)", 5, "sys.exit(5)"),
    ],
)
def test_failing_script_ends_the_run_with_its_reason(
    body: str, code: int, sentence: str, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    process = launch(tmp_path, fork_server, script(tmp_path, body))
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, stderr
    assert sentence in stderr


def test_replicator_outside_of_a_launcher_says_what_to_change(tmp_path: Path) -> None:
    body = """
        import torch, torch.distributed as dist, p2pstate
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.Linear(2, 2)
        p2pstate.Replicator(model, torch.optim.SGD(model.parameters(), lr=0.1))
    """
    done = subprocess.run(
        [sys.executable, script(tmp_path, body)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "start it as `p2prun --nproc-per-node N script.py`" in done.stderr


# -- start and end of the loop

TINY = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    import p2pstate

    class Data:
        def __init__(self, length):
            self.length, self.position = length, 0
        def state_dict(self):
            return {"position": self.position}
        def load_state_dict(self, state):
            self.position = state["position"]
        def __iter__(self):
            while self.position < self.length:
                self.position += 1
                yield torch.full((2, 4), float(self.position))
            self.position = 0

    def once(name):
        try:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    rank = int(os.environ["RANK"])
"""

LOOP = """
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = Data(10)
    state = p2pstate.Replicator(model, optimizer, data=data)

    def train_step(batch):
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
"""


TRAINING = TINY + "    p2pstate.init_process_group()\n" + LOOP


def run_tiny(folder: Path, environ: dict[str, str], body: str, workers: int = 2) -> tuple[int, str, str]:
    """One node, ``workers`` ranks, plain script. Returns (exit code, standard error, what the script wrote to out)."""
    options = ("--nproc-per-node", str(workers), "--name", "n", "--give-up-after", "3")
    process = launch(folder, environ, *options, script(folder, body))
    _, stderr = process.communicate(timeout=DEADLINE_S)
    out = folder / "out"
    return process.returncode, stderr, out.read_text() if out.exists() else ""


def test_ranks_that_start_far_apart_meet(tmp_path: Path, fork_server: dict[str, str]) -> None:
    body = (
        TINY
        + """
    time.sleep(8 * rank)
    p2pstate.init_process_group()
    x = torch.ones(1); dist.all_reduce(x); assert x.item() == 2
    """
    )
    code, stderr, _ = run_tiny(tmp_path, fork_server, body)
    assert code == 0, stderr


START_UP = (
    TINY
    + """
    p2pstate.init_process_group()
    names = [None] if rank else [["what", "rank 0", "found", "x" * SIZE]]
    dist.broadcast_object_list(names)
    assert names[0][0] == "what"
    gathered = [None] * 2
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": 0}, {"rank": 1}]
    mine = [None]
    dist.scatter_object_list(mine, ["a", "b"] if rank == 0 else None, src=0)
    assert mine == [["a", "b"][rank]]
    import torch.distributed.checkpoint as dcp
    loaded = {"weights": torch.zeros(4)}
    dcp.load(loaded, checkpoint_id="saved")
    assert loaded["weights"].tolist() == [0, 1, 2, 3]
    """
    + LOOP
    + """
    for step, loss in state.run(train_step, steps=9):
        if step == 5 and rank == 1 and once("killed"):
            die()
    open(f"pid-{rank}", "w").write(str(os.getpid()))
    if rank == 0:
        open("out", "w").write(repr(float(loss)))
    """
)


def test_what_collectives_said_at_the_start_is_told_to_a_newcomer_or_all_workers_restart_together(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    """A small object is in the journal of the rank; one of two megabytes is not."""
    losses = {}
    for name, size in {"small": 10, "large": 2 << 20, "undisturbed": 10}.items():
        folder = tmp_path / name
        folder.mkdir()
        dcp.save({"weights": torch.arange(4.0)}, checkpoint_id=folder / "saved", no_dist=True)
        if name == "undisturbed":
            (folder / "killed").touch()
        code, stderr, losses[name] = run_tiny(folder, fork_server, START_UP.replace("SIZE", str(size)))
        assert code == 0, stderr
        assert (folder / "killed").exists()
        assert ("cannot start alone" in stderr) == (name == "large"), stderr
    assert losses["small"] == losses["large"] == losses["undisturbed"]


def test_rank_killed_after_its_loop_does_not_leave_the_others_with_wrong_sums(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    body = (
        TRAINING
        + """
    for step, loss in state.run(train_step, steps=6):
        pass
    if rank == 1 and once("killed"):
        die()
    x = torch.ones(1)
    dist.all_reduce(x)
    open(f"sum-{rank}-{os.getpid()}", "w").write(str(x.item()))
    """
    )
    code, stderr, _ = run_tiny(tmp_path, fork_server, body)
    assert code == 0, stderr
    sums = [path.read_text() for path in tmp_path.glob("sum-*")]
    assert sums == ["2.0", "2.0"], f"{sums}\n{stderr}"


def test_uneven_data_ends_at_one_step_on_all_ranks(tmp_path: Path, fork_server: dict[str, str]) -> None:
    body = (
        TRAINING.replace("Data(10)", "Data(10 + 3 * rank)")
        + """
    last = 0
    for step, loss in state.run(train_step):
        last = step
    open(f"last-{rank}", "w").write(str(last))
    """
    )
    code, stderr, _ = run_tiny(tmp_path, fork_server, body)
    assert code == 0, stderr
    assert [(tmp_path / f"last-{rank}").read_text() for rank in (0, 1)] == ["10", "10"], stderr


def test_second_loop_continues_with_the_next_pass_over_the_data_and_a_fault_in_it_ends_the_run(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    body = (
        TRAINING
        + """
    steps = [step for _ in range(3) for step, loss in state.run(train_step)]
    assert steps == list(range(1, 31)), steps
    for step, loss in state.run(train_step):
        if step == 34 and rank == 1:
            open("there", "w").close()
            die()
    """
    )
    code, stderr, _ = run_tiny(tmp_path, fork_server, body)
    assert (tmp_path / "there").exists(), stderr
    assert code == 78, stderr
    assert stderr.count("a second loop begins, in which a fault ends the run") == 1, stderr
    assert "loop 4 cannot be resumed in loop 1" in stderr, stderr


def test_rank_killed_while_all_leave_by_break_starts_all_again(tmp_path: Path, fork_server: dict[str, str]) -> None:
    body = (
        TRAINING
        + """
    for step, loss in state.run(train_step):
        if step == 6:
            if rank == 1 and once("killed"):
                die()
            break
    x = torch.ones(1); dist.all_reduce(x); assert x.item() == 2
    assert state.committed_step == 6
    """
    )
    code, stderr, _ = run_tiny(tmp_path, fork_server, body)
    assert code == 0, stderr
    assert (tmp_path / "killed").exists()


def test_rank_that_skips_its_optimizer_is_found_before_weights_diverge(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    body = (
        TRAINING.replace(
            "        optimizer.step()\n", "        if rank == 0 or state.committed_step < 3: optimizer.step()\n"
        )
        + """
    for step, loss in state.run(train_step, steps=6):
        pass
    """
    )
    code, stderr, _ = run_tiny(tmp_path, fork_server, body)
    assert code == 75, stderr
    assert "without optimizer.step() while others stepped" in stderr


def test_loss_of_every_training_node_does_not_start_anew_in_silence(start: Callable[..., Run]) -> None:
    run = start(*ENDLESS, spares=2)
    run.wait_step(10)
    time.sleep(2)  # until the spares have heard of it
    for name in run.all("view")[-1]["places"]:
        run.cluster.kill_node(name)
    codes = run.end()
    assert set(codes.values()) == {77}, f"{codes}\n{run.cluster.log_tails()}"
    assert "training had come to step" in run.cluster.log_tails()


@pytest.mark.slow
def test_spare_node_survives_more_recoveries_than_are_allowed_without_progress(start: Callable[..., Run]) -> None:
    kills = [arg for index in range(7) for arg in ("--kill", f"{4 + 2 * index}:{index % 4}:backward")]
    run = start(*kills, spares=1, steps=20)
    assert set(run.end().values()) == {0}


def test_bit_flip_in_one_replica_is_reported_and_nothing_before_it(tmp_path: Path, fork_server: dict[str, str]) -> None:
    """DDP ships no parameter; that the other node's copy is the same is compared at every version."""
    body = (
        TRAINING
        + """
    for step, loss in state.run(train_step, steps=8):
        if step == 4 and rank == 1:
            with torch.no_grad():
                next(model.parameters()).view(torch.int32)[0, 0] ^= 1
    """
    )
    nodes = launch_two(tmp_path, fork_server, script(tmp_path, body))
    stderr = "".join(node.communicate(timeout=DEADLINE_S)[1] for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], stderr
    reported = [int(step) for step in re.findall(r"SILENT CORRUPTION\? rank .* first seen at step (\d+)", stderr)]
    assert reported, stderr
    assert min(reported) in (4, 5), stderr
