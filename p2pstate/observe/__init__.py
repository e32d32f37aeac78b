"""Where the time of a run went: measured in every rank, kept in the run directory, shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pstate.observe.alone import RunMeter

__all__ = ["RunMeter"]


def __getattr__(name: str) -> Any:
    # Agents and workers import parts of this package, which the meter alone builds upon.
    if name == "RunMeter":
        from p2pstate.observe.alone import RunMeter

        return RunMeter
    raise AttributeError(f"module 'p2pstate.observe' has no attribute {name!r}")
