"""Where the time of a run went: measured in every rank, kept in the run directory, shown."""

from p2pstate.observe.alone import RunMeter

__all__ = ["RunMeter"]
