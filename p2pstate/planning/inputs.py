"""What a plan is computed from: values with units, defaults and checks. Pure.

In: numbers. Out: an `Inputs`, whose every field was checked. Invariants: times are seconds, sizes bytes, rates bytes
per second of one node. Known limits: the state is divided over all GPUs (FSDP); defaults are round assumptions for an
8-GPU node, not measurements (the storage presets too): who has measured gives the own values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from p2pstate.placement import MAX_COPIES
from p2pstate.planning.units import DAY_S

__all__ = ["STORAGE", "Inputs", "Storage"]

MAX_NODES = 100_000
LEAST, MOST = 1e-9, 1e21  # of any value: beyond them arithmetic ends before sense does


@dataclass(frozen=True, slots=True)
class Storage:
    """Where checkpoints go. ``outlives_node``: what a node wrote there can be read when the node is gone."""

    write_bytes_per_s: float  # of one node
    read_bytes_per_s: float  # of one node
    total_bytes_per_s: float  # of all nodes together
    outlives_node: bool


STORAGE = {
    "nvme": Storage(5e9, 10e9, math.inf, outlives_node=False),
    "fsx": Storage(1e9, 2e9, 100e9, outlives_node=True),
    "s3": Storage(0.5e9, 1e9, 200e9, outlives_node=True),
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """One cluster, one job. Raises ValueError, which names the field and says what it may be."""

    num_gpus: int
    gpu_mtbf_s: float
    gpus_per_node: int = 8
    num_params: float = 70e9
    bytes_per_param: float = 14.0  # bf16 weights, fp32 weights and two moments of Adam: 2 + 4 + 4 + 4
    measured_state_bytes: float | None = None
    step_s: float = 10.0
    storage: str = "fsx"
    measured_save_s: float | None = None  # a synchronous save of all ranks together
    measured_load_s: float | None = None
    interval_s: float | None = None  # of work between two checkpoints; None: the optimum
    snapshot_bytes_per_s: float = 100e9  # cards to host memory: what an asynchronous checkpoint stops training for
    restart_s: float = 600.0  # everything of a restart from disk except reading it
    vault_recovery_s: float = 15.0  # a process was lost: from its own node's memory
    buddy_recovery_s: float = 30.0  # a node was lost: everything except the transfer of its state
    overhead: float = 0.01  # part of a step by which copying after every step lengthens it
    copies: int = 1  # on other nodes
    link_bytes_per_s: float = 25e9  # what copies may use of a node's network
    price_per_node_hour: float = 98.32
    num_spares: int | None = None  # None: as many as are needed
    repair_s: float = DAY_S  # until a lost node is back, as a spare
    node_share: float = 1.0  # of all failures, the part that takes a node's memory; the rest are of processes
    rack_nodes: int = 8
    rack_share: float = 0.01  # of all failures, the part that takes a whole rack at once
    host_bytes_per_node: float | None = None  # memory there is for copies

    def __post_init__(self) -> None:
        zero_too = {"restart_s", "vault_recovery_s", "buddy_recovery_s", "overhead", "price_per_node_hour"}
        zero_too |= {"num_spares", "node_share", "rack_share", "measured_save_s", "measured_load_s"}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) or value is None:
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name not in zero_too):
                least = "zero or more" if field.name in zero_too else "more than zero"
                raise ValueError(f"{field.name} is {value:g}: it has to be {least}")
            if value and not LEAST <= value <= MOST:
                raise ValueError(f"{field.name} is {value:g}: it has to be from {LEAST:g} to {MOST:g}")
        for name in ("node_share", "rack_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is {getattr(self, name):g}: it is a part of all failures, from 0 to 1")
        if self.num_gpus > self.gpus_per_node and self.num_gpus % self.gpus_per_node:
            raise ValueError(
                f"{self.num_gpus} GPUs are not a whole number of nodes of {self.gpus_per_node}: change the number of "
                "GPUs, or of GPUs per node"
            )
        if self.num_nodes > MAX_NODES:
            raise ValueError(f"{self.num_nodes} nodes are more than the {MAX_NODES} that are planned for here")
        if self.copies > MAX_COPIES:
            raise ValueError(f"copies is {self.copies}: 1 to {MAX_COPIES} can be kept on other nodes")
        if self.storage not in STORAGE:
            raise ValueError(f"storage is {self.storage!r}: it is one of {', '.join(STORAGE)}")

    @property
    def num_nodes(self) -> int:
        return max(1, self.num_gpus // self.gpus_per_node)

    @property
    def state_bytes(self) -> float:
        if self.measured_state_bytes is not None:
            return self.measured_state_bytes
        return self.num_params * self.bytes_per_param

    @property
    def node_bytes(self) -> float:
        """What only this node has, of the state of the job."""
        return self.state_bytes / self.num_nodes

    @property
    def save_s(self) -> float:
        return self._storage_s(STORAGE[self.storage].write_bytes_per_s, self.measured_save_s)

    @property
    def load_s(self) -> float:
        return self._storage_s(STORAGE[self.storage].read_bytes_per_s, self.measured_load_s)

    def _storage_s(self, node_bytes_per_s: float, measured_s: float | None) -> float:
        if measured_s is not None:
            return measured_s
        return max(self.node_bytes / node_bytes_per_s, self.state_bytes / STORAGE[self.storage].total_bytes_per_s)

    @property
    def snapshot_s(self) -> float:
        return self.node_bytes / self.snapshot_bytes_per_s

    @property
    def copy_s(self) -> float:
        """Until a version has reached all its partners, at the speed of the link."""
        return self.copies * self.node_bytes / self.link_bytes_per_s

    @property
    def disk_recovery_s(self) -> float:
        return self.restart_s + self.load_s

    @property
    def memory_recovery_s(self) -> float:
        """Mean over failures of processes and of nodes."""
        from_buddy_s = self.buddy_recovery_s + self.node_bytes / self.link_bytes_per_s
        return self.node_share * from_buddy_s + (1 - self.node_share) * self.vault_recovery_s

    @property
    def unprotected_s(self) -> float:
        """After a node was lost: until its replacement has its state, and its wards' copies, again."""
        return self.buddy_recovery_s + self.node_bytes / self.link_bytes_per_s + self.copy_s
