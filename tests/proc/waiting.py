"""Waits of process tests, each with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

_TAIL_CHARS = 4000


def wait_until(condition: Callable[[], object], what: str, timeout_s: float, logs: Iterable[Path]) -> None:
    """AssertionError with the ends of ``logs`` if ``condition`` does not hold in time."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            tails = "\n".join(f"--- {path.stem}\n{path.read_text()[-_TAIL_CHARS:]}" for path in logs)
            raise AssertionError(f"{what} did not happen within {timeout_s:g} s\n{tails}")
        time.sleep(0.05)
