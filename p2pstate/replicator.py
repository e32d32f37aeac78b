"""The public object: what a user wraps model and optimizer with.

In: live training objects. Out: a loop whose steps survive the loss of processes and nodes.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from p2pstate.block import StepBlock
from p2pstate.cards.card import CudaCard
from p2pstate.counting import check_successor
from p2pstate.data.shuffle_buffer import loses_samples
from p2pstate.description import Description, describe, leaf_groups
from p2pstate.durable.remote import is_url, local_path
from p2pstate.errors import ConfigError
from p2pstate.feed import Feed, LoopPosition
from p2pstate.footprint import memory_need
from p2pstate.groups.group import P2PGroup
from p2pstate.groups.registry import REGISTRY
from p2pstate.groups.status import STATUS
from p2pstate.meeting import look_alone, meet
from p2pstate.memory_need import RankNeed
from p2pstate.observe.goodput import Goodput
from p2pstate.observe.meter import METER
from p2pstate.observe.tracking import Tracker
from p2pstate.protection import Protection
from p2pstate.resume import Disk
from p2pstate.settings import CheckpointPolicy, Settings
from p2pstate.state import TrainingState, free_name, is_generator, with_inner
from p2pstate.stats import ProtectionStats
from p2pstate.steps import Loop, Timeouts
from p2pstate.worker.context import WorkerContext, current

__all__ = ["Replicator"]


class Replicator:
    """Keeps the state of a training job alive in two places, and resumes it after a fault.

    Args:
        *components: the model or models (DDP, FSDP, TP or plain modules), the optimizer or optimizers, anything else
            with ``state_dict()`` and ``load_state_dict()`` whose state belongs to the run (schedulers, GradScaler,
            averages), random generators of Python, NumPy and torch. Order does not matter. Optimizers inside of an
            optimizer are found, and so is what communication hooks like PowerSGD remember.
        data: an iterable of batches with ``state_dict()`` and ``load_state_dict()``, in which the position means
            *delivered*. Without it ``train_step`` is called without arguments.
        extra: plain values (numbers, strings, lists, dictionaries), tensors and random generators of the training loop
            itself; captured and restored with the rest, in place. Also reachable as ``state.extra``.
        rng: capture the random state of Python, NumPy and torch.
        lean: True keeps no copy of a shard on its own node, half of the memory by default: dead processes are replaced
            as ever, from the other nodes' copies, but nodes may be lost only down to one copy (with ``copies=1``:
            none). A step waits until its state has been sent. "auto": only where nothing else fits, which is said.
        copies: how many copies of each rank's shard there are besides the own node's, 1 to 3, each on another node: a
            version is protected when all are complete, and then outlives the loss of as many nodes at once. With fewer
            nodes there are fewer copies, and the agents say so.
        verify_replicas: every so many steps all ranks compare what they hold alike (0: never); which rank differs from
            most is reported as an event and a RuntimeWarning. Costs a hash of these leaves and a meeting of all ranks.
        on_corruption: what becomes of a difference that ``verify_replicas`` finds, besides the report: ``"stop"`` ends
            the run with exit code 1, ``"repair"`` gives ranks that differ the bytes that most ranks hold, in place, and
            ends the run where there is no majority; ``"report"`` leaves it.
        every: capture a version every so many steps. ``"auto"``: as often as copying costs at most ``max_overhead`` of
            the steps and versions arrive in time, by what all ranks measure; each change is an event, ``stats.every``
            and :meth:`describe` have the interval. A fault takes back up to so many steps (and one more).
        max_overhead: the fraction of a step that a rank waits for the previous version to arrive before all ranks
            skip the next capture together.
        on_nan: what becomes of a step in which a gradient of any rank is NaN or infinite, before an optimizer uses it:
            ``"stop"`` ends the run with exit code 1, ``"skip"`` leaves the batch out on all ranks and goes on with the
            next one, ``"rollback"`` resumes a checkpoint of before on all ranks and leaves out the batches since then,
            this one included, ``"ignore"`` does not look. Looking is one pass over the gradients. (An optimizer that
            steps in backward is not looked at.)
        nan_rollback: how many checkpoints ``on_nan="rollback"`` goes back, at most ``checkpoint_keep``: more than one
            where the model is spoilt some time before its gradients are. The run ends as with ``"stop"`` where there is
            none.
        recovery_timeout_s: how long a rank waits for the others in each phase of a recovery.
        checkpoint: a directory on storage that all nodes share, or a URL that fsspec knows (``"s3://bucket/run"``).
            Protected versions are written there in PyTorch's distributed checkpoint format, by a process of their own,
            and a run that is started again (or has lost every copy of something) resumes from the newest good one.
            None: memory only.
        checkpoint_every: how often, in steps (an int) or as a time (a timedelta; 15 minutes by default). The end of
            training is always written.
        checkpoint_keep: how many complete checkpoints stay; the last good one is never deleted before the next is.
        checkpoint_timeout_s: how long the end of the loop waits for the last one.
        checkpoint_stage: a folder of each node's own in which files are made on their way to a URL; one save of the
            node's shards has to fit (a folder below the system's temporary one by default).

    Raises:
        ConfigError: the process was not started by p2pstate, its process groups are not p2pstate's, other ranks were
            given other arguments, or a node has not enough host memory left (the message has the figures).
        ValueError, LeafError: a component cannot be captured exactly; the message names it.
    """

    def __init__(
        self,
        *components: Any,
        data: Any = None,
        extra: MutableMapping[str, Any] | None = None,
        rng: bool = True,
        copies: int = 1,
        lean: bool | Literal["auto"] = "auto",
        verify_replicas: int = 0,
        on_corruption: str = "report",
        every: int | Literal["auto"] = 1,
        max_overhead: float = 0.02,
        on_nan: str = "ignore",
        nan_rollback: int = 1,
        recovery_timeout_s: float = 300.0,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | timedelta = timedelta(minutes=15),
        checkpoint_keep: int = 2,
        checkpoint_timeout_s: float = 600.0,
        checkpoint_stage: str | os.PathLike[str] | None = None,
    ) -> None:
        context = current()
        if context.rerunning:
            raise ConfigError(
                "a Replicator inside a restartable function: use it without p2pstate.restartable, it goes on in place"
            )
        group = _default_group()
        policy = None
        if checkpoint is not None:
            policy = _policy(checkpoint, checkpoint_every, checkpoint_keep, checkpoint_stage)
        settings = Settings(
            every=every,
            max_overhead=max_overhead,
            copies=copies,
            lean=lean,
            verify_replicas=verify_replicas,
            on_corruption=on_corruption,
            on_nan=on_nan,
            nan_rollback=nan_rollback,
            checkpoint=policy,
        )
        models, optimizers, objects = _sorted(components, data)
        if not isinstance(extra, MutableMapping | None):
            raise ValueError(f"extra= takes a dictionary, not {type(extra).__name__}")
        self.extra: MutableMapping[str, Any] = {} if extra is None else extra
        objects["loop"] = position = LoopPosition()
        check_successor(context, models, None if policy is None else policy.path)
        self._context = context
        self._state = state = TrainingState(models, optimizers, objects, extra=self.extra, rng=rng)
        _check_run(context, state, settings, recovery_timeout_s)
        context.copies = copies
        context.tell_copies()
        REGISTRY.card = card = _card_of(state)
        protection = Protection(
            context,
            state,
            settings,
            compare_timeout_s=group.timeout.total_seconds(),
            card=None if card is None else CudaCard(card),
        )
        self._loop = Loop(
            context,
            state,
            models,
            Feed(data, position),
            protection,
            Timeouts(vote_s=group.timeout.total_seconds(), recovery_s=recovery_timeout_s, save_s=checkpoint_timeout_s),
            disk=Disk(policy, context.link, context.rank, recovery_timeout_s) if policy is not None else None,
        )
        for component in components:
            if isinstance(component, torch.amp.GradScaler):
                self._loop.watch_scaler(component)

    def run(self, train_step: Callable[..., Any], *, steps: int | None = None) -> Iterator[tuple[int, Any]]:
        """Call ``train_step(batch)`` again and again; yield ``(step, what it returned)`` for each committed step.

        ``train_step`` does forward, backward and ``optimizer.step()``; it is called again with the same batch after a
        fault. A committed step that a fault took back is done and yielded again (see :attr:`replaying`), so that what
        the loop's body does to the state is done again as well. Steps count from 1. Ends once ``steps`` steps are
        committed in all, or when the data of any rank ends, at the same step on all ranks. In the loop's body
        collectives are refused: see :meth:`every`.
        """
        return self._loop.run(train_step, steps)

    def batches(self, *, steps: int | None = None) -> Iterator[Any]:
        """Batches for a loop whose body is ``with state.step():``; the same batch comes again after a fault."""
        return self._loop.batches(steps)

    def step(self) -> StepBlock:
        """The block around forward, backward and ``optimizer.step()``, once per batch of :meth:`batches`.

        ``step.number`` counts from 1; ``step.committed`` tells code after the block whether to act on the step: it is
        False for a discarded step and for a rehearsal. ``step.again``: this process had committed it before.
        """
        frame = sys._getframe(1)
        return self._loop.block(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    @staticmethod
    @contextmanager
    def expect(what: str, seconds: float) -> Iterator[None]:
        """``with state.expect("evaluation", 600):`` announces that the block may take so many seconds: this rank is not
        hung before. Needed where others wait for a rank that is busy for much longer than its steps take. Inside
        another such block the earlier end counts. Afterwards ``--hang-floor`` decides. What the block takes is measured
        apart (see :meth:`goodput`)."""
        if seconds <= 0:
            raise ValueError(f"expect({what!r}, {seconds}): give the seconds that the block may take")
        with STATUS.trace.expect(what, seconds), METER.inside(f"phase.{what}"):
            yield

    def every(self, steps: int, function: Callable[[int], Any]) -> None:
        """Have all ranks call ``function(step)`` between two steps, whenever ``step`` is a multiple of ``steps``.

        The place for collectives outside of steps: evaluation, reductions for logging, saves of your own. Give the same
        functions on all ranks, before the loop. After a fault all ranks, the newcomer included, call it again if the
        step that is resumed is such a step: effects on the outside may come twice, and a function that was interrupted
        by the fault begins anew. It runs after the loop's body for that step, also after the last one.
        """
        self._loop.every(steps, function)

    def track(self, tracker: Tracker, every: int = 10) -> None:
        """Have rank 0 call ``tracker(step, values)`` for each committed step that is a multiple of ``every``: goodput,
        seconds by category, step time, protected lag, recoveries. ``p2pstate.integrations`` has TensorBoard and MLflow;
        any function with these two arguments will do. One that raises is left out, with a warning."""
        if self._context.rank == 0:
            self._loop.track(tracker, every)

    @property
    def rehearsing(self) -> bool:
        """True while this process runs steps alone, before it joins a running job. Do nothing then that others
        can see."""
        return self._loop.rehearsing

    @property
    def replaying(self) -> bool:
        """True in the body of a loop over :meth:`run` for a step that this process had committed before a fault took it
        back: its effects on the state have to come again, its effects on the outside (logs) may be left out."""
        return self._loop.replaying

    def describe(self) -> Description:
        """What is protected, where the copies are, what they cost, and what the loss of each node does now.

        ``print(state.describe())`` shows it all. No collective: any rank may call it alone.
        """
        context, settings = self._context, self._loop.protection.settings
        protected = self._loop.protection.protected
        info = context.info
        return describe(
            context.rank,
            leaf_groups(self._loop.protection.look(), self._state.parameter_names(), context.places),
            [f"place {place}" for place in context.places] if info is None else [w.node for w in info.workers],
            [RankNeed(*sizes) for sizes in context.sizes_of_all or [context.sizes] * context.world_size],
            copies=settings.copies,
            lean=bool(context.lean),
            labels=None if info is None else info.labels,
            writes_to_disk=settings.checkpoint is not None,
            committed_step=self._loop.step,
            protected_step=None if protected is None else protected.step,
            every=self.stats.every,
            adapting=settings.every == "auto",
        )

    @property
    def committed_step(self) -> int:
        """The newest committed step."""
        return self._loop.committed_step

    def finished(self) -> bool:
        """Wait until a card has done all it was given: whether the newest committed step stands.

        A step is committed when all ranks have given it to their cards, which do it later. If a peer is lost meanwhile,
        what the step returned is worthless, and it comes again: False. Ask before using it (``loss.item()``) for
        anything but a print; asked in every step, it makes the card wait for the host. On the CPU a committed step
        stands: True at once.
        """
        return self._loop.protection.finish_card()

    def goodput(self) -> Goodput:
        """Where this rank's time went, in seconds by category; with earlier processes of it that its node knows of."""
        return Goodput(METER.totals())

    @property
    def stats(self) -> ProtectionStats:
        """What protection has cost and achieved in this process."""
        return self._loop.protection.stats


