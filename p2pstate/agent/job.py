"""What a node's workers run, and how much may go wrong before the run is given up.

In: the command line. Out: one frozen value. Times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Job"]


@dataclass(frozen=True, slots=True)
class Job:
    script: str
    args: tuple[str, ...]
    module: bool
    num_workers: int
    run_dir: str | None  # where events go
    log_dir: str | None  # and what ranks print
    quiet: bool
    max_restarts: int
    max_rounds_without_progress: int
    max_tries_per_step: int
    max_faults_per_hour: int
    give_up_s: float
    join_timeout_s: float
    spare_wait_s: float
    health_file: str | None
    http: str | None  # HOST:PORT of the page
    http_token: str | None
    otel: bool  # whether spans of incidents are sent
    num_rehearsed: int  # spares that have run the script under the first ranks of this node
    chaos: bool  # whether faults may be asked for from outside
    hang_floor_s: float  # 0: nobody looks for hung workers

    def program(self) -> dict[str, Any]:
        """What joins the message that gives a process its rank: what it is to run."""
        return {"script": self.script, "args": list(self.args), "module": self.module}
