"""Scripts of the documentation as they stand: the quick start, also with a killed rank; the loop of adopting.md."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 120.0
KILL_AT_STEP = 60


def last_loss(folder: Path, script: Path, environ: dict[str, str], *, kill: bool) -> str:
    """What rank 0 prints for the last step."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with Cluster(
        folder, [str(script)], num_training=2, num_spares=0, num_workers=1, environ={**environ, **paths}
    ) as run:
        deadline = time.monotonic() + WITHIN_S
        pids: dict[int, int] = {}
        killed = False
        while run.running():
            assert time.monotonic() < deadline, run.log_tails()
            for event in run.events.new():
                if event["event"] == "worker_started":
                    pids[event["rank"]] = event["pid"]
                if kill and not killed and event["event"] == "step" and event["step"] >= KILL_AT_STEP:
                    run.kill_process(pids[1])
                    killed = True
            time.sleep(0.01)
        assert killed == kill, "the run was over before a rank could be killed"
        assert set(run.exit_codes().values()) == {0}, run.log_tails()
        output = "".join(path.read_text() for path in folder.glob("logs/*/*.log"))
    losses = set(re.findall(r"step 250 (loss .*)", output))
    assert len(losses) == 1, output
    return losses.pop()


def test_quickstart_script_ends_with_the_same_loss_when_a_rank_is_killed(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    found = re.search(r"<!-- file: (\S+) -->\n```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    script = tmp_path / found.group(1)
    assert "time.sleep(0.1)" in found.group(2)  # for people: the test does not wait
    script.write_text(found.group(2).replace("time.sleep(0.1)", "time.sleep(0)"))
    undisturbed = last_loss(tmp_path / "first", script, fork_server, kill=False)
    assert last_loss(tmp_path / "second", script, fork_server, kill=True) == undisturbed


BUILD = """
import torch
from torch import nn

from p2pstate.data import Loader, Sampler, Shuffled


def build():
    model = nn.parallel.DistributedDataParallel(Scalar())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    loader = Loader(torch.ones(8000, 1), batch_sampler=Sampler(Shuffled(8000), batch_size=8))
    return model, optimizer, scheduler, loader


class Scalar(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)

    def forward(self, batch):
        return super().forward(batch).square().mean()


def log(step, loss):
    if step == 20:
        print(f"step {step} is the last")

"""


def test_adopting_loop_runs_as_it_stands_with_the_checkpoint_argument_too(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    page = (ROOT / "docs" / "adopting.md").read_text().partition("## 4. Everything")[2]
    found = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    line = re.search(r"^state = .*$", (ROOT / "docs" / "checkpoints.md").read_text(), re.MULTILINE)
    assert line is not None
    with_disk = line.group(0).replace("net, optimizer", "model, optimizer, scheduler, data=loader")
    assert with_disk != line.group(0)
    assert "steps=1000" in found.group(1)
    code = re.sub(r"^state = .*$", with_disk, found.group(1).replace("steps=1000", "steps=20"), flags=re.MULTILINE)
    script = tmp_path / "train.py"
    script.write_text(BUILD + code.replace("ckpt/", str(tmp_path / "ckpt")))
    environ = {**fork_server, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    folder = tmp_path / "run"
    with Cluster(folder, [str(script)], num_training=1, num_spares=0, num_workers=1, environ=environ) as run:
        deadline = time.monotonic() + WITHIN_S
        while run.running():
            assert time.monotonic() < deadline, run.log_tails()
            time.sleep(0.05)
        assert set(run.exit_codes().values()) == {0}, run.log_tails()
    assert "step 20 is the last" in "".join(path.read_text() for path in folder.glob("logs/*/*.log"))
    assert list((tmp_path / "ckpt").glob("*/.metadata"))