def _check_run(context: WorkerContext, state: TrainingState, settings: Settings, timeout_s: float) -> None:
    """Agree whether the run is lean. Raises ConfigError when ranks ask for different things, or a node lacks memory."""
    need = memory_need(state, context.rank, context.places)
    context.sizes = need.sizes
    context.num_meetings += 1
    if context.info is None:
        place = context.rank // context.num_local
        context.why_not_full = look_alone(context.places, place, settings, need, context.link.room())
        return
    assert REGISTRY.make_store is not None
    store = PrefixStore(f"replicator/{context.num_meetings}", REGISTRY.make_store(context.info.epoch))
    room = context.link.room() if context.local_rank == 0 else None
    decision, context.sizes_of_all = meet(store, context.info, context.rank, settings, need, room, timeout_s)
    context.lean = decision.lean
    if decision.said and context.rank == 0:
        context.link.send("event", kind="lean", text=decision.said)


def _card_of(state: TrainingState) -> torch.device | None:
    """The card that the state is on. Raises ConfigError when there are several."""
    cards = {leaf.tensor.device for leaf in state.collect().leaves if leaf.tensor.device.type == "cuda"}
    if len(cards) > 1:
        names = " and ".join(sorted(map(str, cards)))
        raise ConfigError(f"the state of this process is on {names}: start one process for each card")
    return next(iter(cards), None)


