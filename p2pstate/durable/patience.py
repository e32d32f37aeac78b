"""Storage that is slow or does not answer: waiting for it aloud, and not for ever.

In: what is asked of storage, a deadline. Out: the answer, a sentence on standard error now and then while it is waited
for, or TimeoutError. Known limit: a call that was given up stays in its thread until storage answers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from p2pstate.groups.waiting import Abandoned, call

__all__ = ["answer_by"]

T = TypeVar("T")

FIRST_SAID_S = 10.0  # then after twice the time, and so on


def answer_by(deadline: float, function: Callable[[], T], what: str) -> T:
    """``deadline``: monotonic seconds; ``what``: as in "waiting for WHAT". Raises TimeoutError, or what it raises."""
    began = time.monotonic()
    say_at_s = FIRST_SAID_S

    def is_over() -> bool:
        nonlocal say_at_s
        now = time.monotonic()
        if now - began >= say_at_s:
            left = f"{max(0.0, deadline - now):.0f} s more at most"
            print(f"p2pstate: waiting for {what} since {now - began:.0f} s ({left})", file=sys.stderr, flush=True)
            say_at_s *= 2
        return now >= deadline

    try:
        return call(function, is_over, "storage")
    except Abandoned:
        raise TimeoutError(f"{what} did not come within {time.monotonic() - began:.0f} s") from None
