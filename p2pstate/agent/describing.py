"""What a run was started with, for its record: configuration and environment of one node, no secrets.

In: the node's configuration and job. Out: plain values.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from typing import Any

from p2pstate.agent.job import Job
from rendezvous.config import Config

__all__ = ["describe_start", "environment", "version_of"]

PACKAGES = ("p2pstate", "torch", "numpy", "pyzmq")


def describe_start(config: Config, job: Job) -> dict[str, Any]:
    return {
        "configuration": {
            "run id": config.run_id,
            "script": " ".join([*(["-m"] if job.module else []), job.script, *job.args]),
            "training nodes": config.num_nodes_max,
            "spare nodes": config.num_spares_expected,
            "workers per node": job.num_workers,
            "labels": ", ".join(f"{key}={value}" for key, value in sorted(config.labels.items())),
        },
        "environment": environment(),
    }


def environment() -> dict[str, Any]:
    """Of this host and this interpreter."""
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processors": os.cpu_count(),
        "Python": platform.python_version(),
        **{name: version_of(name) for name in PACKAGES},
    }


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"
