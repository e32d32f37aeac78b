"""The command and the probes of examples/kubernetes/job in "pods": namespaces that find each other by one name."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from cluster import p2prun_command
from namespaces import Namespaces, why_not
from rendezvous.keys import make_key_file

yaml = pytest.importorskip("yaml")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.netns,
    pytest.mark.skipif(bool(reason := why_not()), reason=reason or ""),
]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WITHIN_S = 120.0


class Pods:
    """Pods of the Job. What Kubernetes gives them is given here: a name, an address, mounts, the service's records."""

    def __init__(self, folder: Path, count: int) -> None:
        job = yaml.safe_load((EXAMPLES / "kubernetes" / "job" / "job.yaml").read_text())
        (self._container,) = job["spec"]["template"]["spec"]["containers"]
        self._folder = folder
        self._namespaces = Namespaces(count, folder / "scratch")
        records = [f"{address} train\n" for address in self._namespaces.addresses]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *records]))
        make_key_file(str(folder / "run.key"))
        (folder / "bin").mkdir()
        (folder / "bin" / "p2prun").write_text(f'#!/bin/sh\nexec {shlex.join(p2prun_command())} "$@"\n')
        (folder / "bin" / "p2prun").chmod(0o755)
        self._environ = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)]),
            "OMP_NUM_THREADS": "1",
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._places: dict[str, int] = {}

    def _inside(self, place: int, pod: str, words: list[str]) -> list[str]:
        """A command as in the pod's container: its own /tmp, the key mounted, the service's name known."""
        mounts = {"hosts": "/etc/hosts", f"tmp-{pod}": "/tmp/own"}
        binds = [f'mount --bind "{self._folder}/{source}" {target}' for source, target in mounts.items()]
        setup = " && ".join(["mkdir -p /tmp/own", *binds, f"hostname {pod}", 'exec "$@"'])
        return [*self._namespaces.prefix(place), "unshare", "--uts", "sh", "-c", setup, "sh", *words]

    def _here(self, words: list[str]) -> list[str]:
        """Paths of the container, as they are on this machine; the script on what everybody may see."""
        paths = {
            "/run/secrets/p2pstate": str(self._folder),
            "/tmp/health": "/tmp/own/health",
            "--out=/tmp/out": f"--out={self._folder}/out",
            "examples/train_gpt.py": str(EXAMPLES / "train_gpt.py"),
        }
        for there, here in paths.items():
            words = [word.replace(there, here) for word in words]
        return words

    def start(self, place: int, pod: str, *script: str) -> None:
        (self._folder / f"tmp-{pod}").mkdir()
        given = {"POD_NAME": pod, "RUN_ID": "uid", "SERVICE": "train", "ZONE": ""}
        words = [*self._here(self._container["args"]), *script]
        with (self._folder / f"{pod}.log").open("wb") as log:
            command = self._inside(place, pod, words)
            environ: Mapping[str, str] = {**self._environ, **given}
            self.running[pod] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)
        self._places[pod] = place

    def probe(self, pod: str, kind: str) -> bool:
        """As the kubelet runs it. The container's /tmp is mounted anew for it."""
        words = self._here(self._container[kind]["exec"]["command"])
        command = self._inside(self._places[pod], pod, words)
        return subprocess.run(command, env=self._environ, capture_output=True, timeout=30).returncode == 0

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, f"not in time: {what}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self._folder.glob("*.log")))

    def kill(self, pod: str) -> None:
        for pid in self._namespaces.processes(self._places[pod]):
            os.kill(pid, signal.SIGKILL)
        self.running.pop(pod).wait(WITHIN_S)

    def close(self) -> None:
        for pod in list(self.running):
            self.kill(pod)
        self._namespaces.close()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    (tmp_path / "pods").mkdir()
    made = Pods(tmp_path / "pods", 3)
    yield made
    made.close()


def test_pods_of_the_job_find_each_other_are_probed_and_replaced(pods: Pods) -> None:
    small = ("--steps=1500", "--ddp", "--num-layers=1", "--width=32", "--context=16", "--batch=1")
    for index in range(3):
        pods.start(index, f"train-{index}-aaaaa", *small)
    names = list(pods.running)
    pods.wait_for(lambda: all(pods.probe(name, "startupProbe") for name in names), "all pods have started")
    pods.wait_for(lambda: all(pods.probe(name, "readinessProbe") for name in names), "all pods are ready")
    assert all(pods.probe(name, "livenessProbe") for name in names)
    log = pods.logs()
    trains = next(name for name in names if f"[{name}] rank" in log or f"view 1: training on {name}" in log)
    place = int(trains.split("-")[1])
    pods.wait_for(lambda: "is pid" in pods.logs(), "training has begun")
    pods.kill(trains)
    pods.start(place, f"train-{place}-bbbbb", *small)
    codes = {name: process.wait(WITHIN_S) for name, process in pods.running.items()}
    assert set(codes.values()) == {0}, pods.logs()
    assert f"node {trains} is gone" in pods.logs()
