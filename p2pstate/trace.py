"""What a worker is doing, in a page of memory that its agent reads at any time.

In: a few numbers that the worker's threads write as they go: what it is doing, at which step, which operation of which
group it has entered and left. Out: :class:`Sample`, read by the agent although the worker is stopped or holds its
interpreter's lock in a C call.

Invariants: writing takes no system call and no lock; each number is one aligned word, so a reader never sees half of
one; what is read may be a moment old, and words may be of different moments: a decision needs two samples that agree.
Known limit: ``MAX_ROWS`` groups are traced; operations of later ones are not seen.
"""

from __future__ import annotations

import enum
import functools
import mmap
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = [
    "JOIN",
    "MAX_ROWS",
    "STACKS_SIGNAL",
    "Doing",
    "Operation",
    "Row",
    "Sample",
    "Trace",
    "Waits",
    "map_page",
    "new_page",
    "read",
]

JOIN = "join"  # the row of a recovery: its phases, each of which all ranks enter
STACKS_SIGNAL = signal.SIGRTMIN + 3  # makes a worker write the stacks of its threads to its standard error
PAGE_BYTES = 8192
NUM_TURNS = 32  # the steps that count as recent
MIN_TURNS = 3  # fewer say nothing yet
LONGEST_COUNTS = 0.2  # a turn that was longer than all others counts with this part of it

