"""What an exception in a training step means: whether the step is tried again, and whether this process can.

In: the exception, the models it was raised in. Out: models that are as before the step, or this process on its way out;
to its agent, a signature to recognise the exception by when it comes again: then it ends the script.

An exception that leaves forward or the code around it leaves DDP and FSDP2 able to run forward again. One that leaves
backward does not: DDP's reducer stays half way through its buckets, FSDP2 keeps parameters unsharded and stops training
without a word. FSDP2 offers ``reset_iter_state`` (torch 2.13 and newer) for both; for DDP there is no such thing that
leaves the layout of its buckets as it is on the other ranks.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from p2pstate.errors import GradientsLost, NotFinite, P2PStateError
from p2pstate.groups.status import STATUS
from p2pstate.worker.context import WorkerContext

__all__ = ["UserErrors", "can_be_reset", "clear_wrappers", "describe", "reset", "signature"]

_NEVER_RESET = (DistributedDataParallel, FullyShardedDataParallel)
_BACKWARD = "_engine_run_backward"  # torch.autograd.graph: every backward pass runs inside of it


class UserErrors:
    """Of the steps of one Replicator."""

    def __init__(self, context: WorkerContext, models: Iterable[nn.Module]) -> None:
        self._context = context
        self._models = list(models)

    def raised(self, step: int, error: BaseException, *, first: bool) -> bool:
        """The user's code has raised in ``step``. True: the step is discarded, and tried again. False: the exception
        ends the script, because nothing has worked before (``first``) or it was tried in vain. Does not return where
        another process has to try."""
        context, where = self._context, signature(error)
        discarded_anyway = STATUS.error is not None
        known = first or isinstance(error, NotFinite | GradientsLost) or context.raised == (step, where)
        if context.must_join or context.raised is None or (known and not discarded_anyway):
            context.failing = True
            return False
        text = describe(error)
        if discarded_anyway:  # it may have computed with what collectives do not return any more
            print(f"p2pstate: step {step}, discarded because of a fault, had also raised {text}", file=sys.stderr)
        else:
            print(f"p2pstate: an exception in step {step}, which is discarded and tried again:", file=sys.stderr)
            traceback.print_exception(error)
        STATUS.fail(P2PStateError(f"rank {context.rank} raised {text} in step {step}"))
        leaving = isinstance(error, SystemExit | KeyboardInterrupt) or not clear_wrappers(self._models, error)
        if not discarded_anyway:
            context.raised = step, where
            context.link.send("raised", epoch=STATUS.epoch, step=step, where=where, text=text, leaving=leaving)
        if leaving:
            context.leave(f"it raised {text} in step {step}, which only another process can try again")
        return True


def describe(error: BaseException) -> str:
    """One line. Does not fail, whatever the exception's own methods do."""
    return traceback.format_exception_only(error)[-1].strip().replace("\n", " ")[:500]


def signature(error: BaseException) -> str:
    """Equal for the same failure at the same place. The text of an exception may differ each time."""
    frames = list(_frames(error.__traceback__))
    where = f"{frames[-1].tb_frame.f_code.co_filename}:{frames[-1].tb_lineno}" if frames else "nowhere"
    return f"{type(error).__module__}.{type(error).__qualname__} at {where}"


def clear_wrappers(models: Iterable[nn.Module], error: BaseException) -> bool:
    """Bring wrappers back to where a step begins. False: that cannot be done, this process must not train on.

    Call it when collectives echo: a wrapper may wait for one that was under way.
    """
    models = list(models)
    if any(not hasattr(module, "reset_iter_state") for module in _sharded(models)):
        return False
    if _in_backward(error) and not can_be_reset(models):
        return False
    reset(models)
    return True


def can_be_reset(models: Iterable[nn.Module]) -> bool:
    """Whether forward and backward can be left anywhere: FSDP2 can be reset, and nothing else keeps a state."""
    models = list(models)
    sharded = _sharded(models)
    # Without FSDP2 there may be a DDP around the models that are known here.
    others = (module for model in models for module in model.modules() if isinstance(module, _NEVER_RESET))
    return bool(sharded) and all(hasattr(module, "reset_iter_state") for module in sharded) and not any(others)


def reset(models: Iterable[nn.Module]) -> None:
    """FSDP2 as it is before forward. Call it when collectives echo."""
    for module in _sharded(models):
        state: Any = module._get_fsdp_state()
        if state._is_root:
            module.reset_iter_state()


def _sharded(models: Iterable[nn.Module]) -> list[Any]:
    return [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]


def _in_backward(error: BaseException) -> bool:
    """Whether it, or one that it came of, left a backward pass."""
    pending, seen = [error], set()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if any(frame.tb_frame.f_code.co_name == _BACKWARD for frame in _frames(each.__traceback__)):
            return True
        pending += [cause for cause in (each.__cause__, each.__context__) if cause is not None]
    return False


def _frames(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next