def _default_group() -> P2PGroup:
    if not dist.is_initialized():
        raise ConfigError("there is no process group yet: call p2pstate.init_process_group() before Replicator(...)")
    group = dist.group.WORLD
    if not isinstance(group, P2PGroup):
        raise ConfigError(
            f"the default process group is a {type(group).__name__}, which cannot be repaired in place: create it with "
            "p2pstate.init_process_group() instead of a group object of your own"
        )
    return group


def _policy(
    where: str | os.PathLike[str],
    every: int | timedelta,
    keep: int,
    stage: str | os.PathLike[str] | None,
) -> CheckpointPolicy:
    place = os.fspath(where)
    if not isinstance(where, str) and re.match(r"\w[\w+.-]*:/", place):
        raise ValueError(
            f"checkpoint={where!r}: give a URL as a string; a path has one slash less, and is another place"
        )
    return CheckpointPolicy(
        path=place if is_url(place) or not place else os.path.abspath(local_path(place)),
        every_steps=None if isinstance(every, timedelta) else every,
        every_s=every.total_seconds() if isinstance(every, timedelta) else None,
        keep=keep,
        stage="" if stage is None else os.path.abspath(local_path(os.fspath(stage))),
    )


def _sorted(
    components: Sequence[Any], data: Any
) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer], dict[str, Any]]:
    """Models; optimizers, with those inside of others; and all else, by the names that its state has.

    Raises ValueError where one kind is missing, or the state of a component cannot be captured.
    """
    models = [c for c in components if isinstance(c, torch.nn.Module)]
    optimizers = with_inner(c for c in components if isinstance(c, torch.optim.Optimizer))
    objects: dict[str, Any] = {}
    for component in components:
        if not isinstance(component, torch.nn.Module | torch.optim.Optimizer):
            _check_stateful(component, "positional argument")
            objects[free_name(component, objects)] = component
    if data is not None:
        _check_stateful(data, "data=")
        if not hasattr(data, "__iter__"):
            raise ValueError(f"data= takes an iterable of batches, not {type(data).__name__}")
        _warn_of_lost_samples(data)
        objects["data"] = data
    if not models or not optimizers:
        missing = "model (a torch.nn.Module)" if not models else "optimizer (a torch.optim.Optimizer)"
        raise ValueError(f"Replicator needs at least one {missing} among its arguments")
    return models, optimizers, objects


def _warn_of_lost_samples(data: Any) -> None:
    read_by_torchdata = data.dataset if type(data).__module__.partition(".")[0] == "torchdata" else None
    if loses_samples(data) or loses_samples(read_by_torchdata):
        warnings.warn(
            "data= goes through a shuffle buffer whose samples are no part of its state: after a fault those that are "
            "in it are lost. p2pstate.data.Loader, or the same data set without shuffle(), goes on exactly",
            RuntimeWarning,
            stacklevel=4,
        )


def _check_stateful(component: Any, what: str) -> None:
    missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(component, name, None))]
    if missing and not is_generator(component):
        raise ValueError(
            f"{what} of type {type(component).__name__} has no {' and no '.join(missing)}(): its state could not be "
            "captured; give it both methods, or put plain values into extra="
        )
