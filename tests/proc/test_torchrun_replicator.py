"""A Replicator under stock `torchrun --rdzv-backend=p2p`: all workers start anew and resume from memory."""

from __future__ import annotations

import re
from pathlib import Path

from torchrun_cluster import ROOT, torchruns

from cluster import Cluster
from outcome import compare

NUM_RANKS = 2
OPTIONS = ("--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-conf", "last_call_timeout=0.5,timeout=60")


def script(out: Path, *more: str) -> list[str]:
    small = ["--num-layers", "2", "--width", "64", "--context", "32", "--batch", "2", "--steps", "15"]
    return [str(ROOT / "examples" / "train_gpt.py"), "--out", str(out), *small, *more]


def test_run_whose_worker_and_whose_node_dies_resumes_from_memory_and_ends_bit_identical(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    sizes = {"num_training": 2, "num_spares": 0, "num_workers": 1}
    with Cluster(tmp_path / "run", script(tmp_path / "expected"), **sizes, environ=fork_server) as undisturbed:
        for node in undisturbed.running():
            assert node.process.wait(60.0) == 0, undisturbed.log_tails()
    folder = tmp_path / "torchrun"
    folder.mkdir()
    kills = ["--kill", "5:1:in_step", "--kill", "10:0:backward:node"]
    with torchruns(folder, "2", *OPTIONS, script=script(folder / "out", *kills)) as running:
        running.start("a")
        running.start("b")
        assert running.codes("ab", timeout_s=120.0) == [0, 0]
        logs = running.log("a") + running.log("b")
    assert (folder / "out" / "killed-5-1-in_step").exists()
    assert (folder / "out" / "killed-10-0-backward-node").exists()
    comparison = compare(folder / "out", tmp_path / "expected", NUM_RANKS)
    assert comparison.identical, "\n".join([*comparison.differences, logs])
    resumed = re.findall(r"rank (\d) resumed step (\d+) from ([a-z ]+) \((\d) steps lost\)", logs)
    assert len(resumed) == 2 * NUM_RANKS, logs
    assert {source for _, _, source, _ in resumed} == {"own vault", "buddy"}
    assert all(int(lost) <= 1 for *_, lost in resumed), logs
