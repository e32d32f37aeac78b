"""examples/slurm/train.sbatch on a real Slurm: nodes of an allocation that die, cancelling, and starting again."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster, end, why_not

from cluster import Cluster, EventReader
from outcome import compare

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(reason := why_not()), reason=reason or "")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = (str(EXAMPLES / "train_gpt.py"), "--ddp", "--num-layers", "1", "--width", "32", "--context", "16")
PATHS = [str(Path(sys.executable).parent), os.environ["PATH"]]  # jobs take p2prun from this environment
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "PATH": os.pathsep.join(PATHS),
    "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)]),
}
RUNNING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", num_nodes=3) as cluster:
        yield cluster


class Job:
    """One job of two training nodes and a spare. ``batch_file``: in place of the example, as an array."""

    def __init__(self, slurm: SlurmCluster, folder: Path, *script: str, batch_file: Path | None = None) -> None:
        self._slurm, self._folder = slurm, folder
        self.attempt(0)
        sbatch = ["sbatch", "--parsable", "--chdir", str(folder)]
        example = str(EXAMPLES / "slurm" / "train.sbatch")
        sbatch += [example] if batch_file is None else ["--export=NONE", "--array=5", str(batch_file)]
        run_dir = str(folder / "run")
        self.id = slurm.run(*sbatch, *script, "--out", str(folder), **ENVIRON, RUN_DIR=run_dir).strip()

    def attempt(self, number: int) -> Job:
        """From now on this is about the job's start number so many."""
        self._events, self._seen = EventReader(self._folder / "run" / f"attempt-{number}"), list[dict[str, Any]]()
        return self

    def output(self) -> str:
        return (self._folder / f"p2pstate-{self.id}.out").read_text()

    def view_at_step(self, step: int) -> dict[str, Any]:
        """The view in which this step was committed."""

        def reached() -> bool:
            self._seen += self._events.new()
            return any(event["event"] == "step" and event["step"] >= step for event in self._seen)

        self._slurm.wait_for(reached, f"step {step} of job {self.id}")
        return next(event for event in reversed(self._seen) if event["event"] == "view")

    def first_step(self) -> int:
        return min(event["step"] for event in self._seen if event["event"] == "step")

    def end(self) -> dict[str, str]:
        """What Slurm says when the job has ended."""
        return self._slurm.wait_for(
            lambda: job if (job := self._slurm.job(self.id))["JobState"] not in RUNNING else None,
            f"the end of job {self.id}",
        )


def test_slurm_job_goes_on_bit_for_bit_when_a_worker_and_a_nodes_whole_step_die(
    slurm: SlurmCluster, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    script = (*SCRIPT, "--steps", "120")
    (tmp_path / "faulted").mkdir()
    job = Job(slurm, tmp_path / "faulted", *script, "--kill", "10:1:backward")
    places = job.view_at_step(30)["places"]
    node = next(name for name in places if name != slurm.job(job.id)["BatchHost"])
    stepd = slurm.step_daemons(node)
    assert stepd
    end([*stepd, *slurm.processes(node, job.id)], signal.SIGKILL)

    undisturbed = Cluster(
        tmp_path / "undisturbed",
        [*script, "--out", str(tmp_path / "undisturbed")],
        num_training=2,
        num_spares=0,
        num_workers=1,
        environ={**ENVIRON, **fork_server},
    )
    with undisturbed as cluster:
        slurm.wait_for(lambda: not cluster.running(), "the undisturbed run ends")
    ended = job.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), job.output()
    assert (tmp_path / "faulted" / "killed-10-1-backward").exists()
    assert f"node {node} is gone" in job.output()
    compared = compare(tmp_path / "faulted", tmp_path / "undisturbed", num_ranks=2)
    assert compared.identical, compared.differences


def test_slurm_job_near_its_time_limit_is_queued_again_and_goes_on_and_a_cancelled_one_is_not(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    disk = ("--checkpoint", str(checkpoints), "--checkpoint-every", "10")
    batch_file = tmp_path / "train.sbatch"  # nothing is passed on to it: it makes its environment, which srun passes on
    environ = "".join(f"export {name}={value}\n" for name, value in {**ENVIRON, "RUN_DIR": tmp_path / "run"}.items())
    first, rest = (EXAMPLES / "slurm" / "train.sbatch").read_text().split("set -euo pipefail\n")
    batch_file.write_text(f"{first}{environ}set -euo pipefail\n{rest}")
    job = Job(slurm, tmp_path, *SCRIPT, "--steps", "100000", *disk, batch_file=batch_file)
    slurm.wait_for(lambda: any(checkpoints.glob("*/.metadata")), "a checkpoint is complete")
    slurm.run("scancel", "--signal=TERM", job.id)  # what --signal=TERM@120 makes Slurm do
    slurm.wait_for(lambda: slurm.job(job.id)["Restarts"] == "1", "the job is queued again")
    job.attempt(1).view_at_step(1)
    assert job.first_step() > 10
    slurm.run("scancel", job.id)
    ended = job.end()
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "1"), job.output()
    left = [task.cmdline() for node in slurm.nodes for task in slurm.processes(node, job.id)]
    assert not left
    assert "SIGTERM was sent to node" in job.output()


def test_slurm_fencing_recipe_reads_what_slurm_says(slurm: SlurmCluster) -> None:
    recipe = ("sh", str(EXAMPLES / "fencing" / "slurm.sh"))

    def ask(node: str, started_s: float) -> str:
        return slurm.run(*recipe, node, f"{node}:1", check=False, P2PSTATE_FENCE_STARTED_US=str(int(started_s * 1e6)))

    assert "n3 is up since" in ask("n3", time.time())
    assert "after its agent had started" in ask("n3", started_s=0)
    assert ask("n4", time.time()) == ""
