"""Batches in order, fetched ahead, with the position behind each: an engine for map-style data sets, one for iterables.

In: a pool of workers (or none), a source of positions. Out: deliveries. ``position`` is behind the last batch that was
delivered; what was fetched ahead does not move it.

Invariants: the order of deliveries depends on positions alone, not on which worker is fast; after ``seek`` everything
is as if all before it had never been asked for; a batch whose reading failed stays the next one.
Known limit: an iterable's position belongs to its workers: the same number of workers has to take it up.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from p2pstate.data.fetching import Begin, End, More
from p2pstate.data.pool import InProcess, Packed, Pool
from p2pstate.data.positions import Position, Source
from p2pstate.data.worker import Done

__all__ = ["Delivery", "Engine", "IterableEngine", "MapEngine", "Streams", "same_position"]

logger = logging.getLogger("p2pstate.data")

TELL_REPLAY_ABOVE_S = 0.5
AnyPool = Pool | InProcess


@dataclass(slots=True)
class Delivery:
    """One batch. ``packed``: where its unchanged bytes lie, if it came from another process."""

    serial: int
    value: Any
    packed: Packed | None
    counters: dict[str, float]
    worker: int


class Engine(Protocol):
    """What a loader needs. Positions are opaque to it, but for their epoch."""

    position: Any

    @property
    def worker_pids(self) -> list[int]: ...

    def next(self) -> Delivery | None:
        """The next batch, waiting for it; None at the epoch's end, which moves the position to the next epoch."""

    def fill(self) -> None:
        """Ask for batches ahead."""

    def num_ready(self) -> int:
        """Batches that are here and not yet delivered."""

    def ahead(self) -> tuple[int, Any] | None:
        """(serial number, value) of the next batch, if it is here."""

    def next_epoch(self, *, abandoned: bool) -> None:
        """Begin the epoch that was asked for; one that the last iteration left half way, from its beginning."""

    def follows(self, position: Any, state: dict[str, Any]) -> bool:
        """Whether what was delivered and fetched behind ``position``, saved as ``state``, is what comes there again."""

    def take_up(self, position: Any, state: dict[str, Any]) -> None:
        """As ``seek``, to what was saved as ``state``."""

    def seek(self, position: Any) -> None:
        """Go there, as if nothing had ever been asked for."""

    def state(self, position: Any) -> dict[str, Any]:
        """A position as plain values."""

    def position_of(self, state: dict[str, Any]) -> Any:
        """The position that ``state`` was made of. ValueError if it means other batches here."""

    def close(self) -> None:
        """End the workers. What was fetched ahead is fetched again if somebody goes on."""


@dataclass(slots=True)
class _Item:
    serial: int | None  # None: an epoch's end, or to be asked for again
    worker: int
    task: Any
    after: Any = None  # the position behind it


