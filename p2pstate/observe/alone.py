"""The meter alone, around the loop of any PyTorch script: where the time of a run goes today, without p2pstate.

In: a few ``with`` blocks in a script (under torchrun, Slurm, or by itself), a directory. Out: ``events-rankN.jsonl`` in
it, which ``p2pstate report`` reads like the ones of p2prun, and :meth:`RunMeter.goodput`.

Invariants: every second is in one category, from the start of the process that makes its first meter; a process that
dies is gone on from in the same file, so that the time until its successor's first step is recovery, and steps done for
the second time are repeated ones; the restart is a failure of the run. A full, slow or unwritable disk costs the
record, never the run.
Known limits: one directory belongs to one run, however often it is restarted: the time between two attempts counts. A
step that was under way when a process died counts as recovery.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from p2pstate.agent.events import EventLog
from p2pstate.agent.output import Writer
from p2pstate.observe.goodput import Goodput
from p2pstate.observe.meter import Meter

__all__ = ["RunMeter"]

T = TypeVar("T")

BEGINNINGS = ("startup", "recovery.start")  # of a run, of a process after another one's death

_counts_process = True  # the next meter begins where the process did


class RunMeter:
    """One per process::

        meter = RunMeter("runs/today")
        for number, batch in enumerate(meter.fetching(loader), start=first):
            with meter.step(number):
                train(batch)
            if number % 100 == 0:
                with meter.saving():
                    torch.save(...)
        meter.close()

    ``rank``: by default from the environment (``RANK``, ``SLURM_PROCID``), else 0. Used from the training thread only.
    Raises OSError when the directory cannot be made or written at start.
    """

    def __init__(self, directory: str | os.PathLike[str], *, rank: int | None = None) -> None:
        if rank is None:
            rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
        self._rank = rank
        self._writer = Writer()
        self._events = EventLog(f"rank{rank}", os.fspath(directory), self._writer, quiet=True)
        self._meter = Meter()
        ledger = self._events.ledger
        earlier = ledger.is_open(rank)
        self._died_after: int | None = None  # the step that an earlier process had come to; None: this one has resumed
        if earlier:
            died_at, self._died_after = ledger.until(rank), ledger.newest_step(rank)
            reason = f"rank {rank} was started again"
            self._events.emit("abort", t=died_at, round=int(died_at * 1e3), reason=reason, cause="restart")
        age_s = _take_age_s()
        self._events.emit("worker_started", t=time.time() - age_s, rank=rank, pid=os.getpid())
        self._meter.restart(BEGINNINGS[earlier], age_s=age_s)
        self._usual_s = 0.0
        if earlier:
            self._meter.recovered()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One training step; ``number`` tells whether it was done before. One that raises was in vain."""
        if self._died_after is not None:
            self._tell_of_resuming(max(0, self._died_after + 1 - number))
        self._meter.step_begins()
        try:
            yield
        except BaseException:
            self._meter.step_ends()
            self._meter.discarded(usual_s=0.0, since_error_s=0.0)
            raise
        self._meter.step_ends()
        self._meter.committed(self._usual_s, repeated=False)
        record = self._meter.report()
        useful_s = record["seconds"].get("useful", 0.0)
        self._usual_s = 0.9 * self._usual_s + 0.1 * useful_s if self._usual_s else useful_s
        self._events.emit("step", rank=self._rank, step=number, clock=record)

    def fetching(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; what it takes to get each is waiting for data."""
        iterator = iter(batches)
        while True:
            with self._inside("data"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What a save stops training for."""
        with self._inside("saving"):
            yield
        self._tell()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Something else that has a name, such as an evaluation."""
        with self._inside(f"phase.{name}"):
            yield
        self._tell()

    def goodput(self) -> Goodput:
        """Of this rank, over all its processes so far."""
        self._tell()
        return Goodput(self._events.ledger.of_rank(self._rank))

    def close(self) -> None:
        """The script has come to its end. A process that ends without is taken for one that died."""
        self._meter.enter("shutdown")
        self._tell(all_of_it=True)
        self._events.emit("finished", rank=self._rank)
        self._events.close()
        self._writer.close()

    def __enter__(self) -> RunMeter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._events.close()
            self._writer.close()

    def _tell_of_resuming(self, steps_lost: int) -> None:
        self._events.emit("recovery", rank=self._rank, source="the script", steps_lost=steps_lost, bytes=0, phases={})
        self._died_after = None

    @contextmanager
    def _inside(self, category: str) -> Iterator[None]:
        """What comes before the first of these is start-up; after it, what is in none of them is other. Inside a step
        or another of these, that goes on afterwards."""
        before = self._meter.enter(category)
        try:
            yield
        finally:
            self._meter.enter("other" if before in BEGINNINGS else before)

    def _tell(self, *, all_of_it: bool = False) -> None:
        self._events.emit("clock", rank=self._rank, clock=self._meter.report(all_of_it=all_of_it))


def _take_age_s() -> float:
    """How long this process has lived, if nothing has counted that yet; where somebody types, it is no run's time."""
    global _counts_process
    counts, _counts_process = _counts_process and not hasattr(sys, "ps1"), False
    return _process_age_s() if counts else 0.0


def _process_age_s() -> float:
    """To a hundredth of a second, from /proc: psutil's times of creation are up to a second too early, as the kernel
    tells the time it booted at in whole seconds."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
