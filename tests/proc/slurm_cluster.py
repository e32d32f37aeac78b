"""A real Slurm on one machine: a controller and a slurmd per node, each in namespaces of its own.

In: how many nodes, a folder. Out: sbatch, scontrol, squeue as a user on the controller's host has them, processes of
jobs to kill, nodes to cut off. Needs root, iproute2, util-linux and Slurm (Debian: slurm-wlm). Nothing is shared with
a Slurm that the machine may have: configuration, state, ports and host names are in the folder or in the namespaces.
Leaving the context ends every daemon and every process of a job.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from namespaces import NETWORK, Namespaces
from namespaces import why_not as why_no_namespaces

UP_WITHIN_S = 120.0
COMMAND_S = 30.0

CONFIG = """
ClusterName=test
SlurmctldHost=controller({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmdTimeout=8
KillWait=15
ReturnToService=2
"""


def why_not() -> str | None:
    """Why there is no Slurm here, or None."""
    missing = [tool for tool in ("slurmctld", "slurmd", "sbatch", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian and Ubuntu: apt-get install slurm-wlm)"
    return why_no_namespaces()


class SlurmCluster:
    """Use as a context manager."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.nodes = [f"n{index + 1}" for index in range(num_nodes)]
        for directory in ("state", *(f"spool-{name}" for name in self.nodes)):
            (folder / directory).mkdir()
        self._names = ["controller", *self.nodes]
        addresses = {name: f"{NETWORK}.{index + 1}" for index, name in enumerate(self._names)}
        lines = [f"{address} {name}\n" for name, address in addresses.items()]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        nodes = [f"NodeName={name} NodeAddr={addresses[name]} CPUs=1\n" for name in self.nodes]
        partition = f"PartitionName=all Nodes=n[1-{num_nodes}] Default=YES MaxTime=INFINITE State=UP\n"
        text = CONFIG.format(network=NETWORK, folder=folder)
        (folder / "slurm.conf").write_text("".join([text, *nodes, partition]))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # looked for at start, though nothing uses it
        self._environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._namespaces = Namespaces(len(self._names), folder / "scratch")
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        try:
            self._start("controller", "slurmctld", "-D")
            for name in self.nodes:
                self._start(name, "slurmd", "-D", "-N", name)
            self.wait_for(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "all nodes are idle")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _inside(self, name: str, *command: str) -> list[str]:
        """A command on a node: its own host name and list of hosts, besides what `Namespaces` separates."""
        setup = f'hostname {name} && mount --bind "{self.folder}/hosts" /etc/hosts && exec "$@"'
        prefix = self._namespaces.prefix(self._names.index(name))
        return [*prefix, "unshare", "--uts", "sh", "-c", setup, "sh", *command]

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    self._inside(name, *command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self._environ
                )
            )

    def run(self, *command: str, check: bool = True, **environ: str) -> str:
        """A command on the controller's host; its standard output."""
        done = subprocess.run(
            self._inside("controller", *command),
            env={**self._environ, **environ},
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %t", check=False).splitlines()
        return dict(line.split() for line in lines)

    def job(self, job: str) -> dict[str, str]:
        """What Slurm knows about a job, for example its JobState, ExitCode and Restarts."""
        fields = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(field.partition("=")[::2] for field in fields if "=" in field)

    def wait_for(self, condition: Callable[[], Any], what: str, within_s: float = UP_WITHIN_S) -> Any:
        """Its first true value. AssertionError with the daemons' words when there is none in time."""
        deadline = time.monotonic() + within_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {within_s} s: {what}\n{self.log_tails()}"
            time.sleep(0.1)
        return found

    def log_tails(self, num_lines: int = 15) -> str:
        paths = sorted(path for pattern in ("*.out", "*.log") for path in self.folder.glob(pattern))
        return "\n".join(
            "\n".join([f"--- {path}", *path.read_text(errors="replace").splitlines()[-num_lines:]]) for path in paths
        )

    def processes(self, name: str, job: str | None = None) -> list[psutil.Process]:
        """All that live on a node: its daemon, Slurm's steps and their tasks; or the tasks of one job."""
        found = []
        for pid in self._namespaces.processes(self._names.index(name)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if job is None or process.environ().get("SLURM_JOB_ID") == job:
                    found.append(process)
        return found

    def step_daemons(self, name: str) -> list[psutil.Process]:
        return [process for process in self.processes(name) if process.name().startswith("slurmstepd")]

    def cut(self, name: str) -> None:
        """From now on no packet enters or leaves the node."""
        self._namespaces.cut(self._names.index(name))

    def close(self) -> None:
        deadline = time.monotonic() + COMMAND_S
        while (left := [process for name in self._names for process in self.processes(name)]) and (
            time.monotonic() < deadline
        ):
            end(left, signal.SIGKILL)  # again and again: a daemon may have started something meanwhile
            for daemon in self._daemons:
                daemon.poll()
            time.sleep(0.05)
        self._namespaces.close()


def end(processes: Iterable[psutil.Process], sign: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(sign)
