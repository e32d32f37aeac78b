"""Shipping alone: what a rank has captured goes to its buddy again, in p2pstate's own way, while nothing else runs.

In: a protected loop that has ended. Out: [began, ended, times] per try, like the floors it is held against. It
looks behind p2pstate's interface: what is measured is part of no step. All ranks call everything here at once.
"""

import time

import torch.distributed as dist
from overhead_floors import agree_on_times

from p2pstate import Replicator
from p2pstate.groups.registry import REGISTRY

__all__ = ["Shipping"]


class Shipping:
    """Raises RuntimeError for a version that does not arrive within ``deadline_s``."""

    def __init__(self, state: Replicator, deadline_s: float) -> None:
        self._state, self._protection, self._deadline_s = state._state, state._loop.protection, deadline_s
        self._times = 1
        began, ended, _ = self.once()
        self._times = agree_on_times(ended - began)

    def once(self) -> list[float]:
        protection, course, transport = self._protection, self._protection._course, REGISTRY.replication
        assert course.captured is not None, "nothing has been captured"
        assert transport is not None, "no connections"
        collected = protection.replicas.applied(self._state.collect())
        images = protection._capturer.capture(collected, course.captured, course.kept)  # in place of the one there is
        dist.barrier()
        began = time.monotonic()
        for _ in range(self._times):
            protection._shipper.ship(images, course.kept, transport, time.monotonic())
            if not protection._shipper.wait(self._deadline_s) or protection._shipper.complete != course.captured:
                raise RuntimeError(f"a version did not arrive within {self._deadline_s:.0f} s")
        return [began, time.monotonic(), self._times]
