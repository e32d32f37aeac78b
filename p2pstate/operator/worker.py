"""Which Run to look at next: those that something happened to, and each every few seconds.

In: names of Runs (from watches, on any thread). Out: calls of a function, one at a time, on a thread of its own.

Invariants: a Run on which something happened is looked at soon; one whose look failed is looked at again later, ever
less often; none waits for another one's back-off.
Limits: one thread: a Run whose nodes do not answer at their page holds up the others for a few seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from p2pstate.operator.cluster import ApiError
from p2pstate.operator.decide import backoff_s

__all__ = ["Key", "Worker"]

Key = tuple[str, str]  # namespace, name

AGAIN_S = 5.0
SETTLE_S = 0.2  # what happens within it is one look
LOG = logging.getLogger("p2pstate.operator")


class Worker:
    """``look``: reconcile one Run; ``names``: all there are."""

    def __init__(self, look: Callable[[Key], None], names: Callable[[], Iterable[Key]]) -> None:
        self._look, self._names = look, names
        self._due_s: dict[Key, float] = {}
        self._num_failed: dict[Key, int] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="p2pstate-operator", daemon=True)

    def start(self) -> None:
        """Begin with every Run there is."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End after the look that is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def happened(self, key: Key) -> None:
        """Something of this Run has changed. From any thread."""
        with self._changed:
            if self._num_failed.get(key, 0) == 0:
                soon_s = time.monotonic() + SETTLE_S
                self._due_s[key] = min(soon_s, self._due_s.get(key, soon_s))
                self._changed.notify()

    def _run(self) -> None:
        listed_s = 0.0
        while not self._closed:
            if (now := time.monotonic()) >= listed_s:
                listed_s = now + AGAIN_S
                self._list()
            key = self._next(listed_s)
            if key is not None:
                self._try(key)

    def _list(self) -> None:
        try:
            names = set(self._names())
        except ApiError as error:
            LOG.warning("the list of Runs: %s", error)
            return
        except Exception:  # a token that cannot be read, an answer that is no list: no reason to stop looking
            LOG.exception("the list of Runs")
            return
        with self._changed:
            now = time.monotonic()
            self._due_s = {key: self._due_s.get(key, now) for key in names}
            self._num_failed = {key: count for key, count in self._num_failed.items() if key in names}

    def _next(self, until_s: float) -> Key | None:
        """A Run whose time has come; None when ``until_s`` comes first, or at the end."""
        with self._changed:
            while not self._closed and (now := time.monotonic()) < until_s:
                first = min(self._due_s, key=lambda key: self._due_s[key], default=None)
                if first is not None and self._due_s[first] <= now:
                    self._due_s[first] = now + AGAIN_S
                    return first
                wake_s = until_s if first is None else min(until_s, self._due_s[first])
                self._changed.wait(wake_s - now)
        return None

    def _try(self, key: Key) -> None:
        try:
            self._look(key)
        except ApiError as error:
            LOG.warning("Run %s/%s: %s; again in %g s", *key, error, self._put_off(key))
        except Exception:  # of one Run, and no reason to leave the others alone
            LOG.exception("Run %s/%s: again in %g s", *key, self._put_off(key))
        else:
            with self._changed:
                self._num_failed.pop(key, None)

    def _put_off(self, key: Key) -> float:
        """-> for how many seconds."""
        with self._changed:
            failed = self._num_failed[key] = self._num_failed.get(key, 0) + 1
            self._due_s[key] = time.monotonic() + backoff_s(failed)
        return backoff_s(failed)
