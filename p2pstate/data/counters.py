"""Counts of what a data set did in this process, which loader workers report with every batch.

In: ``count(name, amount)`` from caches and data sets. Out: totals since the process began.
Invariant: names are few and fixed; amounts only grow.
"""

from __future__ import annotations

import threading
from collections import defaultdict

__all__ = ["COUNTERS", "count"]

COUNTERS: defaultdict[str, float] = defaultdict(float)
_lock = threading.Lock()


def count(name: str, amount: float = 1) -> None:
    """Add to a total."""
    with _lock:
        COUNTERS[name] += amount
