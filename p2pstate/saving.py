"""When a version goes to disk as well: one rank's side. All ranks decide alike, by the gate's vote.

In: committed steps, votes, what the agent says of saves. Out: which captured version is set aside for the writer, and
the word to the agent that it may be written. Training waits for nothing here; only the end of the loop does.

Invariants: one save at a time; the version that is saved is one that every rank captured and that is protected; its
slots are not written before the agent has said that the save is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from p2pstate.settings import CheckpointPolicy
from p2pstate.stats import ProtectionStats
from p2pstate.types import Version
from p2pstate.worker.link import Link

__all__ = ["DUE", "NOT_DUE", "Saving"]

# What a rank says with its vote; the smallest counts: nothing begins while a rank still has a save under way.
BUSY, DUE, NOT_DUE = 0, 1, 2


class Saving:
    """Used from the training thread; only :meth:`_ended` comes from the link's."""

    def __init__(self, link: Link, policy: CheckpointPolicy, stats: ProtectionStats) -> None:
        self._stats = stats
        self.policy = policy
        self._link = link
        self._changed = threading.Condition()
        self._wanted = False  # the next version that is captured goes to disk
        self._under_way: Version | None = None
        self._announced = False
        self._is_late = False  # the save under way: the next one was due before its end
        self._saved: Version | None = None  # the newest that is on disk
        self._from_disk: int | None = None  # the step that this round resumed from disk
        self._asked = False  # by the agent: as soon as possible
        self._errors: dict[Version, str] = {}
        self._step = 0  # of the newest save that was begun
        self._began = time.monotonic()
        link.on_saved, link.on_save_now = self._ended, self._ask
        link.send("checkpoint", path=policy.path, stage=policy.stage, keep=policy.keep)

    def vote(self, step: int) -> int:
        """For the ballot on ``step``."""
        if self._wanted:
            return BUSY
        if (under_way := self._under_way) is not None:
            if not self._is_late and self._is_due(step):
                self._is_late = True
                self._stats.num_saves_late += 1
                self._link.send("save_late", version=list(under_way), seconds=time.monotonic() - self._began)
            return BUSY
        return DUE if self._asked or self._is_due(step) else NOT_DUE

    def _is_due(self, step: int) -> bool:
        """Whether an interval has passed since the newest save was begun."""
        policy = self.policy
        if policy.every_steps is not None:
            return step // policy.every_steps > self._step // policy.every_steps
        return policy.every_s is not None and time.monotonic() - self._began >= policy.every_s

    def voted(self, vote: int) -> None:
        self._wanted = self._wanted or vote == DUE

    def captures(self, version: Version) -> bool:
        """``version`` is about to be captured. True: it is the one to save, set its slots aside."""
        if not self._wanted:
            return False
        self._begin(version)
        return True

    def protected(self, version: Version | None) -> None:
        """Every rank knows that ``version`` is protected: it can be written now, if it is the one."""
        if version is not None and version == self._under_way and not self._announced:
            self._announced = True
            self._link.send("save", version=list(version), final=False)

    def gave_up(self, version: Version) -> None:
        """All ranks have given ``version`` up before it was protected: the next one is saved, if this was to be."""
        with self._changed:
            if version == self._under_way and not self._announced:
                self._wanted, self._under_way = True, None

    def resumed(self, step: int, *, from_disk: bool = False) -> None:
        """A round began at ``step``: whatever was under way has been given up."""
        with self._changed:
            self._from_disk = step if from_disk else None
            self._wanted, self._under_way = False, None
            self._step, self._began = step, time.monotonic()

    def save_last(self, version: Version, timeout_s: float, is_over: Callable[[], bool]) -> str:
        """At the end of the loop: have ``version``, which is protected, on disk. Returns what went wrong, if anything.

        Waits at most ``timeout_s``, for a save that is under way as well, and not beyond ``is_over``.
        """
        deadline = time.monotonic() + timeout_s

        def wait_for_end() -> bool:
            with self._changed:
                while self._under_way is not None and time.monotonic() < deadline and not is_over():
                    self._changed.wait(0.1)
                return self._under_way is None

        if self._under_way == version:
            self.protected(version)
        if not wait_for_end():
            return f"the save before did not end within {timeout_s:g} s"
        if self._saved == version or self._from_disk == version.step:
            return ""
        self._begin(version)
        self._announced = True
        self._link.send("save", version=list(version), final=True)
        if not wait_for_end():
            return f"it did not end within {timeout_s:g} s"
        return self._errors.get(version, "")

    def _begin(self, version: Version) -> None:
        with self._changed:
            self._asked = self._wanted = self._announced = self._is_late = False
            self._under_way = version
            self._step, self._began = version.step, time.monotonic()

    def _ask(self) -> None:
        self._asked = True

    def _ended(self, version: Version, error: str, name: str) -> None:
        with self._changed:
            if version != self._under_way:
                return
            self._under_way = None
            self._errors = {version: error}
            if error:
                self._stats.num_saves_failed += 1
            else:
                self._saved = version
                self._stats.num_saved += 1
                self._stats.saved_s.append(time.monotonic() - self._began)
            self._changed.notify_all()