class MapEngine:
    """``depth``: batches that are asked for ahead, up to the end of epoch ``num_epochs`` - 1."""

    def __init__(self, source: Source, make_pool: Callable[[], AnyPool], depth: int, num_epochs: int | None) -> None:
        self._source, self._make_pool, self._depth, self._num_epochs = source, make_pool, depth, num_epochs
        self._pool: AnyPool | None = None
        self._queue: deque[_Item] = deque()
        self._turn = 0
        self.position: Position = source.asked_for((0, 0))
        self._cursor = self.position  # behind what was asked for

    @property
    def worker_pids(self) -> list[int]:
        return self._pool.pids if self._pool is not None else []

    def next(self) -> Delivery | None:
        self.fill()
        if not self._queue or self._queue[0].task is None:
            if self._queue:
                self._queue.popleft()
            self._moved((self.position[0] + 1, 0))
            if not self._queue:
                self._cursor = self.position
            return None
        item = self._queue[0]
        assert self._pool is not None
        if item.serial is None:
            item.serial = self._pool.submit(item.worker, item.task)
        serial, item.serial = item.serial, None  # if this raises, the next attempt asks again
        done, packed = self._pool.result(serial)
        self._queue.popleft()
        delivery = Delivery(serial, done.value, packed, done.counters, item.worker)
        self._moved(item.after)
        return delivery

    def fill(self) -> None:
        if self._pool is None:
            self._pool = self._make_pool()
        while len(self._queue) < self._depth:
            found = self._source.task(self._cursor)
            if found is not None:
                task, after = found
                worker = self._turn
                self._turn = (worker + 1) % self._pool.num_workers
                self._queue.append(_Item(self._pool.submit(worker, task), worker, task, after))
            elif self._may_draw_on():
                after = (self._cursor[0] + 1, 0)
                self._queue.append(_Item(None, 0, None, after))
            else:
                return
            self._cursor = after

    def _may_draw_on(self) -> bool:
        """At the end of the cursor's epoch: whether the next one can be drawn before it is asked for."""
        ends = bool(self._queue) and self._queue[-1].task is None  # an epoch without any batch for this rank
        return self._source.endless and not ends and self._cursor[0] + 1 != self._num_epochs

    def num_ready(self) -> int:
        return _num_ready(self._pool, self._queue)

    def ahead(self) -> tuple[int, Any] | None:
        return _ahead(self._pool, self._queue)

    def next_epoch(self, *, abandoned: bool) -> None:
        asked = self._source.asked_for(self.position)
        if asked == self.position and abandoned:
            asked = (asked[0], 0) if self._source.task(asked) is not None else (asked[0] + 1, 0)
        self.seek(asked)

    def follows(self, position: Position, state: dict[str, Any]) -> bool:
        return self._source.draws_as(state)

    def take_up(self, position: Position, state: dict[str, Any]) -> None:
        self._source.take_up(position, state)
        self._go_to(position)

    def seek(self, position: Position) -> None:
        if position != self.position:
            self._go_to(position)

    def state(self, position: Position) -> dict[str, Any]:
        return self._source.state(position)

    def position_of(self, state: dict[str, Any]) -> Position:
        return self._source.position_of(state)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None
        self._queue.clear()
        self._cursor = self.position

    def _go_to(self, position: Position) -> None:
        self._queue.clear()
        if self._pool is not None:
            self._pool.cancel()
        self._cursor = position
        self._moved(position)

    def _moved(self, position: Position) -> None:
        self.position = position
        self._source.delivered(position)


@dataclass(frozen=True, slots=True)
class Stream:
    """How far one worker's iterator was delivered."""

    num_samples: int = 0
    state: Any = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Streams:
    """A position in an iterable: whose turn it is, and how far each worker is."""

    epoch: int
    turn: int
    workers: tuple[Stream, ...]


def _stream_of(state: dict[str, Any]) -> Stream:
    return Stream(state["samples"], state["state"], state["ended"])