# Words of the head
_COUNT, _DOING, _STEP, _IN_ROUND, _NUM_ROWS, _TURN_US, _POLLED_US, _EXPECTED_US, _WHAT = range(9)
_NAME_WORDS = 3
_FIRST_ROW = 16
_ENTERED, _LEFT, _ROUND, _OPERATION, _KEY, _ROW_WORDS = 0, 1, 2, 3, 5, 8  # of one row; the operation has two words
MAX_ROWS = (PAGE_BYTES // 8 - _FIRST_ROW) // _ROW_WORDS


class Doing(enum.IntEnum):
    """What the training thread is about."""

    STARTING = 0  # before the loop, or alone
    FETCHING = 1  # captures the step before and waits for its batch
    STEPPING = 2  # inside a block
    BETWEEN = 3  # in the body of the loop, outside of blocks
    JOINING = 4  # leaves one round, joins the next
    ENDING = 5  # after the last step


@dataclass(frozen=True, slots=True)
class Operation:
    """How far a worker has come with one group's operations, which are counted from 1 in every round."""

    key: str
    round: int
    entered: int
    left: int
    name: str  # of the newest one


@dataclass(frozen=True, slots=True)
class Sample:
    """``count``: grows with everything that happens. ``round``: the newest one that was joined. ``turn_s``: what a step
    usually takes, commit to commit; 0 while too few are known. ``polled_at``: when the training thread last looked
    whether it may stop waiting. ``expected_until``: announced by the user (:meth:`Trace.expect`), 0 for nothing.
    Monotonic seconds."""

    count: int
    doing: Doing
    step: int
    round: int
    turn_s: float
    polled_at: float
    expected_until: float
    expected: str
    operations: tuple[Operation, ...]


class Waits:
    """How long this process has waited for others: to the end of each operation, since the newest one began or was
    waited for."""

    __slots__ = ("_since", "_total_s")

    def __init__(self) -> None:
        self._since = self._total_s = 0.0

    def begin(self) -> None:
        self._since = time.monotonic()

    def end(self) -> None:
        now = time.monotonic()
        self._total_s += now - self._since
        self._since = now

    def take(self) -> float:
        """Seconds since the last time."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s


class Row:
    """The operations of one group, one at a time, from whichever thread calls them."""

    __slots__ = ("_base", "_before", "_entered", "_waits", "_words")

    def __init__(self, words: memoryview | None = None, base: int = 0, waits: Waits | None = None) -> None:
        self._words = words
        self._waits = waits or Waits()
        self._base = base
        self._entered = 0  # in all rounds
        self._before = 0  # of these, in earlier rounds

    def begin(self, round_: int) -> None:
        """New connections: operations are counted from 1 again, as they are on all members."""
        self._before = self._entered
        if self._words is not None:
            self._words[self._base + _ENTERED] = self._words[self._base + _LEFT] = 0
            self._words[self._base + _ROUND] = round_

    def enter(self, name: str) -> int:
        """Returns what to :meth:`leave` it by."""
        self._entered += 1
        self._waits.begin()
        words, base = self._words, self._base
        if words is not None:
            words[base + _OPERATION], words[base + _OPERATION + 1] = _words_of(name, 2)
            words[base + _ENTERED] = self._entered - self._before
            words[_COUNT] += 1
        return self._entered

    def leave(self, entered: int) -> None:
        """An operation, and all that were entered before it, are over. One of an earlier round changes nothing."""
        words, number = self._words, entered - self._before
        if words is not None and number > words[self._base + _LEFT]:
            words[self._base + _LEFT] = number
            words[_COUNT] += 1
            self._waits.end()

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        entered = self.enter(name)
        try:
            yield
        finally:
            self.leave(entered)


class Trace:
    """The writing side; without a page from an agent it writes where nobody reads."""

    def __init__(self, page: memoryview | None = None) -> None:
        self._words = memoryview(bytearray(PAGE_BYTES)).cast("Q") if page is None else page
        self._rows: dict[str, Row] = {}
        self.waits = Waits()
        self._turns: deque[float] = deque(maxlen=NUM_TURNS)
        self._committed_at: float | None = None

    def row(self, key: str) -> Row:
        """The row of a group; ``key`` is the same on all its members, at most 24 characters."""
        row = self._rows.get(key)
        if row is None:
            index = len(self._rows)
            base = _FIRST_ROW + index * _ROW_WORDS
            row = self._rows[key] = Row(self._words if index < MAX_ROWS else None, base, self.waits)
            if index < MAX_ROWS:
                _put(self._words, base + _KEY, _words_of(key, _NAME_WORDS))
                self._words[_NUM_ROWS] = index + 1
        return row

    def do(self, doing: Doing) -> None:
        self._words[_DOING] = doing
        self._words[_COUNT] += 1

    def leave_round(self) -> None:
        """This worker has noticed that its round is over, and joins the next one."""
        self._committed_at = None  # what a recovery takes is no measure for steps
        self.do(Doing.JOINING)

    def enter_round(self, round_: int) -> None:
        self._words[_IN_ROUND] = round_

    def commit(self, step: int) -> None:
        now = time.monotonic()
        if self._committed_at is not None:
            self._turns.append(now - self._committed_at)
            if len(self._turns) >= MIN_TURNS:
                usual_s = max(statistics.median(self._turns), LONGEST_COUNTS * max(self._turns))
                self._words[_TURN_US] = int(usual_s * 1e6)
        self._committed_at = now
        self._words[_STEP] = step
        self._words[_COUNT] += 1

    def poll(self) -> None:
        """The training thread is alive, and waits. (What other threads wait for says nothing about it.)"""
        if threading.get_ident() == _MAIN_THREAD:
            self._words[_POLLED_US] = int(time.monotonic() * 1e6)

    @contextmanager
    def expect(self, what: str, seconds: float) -> Iterator[None]:
        """The block may take so long. Inside another one it ends with that one at the latest; what it takes is no
        measure for steps."""
        words, began = self._words, time.monotonic()
        outer_us, outer_what = words[_EXPECTED_US], words[_WHAT : _WHAT + _NAME_WORDS].tolist()
        until_us = int((began + seconds) * 1e6)
        if not outer_us or until_us < outer_us:
            _put(words, _WHAT, _words_of(what, _NAME_WORDS))
            words[_EXPECTED_US] = until_us
        words[_COUNT] += 1
        try:
            yield
        finally:
            words[_EXPECTED_US] = outer_us
            _put(words, _WHAT, outer_what)
            words[_COUNT] += 1
            if self._committed_at is not None and not outer_us:
                self._committed_at += time.monotonic() - began


_MAIN_THREAD = threading.main_thread().ident


def new_page() -> int:
    """The descriptor of an empty page, whose memory goes when the last process that has it ends."""
    fd = os.memfd_create("p2pstate-trace", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE_BYTES)
    return fd


def map_page(fd: int) -> memoryview:
    """The words of a page; ``fd`` stays the caller's."""
    return memoryview(mmap.mmap(fd, PAGE_BYTES)).cast("Q")


def read(page: memoryview) -> Sample:
    """What a worker has written so far. Raises ValueError when it is nothing that a worker writes."""
    operations = []
    for index in range(min(page[_NUM_ROWS], MAX_ROWS)):
        base = _FIRST_ROW + index * _ROW_WORDS
        key, name = _text(page[base + _KEY : base + _ROW_WORDS]), _text(page[base + _OPERATION : base + _KEY])
        operations.append(Operation(key, page[base + _ROUND], page[base + _ENTERED], page[base + _LEFT], name))
    return Sample(
        count=page[_COUNT],
        doing=Doing(page[_DOING]),
        step=page[_STEP],
        round=page[_IN_ROUND],
        turn_s=page[_TURN_US] / 1e6,
        polled_at=page[_POLLED_US] / 1e6,
        expected_until=page[_EXPECTED_US] / 1e6,
        expected=_text(page[_WHAT : _WHAT + _NAME_WORDS]),
        operations=tuple(operations),
    )


@functools.cache
def _words_of(text: str, num_words: int) -> list[int]:
    raw = text.encode()[: 8 * num_words].ljust(8 * num_words, b"\0")
    return memoryview(raw).cast("Q").tolist()


def _put(words: memoryview, at: int, values: list[int]) -> None:
    for offset, value in enumerate(values):
        words[at + offset] = value


def _text(words: memoryview) -> str:
    return words.tobytes().rstrip(b"\0").decode(errors="replace")
