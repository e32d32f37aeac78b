"""What every rank of a run has to ask for alike, and the check that all did.

In: arguments of a Replicator. Out: one frozen value, valid, and the same on all ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from p2pstate.errors import ConfigError
from p2pstate.finite import POLICIES
from p2pstate.placement import MAX_COPIES

ON_CORRUPTION = ("report", "stop", "repair")

__all__ = ["Asked", "CheckpointPolicy", "Settings"]


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """``every_steps`` or ``every_s``: how often a version is written below ``path``, a directory or a URL; ``keep``
    complete ones stay. ``stage``: each node's own folder, see durable/remote.py.

    Raises ValueError for a value that has no meaning.
    """

    path: str
    every_steps: int | None
    every_s: float | None
    keep: int
    stage: str = ""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("checkpoint='': name a directory or a URL, or leave checkpoint= out")
        if type(self.keep) is not int or self.keep < 1:
            raise ValueError(f"checkpoint_keep={self.keep!r}: keep 1 or more")
        if self.every_s is not None and self.every_s <= 0:
            raise ValueError(f"checkpoint_every={self.every_s} s: give a time above 0")
        if self.every_steps is not None and (type(self.every_steps) is not int or self.every_steps < 1):
            raise ValueError(f"checkpoint_every={self.every_steps!r}: give 1 or more steps, or a timedelta")
        if self.path.startswith("memory://"):
            raise ValueError(
                f"checkpoint={self.path!r} is memory of the one process that writes, and ends with it: give storage "
                "that all nodes share, or leave checkpoint= out"
            )


@dataclass(frozen=True, slots=True)
class Asked:
    """What one rank brings into a round. ``lean``: whether there is no copy on the own node, None if it joins the run
    and does not know; ``why_not_full``: why the node of one that joins has no memory for it, empty if it has."""

    settings: Settings
    sizes: tuple[int, int]  # of what this rank has: see RankNeed
    lean: bool | None
    why_not_full: str
    replicas: list[Any]  # what it knows of leaves that are not alike: see Replicas.pack


@dataclass(frozen=True, slots=True)
class Settings:
    """See Replicator. Raises ValueError for a value that has no meaning."""

    every: int | Literal["auto"] = 1
    max_overhead: float = 0.02
    copies: int = 1
    lean: bool | Literal["auto"] = "auto"
    verify_replicas: int = 0
    on_corruption: str = "report"
    on_nan: str = "ignore"
    nan_rollback: int = 1
    checkpoint: CheckpointPolicy | None = None

    def __post_init__(self) -> None:
        if self.every != "auto" and (type(self.every) is not int or self.every < 1):
            raise ValueError(f"every={self.every!r}: capture a version every 1 or more steps, or give 'auto'")
        if not 0 <= self.max_overhead < 1:
            raise ValueError(f"max_overhead={self.max_overhead}: a fraction of the step time, 0 or more and below 1")
        if self.every == "auto" and self.max_overhead == 0:
            raise ValueError("every='auto' finds the interval that costs at most max_overhead=: give one above 0")
        if self.copies not in range(1, MAX_COPIES + 1):
            raise ValueError(
                f"copies={self.copies}: 1 to {MAX_COPIES} copies can be kept besides the own node's, each on another "
                "node; as many nodes may be lost at once"
            )

        if self.on_nan not in POLICIES:
            raise ValueError(f"on_nan={self.on_nan!r}: give one of {', '.join(map(repr, POLICIES))}")
        if self.on_nan == "rollback" and self.checkpoint is None:
            raise ValueError(
                "on_nan='rollback' goes back to a checkpoint, for memory holds the last two versions only: give "
                "checkpoint=, or leave such batches out with on_nan='skip'"
            )
        if self.nan_rollback < 1:
            raise ValueError(f"nan_rollback={self.nan_rollback}: go back 1 or more checkpoints")
        if self.checkpoint is not None and self.nan_rollback > self.checkpoint.keep:
            raise ValueError(
                f"nan_rollback={self.nan_rollback} goes back more checkpoints than checkpoint_keep="
                f"{self.checkpoint.keep} keeps"
            )
        if self.verify_replicas < 0:
            raise ValueError(f"verify_replicas={self.verify_replicas}: compare every 1 or more steps, or 0 for never")
        if self.on_corruption not in ON_CORRUPTION:
            choices = ", ".join(map(repr, ON_CORRUPTION))
            raise ValueError(f"on_corruption={self.on_corruption!r}: give one of {choices}")
        if self.on_corruption != "report" and not self.verify_replicas:
            raise ValueError(
                f"on_corruption={self.on_corruption!r} acts on what verify_replicas= finds: say every how many steps"
            )
        if self.lean is not True and self.lean is not False and self.lean != "auto":
            raise ValueError(f"lean={self.lean!r}: give True, False or 'auto'")
        if self.lean is True and self.checkpoint is not None:
            raise ValueError(
                "lean=True keeps no copy on the own node, and checkpoint= writes from that one: leave one of them out"
            )

    def pack(self) -> dict[str, Any]:
        """What all ranks are to ask for alike: not the stage, which each node may have elsewhere."""
        packed = asdict(self)
        if self.checkpoint is not None:
            del packed["checkpoint"]["stage"]
        return packed

    def check_same(self, rank: int, theirs: dict[str, Any], their_rank: int) -> None:
        """Raises ConfigError when this rank and another one ask for different things."""
        mine = self.pack()
        different = [name for name in mine if mine[name] != theirs.get(name)]
        if different:
            name = different[0]
            raise ConfigError(
                f"rank {rank} asks for {name}={mine[name]!r} and rank {their_rank} for {name}={theirs.get(name)!r}: "
                "give Replicator(...) the same arguments on every rank"
            )
