"""What a person reads on the console about an event that a worker has told of. Pure, but for what was said before.

In: events. Out: a sentence each, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Sentences", "lost_with_the_run"]


class Sentences:
    def __init__(self) -> None:
        self._differing: set[str] = set()  # parts whose replicas were reported to differ

    def of(self, kind: str, rank: int | None, fields: Mapping[str, Any]) -> str | None:
        """Empty: nothing to read. None: it was reported before and is not recorded again."""
        if kind == "replicas_differ":
            if fields["part"] in self._differing:
                return None
            self._differing.add(fields["part"])
            return (
                f"SILENT CORRUPTION? rank {rank} and rank {fields['other']} do not hold the same bytes "
                f"any more in {fields['part']}, first seen at step {fields['version'][1]}"
            )
        if kind == "skipped":
            step = fields["step"]
            return (
                f"the batch for step {step} is left out: gradients of rank {rank} are NaN or infinite (on_nan='skip')"
            )
        if kind == "resized":
            return "; ".join(["another number of ranks", *fields["said"]])
        if kind == "resolved":
            found = "there is nothing on disk to resume: training starts anew"
            if fields["step"] is not None:
                found = f"step {fields['step']} is resumed from {fields['path']}"
            return ", ".join([f"{fields['reason']}: {found}", *(f"skipped {each}" for each in fields["skipped"])])
        if kind == "replicas_compared":
            if fields["done"] == "shipped":
                return f"{fields['text']}, though all should hold the same: kept as each rank's own from now on"
            return f"SILENT CORRUPTION? step {fields['step']}: {fields['text']}; nothing was changed"
        if kind == "lean":
            return str(fields["text"])
        if kind == "recovery":
            lost = fields["steps_lost"]
            step, source = fields["version"][1], fields["source"]
            return f"rank {rank} resumed step {step} from {source} ({lost} step{'s' * (lost != 1)} lost)"
        return ""


def lost_with_the_run(protected: int) -> str:
    """What there is in memory only when a run ends: ``protected``, the newest step that was protected; 0: none was."""
    if not protected:
        return ""
    return (
        f"; step {protected}, protected in memory, is lost with the run: Replicator(checkpoint=...) writes the newest "
        "whole version to disk before"
    )
