"""A DataLoader that goes on where the trainer was: its position is what was *delivered*.

In: a data set, a sampler, worker processes. Out: batches; a position (``state_dict``) that any number of workers, and
with ``Sampler`` any number of ranks, takes up; the newest batches again, unchanged, after the position was set back.

Invariants: batches fetched ahead are neither lost nor counted; the sequence of batches and of everything drawn in data
sets and ``collate_fn`` is a function of seed, order and position alone; no random number of this process is drawn or
moved on by loading; every wait for a worker ends.
Known limits: used from one thread; batches are kept for a second delivery only between calls of ``state_dict`` (see
``keep_bytes``), else they are read again; with samplers other than ``Sampler``, going back draws an epoch's order anew,
and going back to its beginning or beyond reads its batches again; without workers nothing ends a data set that hangs.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data

from p2pstate.data import memfd
from p2pstate.data.device import Stager
from p2pstate.data.engines import Delivery, Engine, IterableEngine, MapEngine, same_position
from p2pstate.data.fetching import Spec
from p2pstate.data.loader_stats import LoaderStats, Meter
from p2pstate.data.order import Shuffled
from p2pstate.data.pool import InProcess, Packed, Pool
from p2pstate.data.positions import Sampled, Source
from p2pstate.data.replayed import Replayed
from p2pstate.data.sampler import Sampler
from p2pstate.data.worker import Done

__all__ = ["Loader"]

logger = logging.getLogger("p2pstate.data")

DEFAULT_TIMEOUT_S = 300.0
DEFAULT_PREFETCH = 2
MAX_DEFAULT_WORKERS = 4
KEPT_STATES = 4  # the newest protected version is among the newest few that were captured
MAX_KEPT_BATCHES = 256


@dataclass(slots=True)
class _Kept:
    """A batch that was delivered, as it was."""

    before: Any
    after: Any
    packed: Packed
    marked: bool  # a position was saved right before it


class Loader(torch.utils.data.DataLoader[Any]):
    """Takes the arguments of ``torch.utils.data.DataLoader``, with these differences and additions:

    Iterating goes on at a position that was loaded, else begins the epoch; one that was left half way begins again. A
    data set that is empty, or with ``drop_last`` smaller than a batch, is an error.

    Args:
        num_workers: processes; by default up to 4, as many as there are cores for each rank of the node. They stay
            over epochs, and one that dies is replaced. 0: none.
        batch_sampler: ``Sampler`` for several ranks, other rank counts on resume, or mixtures. Without it, and without
            ``sampler``, one is made of ``shuffle``, ``batch_size``, ``drop_last`` and ``seed``.
        pin_memory: by default where there is CUDA.
        timeout: seconds that a worker may take for a batch before LoaderError is raised; 0 stands for 300. Without
            workers a data set is read in the trainer's own thread, which only p2prun's search for hangs can end.
        generator: only its initial seed is used, in place of ``seed``.
        seed: of the order that is made here and of all augmentation: Python's, NumPy's and torch's global streams are
            seeded for each sample with (seed, pass over the source, index). A data set with the attribute
            ``draws_random = False`` is spared that.
        epochs: one iteration goes on from epoch to epoch until so many are complete, as ``Replicator`` needs it, which
            ends with its data. None: one iteration is one epoch.
        device: move batches there; to CUDA on a stream of their own, while the step before computes.
        keep_bytes: at most so much memory is held to deliver batches again unchanged when a position is loaded that
            was saved by one of the last four calls of ``state_dict``; what is not kept is read again.

    Raises:
        LoaderError: a worker gave no batch in time, or several were lost in a row.
        Whatever a data set raises, in its type, with the sample's index and the worker's traceback in the text. The
        batch stays the next one.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool | None = None,
        drop_last: bool = False,
        timeout: float = DEFAULT_TIMEOUT_S,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = True,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        device: torch.device | str | None = None,
        keep_bytes: int = 1 << 30,
    ) -> None:
        if not in_order:
            raise ValueError("in_order=False: the order of batches has to be a function of the position")
        if epochs is not None and epochs < 0:
            raise ValueError(f"epochs={epochs}: give how many there are, or None for one with each iteration")
        if num_workers is None:
            num_workers = _default_workers()
        if pin_memory is None:
            pin_memory = torch.cuda.is_available()
        if generator is not None:
            seed = generator.initial_seed()
        own: Sampler | None = None
        if not _iterable(dataset) and sampler is None and batch_sampler is None:
            order = Shuffled(len(dataset), seed=seed, shuffle=bool(shuffle))
            own = Sampler(order, 1 if batch_size is None else batch_size, tail="drop" if drop_last else "uneven")
        super().__init__(
            dataset,
            batch_size=batch_size,
            shuffle=None if own is not None else shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            generator=generator,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers and num_workers > 0,
            pin_memory_device=pin_memory_device,
        )
        if own is not None and batch_size is not None:
            self.__dict__["batch_sampler"] = own  # what is iterated; DataLoader made one that is not
        self._seed, self._epochs = seed, epochs
        self._spec = Spec(dataset, self.collate_fn, seed, self._auto_collation, batch_size or 1, drop_last)
        self._engine: Engine = self._make_engine(own)
        self._position = self._engine.position  # behind what was delivered, be it for the first or a second time
        self._again: deque[_Kept] = deque()  # to be delivered for a second time
        self._kept: deque[_Kept] = deque()  # what was delivered between older positions and the engine's
        self._keep_bytes = keep_bytes
        self._keeps = self._marked = False
        self._stager = Stager(torch.device(device) if device is not None else None, pin_memory)
        self._staged: tuple[int, Any] | None = None  # serial number of a batch, and it on its way to the device
        self._continues = False  # the next iteration goes on at a position that was loaded
        self._iterating = False  # an iteration has delivered something and has not come to its end
        self._iteration: _Iteration | None = None
        self._late_error: Exception | None = None  # from asking ahead, when a batch had to be delivered first
        self._meter = Meter(time.monotonic(), num_workers)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return _epoch_of(self._position)

    def __iter__(self) -> _Iteration:  # type: ignore[override]
        if not self._continues and (self._iterating or not self._again):
            self._engine.seek(self._position)
            self._engine.next_epoch(abandoned=self._iterating)
            if self._again or not same_position(self._position, self._engine.position):
                self._drop_kept()
                self._position = self._engine.position
        self._continues = self._iterating = False
        if not self._is_complete():
            self._engine.fill()
        self._iteration = _Iteration(self)
        return self._iteration

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that was delivered, as plain values (and states of the data set)."""
        self._keeps = self._marked = True
        dataset: Any = self.dataset
        of_dataset = dataset.state_dict() if not _iterable(dataset) and _stateful(dataset) else None
        return {"seed": self._seed, "position": self._engine.state(self._position), "dataset": of_dataset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next batch is the one behind the saved position, also for an iteration that is going on.

        Raises ValueError for a position that means other batches here.
        """
        if not isinstance(state, Mapping) or not {"seed", "position", "dataset"} <= set(state):
            raise ValueError(f"{state!r:.100} is not a position of a p2pstate.data.Loader: its state_dict() gives one")
        if state["seed"] != self._seed:
            raise ValueError(
                f"the position was saved with seed {state['seed']}, and this loader has seed {self._seed}: what "
                "is drawn for augmentation differs. Give it the same seed"
            )
        dataset: Any = self.dataset
        if state["dataset"] is not None and _stateful(dataset):
            dataset.load_state_dict(state["dataset"])
        try:
            position = self._engine.position_of(state["position"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"the saved position is damaged ({error!r}): {state['position']!r:.200}") from error
        self._move_to(position, state["position"])
        self._continues = True

    def stats(self) -> LoaderStats:
        """How long the trainer has waited, and what came from where."""
        return self._meter.stats(time.monotonic())

    @property
    def worker_pids(self) -> list[int]:
        """The processes there are now."""
        return self._engine.worker_pids

    def close(self) -> None:
        """End the workers now. The position stays; iterating starts new ones."""
        self._engine.close()

    # -- inside

    def _make_engine(self, own: Sampler | None) -> Engine:
        depth = self.prefetch_factor or DEFAULT_PREFETCH
        if _iterable(self.dataset):
            return IterableEngine(max(1, self.num_workers), self._make_pool, depth if self.num_workers else 1)
        own = own or (self.batch_sampler if isinstance(self.batch_sampler, Sampler) else None)
        source: Source = (
            Sampled(own) if own is not None else Replayed(self._index_sampler, sets_epochs=self._epochs is not None)
        )
        return MapEngine(source, self._make_pool, max(1, depth * self.num_workers), self._epochs)

    def _make_pool(self) -> Pool | InProcess:
        if self.num_workers == 0:
            return InProcess(self._spec)
        timeout_s = self.timeout or DEFAULT_TIMEOUT_S
        return Pool(self._spec, self.num_workers, timeout_s, self.multiprocessing_context, self.worker_init_fn)

    def _next(self) -> Any:
        began = time.monotonic()
        if self._late_error is not None:
            error, self._late_error = self._late_error, None
            raise error
        num_ready, again = self._engine.num_ready(), bool(self._again)
        if self._is_complete():
            raise StopIteration
        last = self._position
        while (found := self._advance(last)) is None:
            if self._epochs is None or self._is_complete():
                self._iterating = False
                if not self.persistent_workers:
                    self.close()
                raise StopIteration
        self._iterating, self._continues = True, False
        try:
            self._engine.fill()
        except Exception as error:
            self._late_error = error
        batch = self._stage(*found)
        now = time.monotonic()
        self._meter.delivered(now, now - began, num_ready, again=again)
        warning = self._meter.warning(now)
        if warning is not None:
            logger.warning("%s", warning)
        return batch

    def _move_to(self, position: Any, saved: dict[str, Any]) -> None:
        self._again.clear()
        self._late_error = None
        if not self._engine.follows(position, saved):
            self._drop_kept()
            self._engine.take_up(position, saved)
        elif not same_position(position, self._engine.position):
            kept = list(self._kept)
            for number, each in enumerate(kept):
                if same_position(each.before, position) or same_position(each.after, position):
                    self._again.extend(kept[number + same_position(each.after, position) :])
                    break
            else:
                self._drop_kept()
                self._engine.take_up(position, saved)
        self._position = position

    def _advance(self, last: Any) -> tuple[int, Any] | None:
        """(serial number, batch); None at an epoch's end, which moves the position on. ``last``: the position behind
        the batch that was delivered before."""
        if self._again:
            kept = self._again[0]
            if _epoch_of(kept.before) != self.epoch:
                self._position = kept.before
                return None
            self._again.popleft()
            kept.marked, self._marked = kept.marked or self._marked, False
            self._position = kept.after
            return -1, kept.packed.unpack().value
        if _epoch_of(self._engine.position) != self.epoch:
            self._position = self._engine.position
            return None
        delivery = self._engine.next()
        self._position = self._engine.position
        if delivery is None:
            return None
        self._meter.counted(delivery.worker, delivery.counters)
        if self._keeps:
            self._keep(last, delivery)
        elif delivery.packed is not None:
            delivery.packed.close()
        return delivery.serial, delivery.value

    def _keep(self, before: Any, delivery: Delivery) -> None:
        packed = delivery.packed
        if packed is None:
            try:
                descriptor = memfd.pack(Done(delivery.value, None, {}))
            except Exception as error:  # generators, open files: whatever the data set gives is for one delivery
                logger.info("a batch cannot be kept for a second delivery (%s): it is read again for one", error)
                self._drop_kept()
                return
            packed = Packed(descriptor, memfd.size_of(descriptor))
        kept = self._kept
        kept.append(_Kept(before, self._position, packed, self._marked))
        self._marked = False
        while len(kept) > 1 and (
            len(kept) > MAX_KEPT_BATCHES
            or sum(each.packed.num_bytes for each in kept) > self._keep_bytes
            or sum(each.marked for each in kept) > KEPT_STATES
        ):
            kept.popleft().packed.close()

    def _drop_kept(self) -> None:
        self._again.clear()
        while self._kept:
            self._kept.popleft().packed.close()

    def _is_complete(self) -> bool:
        return self._epochs is not None and self.epoch >= self._epochs

    def _stage(self, serial: int, batch: Any) -> Any:
        """The batch on its device; the next one, if it is here, on its way."""
        if self._stager.idle:
            return batch
        if self._staged is None or self._staged[0] != serial:
            self._staged = (serial, self._stager.start(batch))
        batch = self._stager.finish(self._staged[1])
        ahead = self._engine.ahead()
        self._staged = (ahead[0], self._stager.start(ahead[1])) if ahead is not None else None
        return batch


class _Iteration(Iterator[Any]):
    """What ``iter(loader)`` returns. Only the newest one of a loader goes on."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._ended = False

    def __iter__(self) -> _Iteration:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._loader._iteration is not self:
            raise RuntimeError(
                "another iteration over this loader has begun since, and a loader has one position: make a second "
                "loader to iterate the data twice at a time"
            )
        if self._ended and not self._loader._continues:
            raise StopIteration
        try:
            return self._loader._next()
        except StopIteration:
            self._ended = True
            raise


def _epoch_of(position: Any) -> int:
    epoch: int = position[0] if isinstance(position, tuple) else position.epoch
    return epoch


def _iterable(dataset: Any) -> bool:
    return isinstance(dataset, torch.utils.data.IterableDataset)


def _stateful(dataset: Any) -> bool:
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def _default_workers() -> int:
    num_ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)) // num_ranks_here))
