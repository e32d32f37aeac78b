"""What the operator knows of one Run, and what it may do, as values.

In: nothing. Out: Spec (what the user asks for), Record (what was decided before and stands in the Run's status), Pod,
Host and Observed (what the cluster says), the actions, Decision.

Invariants: frozen. Times are seconds since 1970, as Kubernetes tells them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Action",
    "Attempt",
    "CreatePod",
    "Decision",
    "DeletePod",
    "Failure",
    "Host",
    "Observed",
    "Phase",
    "Pod",
    "Quarantine",
    "QuarantineRule",
    "QuarantineWay",
    "Quarantined",
    "Record",
    "Spec",
    "WriteGone",
]


class Phase(enum.StrEnum):
    """Of a Run, for a person."""

    PENDING = "Pending"  # pods are being started, no view yet
    RUNNING = "Running"
    WAITING = "Waiting"  # for a node: none is left to take a lost one's place
    RESTARTING = "Restarting"  # all nodes have ended, and will be started again
    SUSPENDED = "Suspended"
    STOPPED = "Stopped"  # by p2prun stop
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        """Nothing is started any more."""
        return self in (Phase.STOPPED, Phase.SUCCEEDED, Phase.FAILED)


class QuarantineWay(enum.StrEnum):
    """What becomes of a host on which nodes of the run failed again and again."""

    TAINT = "Taint"
    CORDON = "Cordon"
    NONE = "None"


@dataclass(frozen=True, slots=True)
class QuarantineRule:
    """``after_failures`` within ``window_s`` are enough; never more than ``max_hosts`` at a time."""

    after_failures: int = 3
    window_s: float = 86400.0
    max_hosts: int = 1
    way: QuarantineWay = QuarantineWay.TAINT


@dataclass(frozen=True, slots=True)
class Spec:
    """A Run as its user wrote it; defaults are filled in by the schema."""

    namespace: str
    name: str
    uid: str
    generation: int
    num_nodes: int
    num_spares: int
    num_workers: int
    script: tuple[str, ...]
    key_secret: str
    min_nodes: int | None = None
    options: tuple[str, ...] = ()
    pod: Mapping[str, Any] = field(default_factory=dict)
    container: Mapping[str, Any] = field(default_factory=dict)
    max_restarts: int = 10
    suspended: bool = False
    quarantine: QuarantineRule = QuarantineRule()

    @property
    def num_pods(self) -> int:
        """Training nodes and spares."""
        return self.num_nodes + self.num_spares


@dataclass(frozen=True, slots=True)
class Attempt:
    """One life of the run, under a run id of its own. ``founded``: it has had a view, so only its members count."""

    number: int
    num_pods: int  # as its nodes were told; more than half of them decide the first view
    next_pod: int = 0  # pods below it may have been made
    founded: bool = False
    over_s: float | None = None  # since when no member is left

    @property
    def first_view_size(self) -> int:
        """So many nodes found a run."""
        return self.num_pods // 2 + 1


@dataclass(frozen=True, slots=True)
class Failure:
    """A pod that failed in a way that speaks against its host."""

    host: str
    pod: str
    why: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Quarantined:
    """``applied``: seen on the host; one that is missing afterwards was taken away by somebody."""

    host: str
    applied: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """What the operator has decided so far. It is written before it is acted upon."""

    phase: Phase = Phase.PENDING
    message: str = ""
    attempt: Attempt | None = None
    num_restarts: int = 0
    failures: tuple[Failure, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of the run. ``joined``: it was in the view when its host last told. ``leave_by_s``: it is being deleted,
    and has until then; if its host is out of reach it may still run afterwards."""

    name: str
    uid: str
    attempt: int
    number: int
    created_s: float
    host: str | None = None
    address: str | None = None
    joined: bool = False
    leave_by_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    reason: str = ""  # OOMKilled, Evicted, ...
    disrupted: bool = False  # evicted, preempted or drained: nobody's fault
    message: str = ""  # its last words
    held_up: str = ""  # why it does not start, as far as its host or the scheduler says

    @property
    def ended(self) -> bool:
        """Its containers run no more, for certain."""
        return self.ended_s is not None

    @property
    def leaving(self) -> bool:
        """It is being deleted."""
        return self.leave_by_s is not None


@dataclass(frozen=True, slots=True)
class Host:
    """A node of the cluster, as far as quarantine goes."""

    name: str
    quarantined: bool


@dataclass(frozen=True, slots=True)
class Observed:
    """``page``: what the run says of itself (``/status.json`` of a node); None if no node answers."""

    now_s: float
    pods: tuple[Pod, ...] = ()
    hosts: tuple[Host, ...] = ()
    gone: Mapping[str, int] = field(default_factory=dict)  # as it was written: pod -> microseconds since 1970
    page: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CreatePod:
    attempt: int
    number: int


@dataclass(frozen=True, slots=True)
class DeletePod:
    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class WriteGone:
    """For the pods' fencing command: name -> its agent is gone if it started before this (microseconds since 1970)."""

    entries: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Quarantine:
    host: str
    way: QuarantineWay


Action = CreatePod | DeletePod | WriteGone | Quarantine


@dataclass(frozen=True, slots=True)
class Decision:
    """``record`` is written first, then ``actions`` are taken, in any order and any number of times."""

    record: Record
    actions: tuple[Action, ...] = ()
