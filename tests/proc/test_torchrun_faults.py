"""`torchrun --rdzv-backend=p2p` with an unchanged script: what dies, and what goes on. No TCPStore anywhere."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from torchrun_cluster import kill, torchruns

ELASTIC = ("--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-conf", "last_call_timeout=0.5,timeout=60")


def test_run_survives_a_worker_a_late_joiner_and_the_node_all_others_contacted_first(tmp_path: Path) -> None:
    with torchruns(tmp_path, "2:3", *ELASTIC) as running:
        running.start("a")
        running.wait(lambda: "listens at" in running.log("a"), "node a, which listens at the first contact")
        running.start("b")
        running.wait(running.training("ab"), "training on a and b")
        kill(running.worker("b"))
        running.wait(running.training("ab"), "training on a and b again")
        running.start("c")
        running.wait(running.training("abc"), "training on all three")
        orphan = running.worker("a")
        kill(running.nodes["a"].pid, running.agent("a"))
        running.wait(running.training("bc"), "training without a")
        running.wait(lambda: not psutil.pid_exists(orphan), "the end of the worker that a left behind")
        running.stop()
        assert running.codes("bc") == [0, 0]


@pytest.mark.slow
def test_agent_killed_alone_comes_back_as_a_new_incarnation(tmp_path: Path) -> None:
    with torchruns(tmp_path, "2", *ELASTIC) as running:
        running.start("a")
        running.start("b")
        running.wait(running.training("ab"), "training on a and b")
        kill(running.agent("a"))
        running.wait(lambda: "joins anew" in running.log("a"), "a's new agent")
        running.wait(lambda: running.log("b").count("view") >= 2, "the next view")
        running.wait(running.training("ab"), "training on a and b again")
        running.stop()
        assert running.codes("ab") == [0, 0]


@pytest.mark.slow
def test_torchrun_killed_alone_has_its_workers_ended_by_its_agent_and_a_spare_steps_in(tmp_path: Path) -> None:
    with torchruns(tmp_path, "2", *ELASTIC) as running:
        running.start("a")
        running.start("b")
        running.wait(running.training("ab"), "training on a and b")
        running.start("c")
        running.wait(lambda: "spare c" in running.log("c"), "c as a spare")
        worker, agent = running.worker("a"), running.agent("a")
        kill(running.nodes["a"].pid)
        running.wait(running.training("bc"), "training on b and c")
        running.wait(lambda: not psutil.pid_exists(worker) and not psutil.pid_exists(agent), "the end of node a")
        assert "its torchrun has ended" in running.log("b")
        running.stop()
        assert running.codes("bc") == [0, 0]


@pytest.mark.slow
def test_spare_exits_with_the_verdict_of_a_run_that_fails_for_good_and_of_one_that_ends_well(tmp_path: Path) -> None:
    for end, code in (("fail", 1), ("stop", 0)):
        folder = tmp_path / end
        folder.mkdir()
        with torchruns(folder, "2", *ELASTIC, "--max-restarts", "0") as running:
            for name in "abc":
                running.start(name)
            running.wait(lambda: any("step" in line for line in running.lines()), "training")
            (folder / "out" / end).touch()
            codes = running.codes("abc")
            assert all(found == code for found in codes), codes
            if end == "fail":
                assert any("--max-restarts 0" in running.log(name) for name in "abc")
                assert any("the run has ended" in running.log(name) for name in "abc")


@pytest.mark.slow
def test_torchrun_that_is_asked_to_end_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    with torchruns(tmp_path, "2:3", *ELASTIC) as running:
        for name in "abc":
            running.start(name)
        running.wait(running.training("abc"), "training on all three")
        running.nodes["b"].send_signal(signal.SIGTERM)
        running.wait(running.training("ac"), "training without b")
        running.stop()
        assert running.codes("ac") == [0, 0]