class IterableEngine:
    """``depth``: batches per worker that are asked for ahead."""

    def __init__(self, num_workers: int, make_pool: Callable[[], AnyPool], depth: int) -> None:
        self._num_workers, self._make_pool, self._depth = num_workers, make_pool, depth
        self._pool: AnyPool | None = None
        self._queue: deque[_Item] = deque()  # in the order of delivery; a worker's Begin before its first More
        self._next_turn = 0
        self._begun = False
        self.position = self._start = Streams(0, 0, (Stream(),) * num_workers)

    @property
    def worker_pids(self) -> list[int]:
        return self._pool.pids if self._pool is not None else []

    def next(self) -> Delivery | None:
        while True:
            self.fill()
            if not self._queue:
                left = tuple(Stream(state=stream.state) for stream in self.position.workers)
                self._start = Streams(self.position.epoch + 1, 0, left)
                self.seek(self._start)
                return None
            item = self._queue[0]
            assert self._pool is not None
            assert item.serial is not None
            began = time.monotonic()
            try:
                done, packed = self._pool.result(item.serial)
            except BaseException:
                self._forget()  # a generator that raised is over: its next attempt begins at the last position
                raise
            self._queue.popleft()
            if isinstance(item.task, Begin):
                self._tell_replay(done.state, time.monotonic() - began)
                continue
            streams = list(self.position.workers)
            if streams[item.worker].ended:
                continue  # asked before that was known
            streams[item.worker] = _stream_of(done.state)
            self.position = Streams(self.position.epoch, (item.worker + 1) % self._num_workers, tuple(streams))
            if not isinstance(done.value, End):
                return Delivery(item.serial, done.value, packed, done.counters, item.worker)

    def fill(self) -> None:
        if self._pool is None:
            self._pool = self._make_pool()
            if isinstance(self._pool, Pool):
                self._pool.resume = self._resume
        active = [number for number, stream in enumerate(self.position.workers) if not stream.ended]
        if not self._begun:
            self._begun = True
            for number in active:
                self._ask(number, self._begin_of(self.position.workers[number]))
            self._next_turn = self.position.turn
        while active and sum(isinstance(item.task, More) for item in self._queue) < self._depth * len(active):
            if self._next_turn in active:
                self._ask(self._next_turn, More(self.position.epoch))
            self._next_turn = (self._next_turn + 1) % self._num_workers

    def num_ready(self) -> int:
        return _num_ready(self._pool, self._queue)

    def ahead(self) -> tuple[int, Any] | None:
        return _ahead(self._pool, self._queue)

    def next_epoch(self, *, abandoned: bool) -> None:
        if abandoned:
            self.seek(self._start_of(self.position.epoch))

    def follows(self, position: Streams, state: dict[str, Any]) -> bool:
        return True

    def take_up(self, position: Streams, state: dict[str, Any]) -> None:
        self.seek(position)

    def seek(self, position: Streams) -> None:
        if same_position(position, self.position):
            return
        self._forget()
        self.position = position

    def state(self, position: Streams) -> dict[str, Any]:
        workers = [{"samples": s.num_samples, "state": s.state, "ended": s.ended} for s in position.workers]
        return {"epoch": position.epoch, "turn": position.turn, "workers": workers}

    def position_of(self, state: dict[str, Any]) -> Streams:
        workers = state.get("workers")
        if workers is None:
            raise ValueError("the saved position is one in a map-style data set; this loader's data set is iterable")
        if len(workers) != self._num_workers:
            raise ValueError(
                f"the saved position is one of {len(workers)} workers, each of which iterates a part of its own; this "
                f"loader has {self._num_workers}: give it num_workers={len(workers)}"
            )
        streams = tuple(map(_stream_of, workers))
        return Streams(state["epoch"], state["turn"], streams)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None
        self._queue.clear()
        self._begun = False

    def _forget(self) -> None:
        self._queue.clear()
        self._begun = False
        if self._pool is not None:
            self._pool.cancel()

    def _start_of(self, epoch: int) -> Streams:
        return self._start if self._start.epoch == epoch else Streams(epoch, 0, (Stream(),) * self._num_workers)

    def _ask(self, worker: int, task: Begin | More) -> None:
        assert self._pool is not None
        self._queue.append(_Item(self._pool.submit(worker, task), worker, task))

    def _begin_of(self, stream: Stream) -> Begin:
        return Begin(self.position.epoch, stream.num_samples, stream.state, stream.ended)

    def _resume(self, worker: int) -> list[Begin]:
        """For the replacement of a worker: begin behind the last batch that the lost one has answered."""
        stream = self.position.workers[worker]
        for item in self._queue:
            if item.worker != worker or item.serial is None or self._pool is None:
                continue
            reply = self._pool.peek(item.serial)
            if reply is None:  # not answered: it will be asked again, a Begin too
                return [] if isinstance(item.task, Begin) else [self._begin_of(stream)]
            if isinstance(reply, Done) and isinstance(item.task, More):
                stream = _stream_of(reply.state)
        return [self._begin_of(stream)]

    def _tell_replay(self, num_samples: int, seconds: float) -> None:
        if num_samples and seconds > TELL_REPLAY_ABOVE_S:
            logger.warning(
                "an iterable data set was read again from its beginning to find the position: %d samples in %.1f s. "
                "With state_dict() and load_state_dict() of its own, or of its iterator, and no shuffle buffer, it "
                "begins there at once",
                num_samples,
                seconds,
            )


def _num_ready(pool: AnyPool | None, queue: Iterable[_Item]) -> int:
    return pool.num_arrived(item.serial for item in queue if item.serial is not None) if pool is not None else 0


def _ahead(pool: AnyPool | None, queue: Sequence[_Item]) -> tuple[int, Any] | None:
    if not queue or queue[0].serial is None or pool is None:
        return None
    reply = pool.peek(queue[0].serial)
    return (queue[0].serial, reply.value) if isinstance(reply, Done) and not isinstance(reply.value, End) else None


def same_position(left: Any, right: Any) -> bool:
    """Positions hold states of data sets, which may be anything: what cannot be compared is not the same."""
    try:
        return bool(left == right)
    except (RuntimeError, ValueError, TypeError):
        return False
