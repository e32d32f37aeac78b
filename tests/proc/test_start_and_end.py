"""How ranks come into their loop and leave it, and what is noticed where they do not keep together."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from observed_runs import DEADLINE_S, launch, launch_two, script

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


def run_tiny(
    folder: Path, environ: dict[str, str], body: str, workers: int = 2, give_up_s: int = 3
) -> tuple[int, str, str]:
    """One node, ``workers`` ranks, plain script. Returns (exit code, standard error, what the script wrote to out)."""
    options = ("--nproc-per-node", str(workers), "--name", "n", "--give-up-after", str(give_up_s))
    process = launch(folder, environ, *options, script(folder, body))
    _, stderr = process.communicate(timeout=DEADLINE_S)
    out = folder / "out"
    return process.returncode, stderr, out.read_text() if out.exists() else ""


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
    """Loops with batches for no step, without any batch, with a step and a rest, for no step again, and with whole
    steps. After all but the second and the last all start again, and their rehearsals have uneven data as well."""
    body = (
        TRAINING.replace("optimizer.step()", "if data.position % window: return\n        optimizer.step()")
        + """
    last = []
    for length, window in ((2, 4), (0, 1), (5, 4), (2, 4), (10, 1)):
        data.length = length + 3 * rank
        for step, loss in state.run(train_step):
            pass
        last.append(state.committed_step)
    open(f"last-{rank}", "w").write(str(last))
    """
    )
    code, stderr, _ = run_tiny(tmp_path, fork_server, body, give_up_s=60)
    assert code == 0, stderr
    assert [(tmp_path / f"last-{rank}").read_text() for rank in (0, 1)] == ["[0, 0, 1, 1, 11]"] * 2, stderr
    assert stderr.count("interrupted: the data of some rank ended before the first step of training loop 1") == 1
    assert stderr.count("rank 0 has no batch for the first step of training loop 2") == 1
    assert "training loop 4 has no protected step yet" in stderr
    for step in (1, 11):
        assert f"the data of rank 0 ended after step {step}" in stderr, "rank 0 waited until its vote's time was up"
    assert "not every rank voted" not in stderr


LOOPS = """
    ended = []
    for epoch in range(3):
        for step, loss in state.run(train_step):
            if rank == 1 and step in KILLS and once(f"killed-{step}"):
                die()
        if rank == 1 and epoch == 1 and KILLS and once("killed-between"):
            die()
        if KILLS and state.rehearsing and once("killed-by-ending"):
            sys.exit()
        optimizer.param_groups[0]["lr"] *= 0.5
        x = torch.ones(1); dist.all_reduce(x); assert state.rehearsing or x.item() == 2
        ended.append(state.committed_step)
    assert ended == [10, 20, 30], ended
    if KILLS:
        data, head = Data(8), torch.nn.Linear(4, 4)
        try:
            p2pstate.Replicator(head, torch.optim.SGD(head.parameters(), lr=0.1), data=data)
        except p2pstate.errors.ConfigError as error:
            assert "is not given the DistributedDataParallel of the one before" in str(error), error
        else:
            raise AssertionError("a model of the first loops was forgotten")
    tuning = torch.optim.AdamW(model.parameters(), lr=0.01)
    other = p2pstate.Replicator(model, tuning, data=Data(8))

    def tune(batch):
        loss = model(batch).cos().mean()
        loss.backward()
        tuning.step()
        tuning.zero_grad()
        return loss.detach()

    steps = []
    for step, loss in other.run(tune):
        steps.append(step)
        if rank == 1 and step == 5 and KILLS and once("killed-other"):
            die()
    assert steps[-1] == other.committed_step == 8, steps
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    open(f"{NAME}-{rank}", "w").write(repr([weights, optimizer.param_groups[0]["lr"]]))
"""


def test_loops_one_after_another_are_resumed_in_the_one_that_was_under_way(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    """Epochs as loops of their own, then another Replicator; killed in loops, between them and right after; a newcomer
    ends its script between loops that it passes by."""
    ends = {}
    for name, kills in (("undisturbed", ()), ("faulted", (11, 25))):
        body = TRAINING + f"\n    KILLS, NAME = {kills}, {name!r}" + LOOPS
        code, stderr, _ = run_tiny(tmp_path, fork_server, body)
        assert code == 0, stderr
        ends[name] = [(tmp_path / f"{name}-{rank}").read_text() for rank in range(2)]
    killed = {path.name for path in tmp_path.glob("killed-*")}
    names = {"killed-11", "killed-25", "killed-between", "killed-other", "killed-by-ending"}
    assert killed == names, f"{killed}\n{stderr}"
    assert "cannot start alone (the script ended after training loop 1, but the run is in loop 2" in stderr
    assert ends["faulted"] == ends["undisturbed"], stderr


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
