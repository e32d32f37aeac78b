"""What an exception in a training step means: whether this process can try the step again.

In: the exception, the models it was raised in. Out: a signature to recognise it by when it comes again, and models that
are as before the step, or the answer that this process has to be replaced.

An exception that leaves forward or the code around it leaves DDP and FSDP2 able to run forward again. One that leaves
backward does not: DDP's reducer stays half way through its buckets, FSDP2 keeps parameters unsharded and stops training
without a word. FSDP2 offers ``reset_iter_state`` (torch 2.13 and newer) for both; for DDP there is no such thing that
leaves the layout of its buckets as it is on the other ranks.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

__all__ = ["clear_wrappers", "describe", "signature"]

_BACKWARD = "_engine_run_backward"  # torch.autograd.graph: every backward pass runs inside of it


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
    modules = [module for model in models for module in model.modules()]
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    if any(not hasattr(module, "reset_iter_state") for module in sharded):
        return False
    # Without FSDP2 there may be a DDP around the models that are known here.
    with_ddp = not sharded or any(isinstance(module, DistributedDataParallel) for module in modules)
    if with_ddp and _in_backward(error):
        return False
    for module in sharded:
        state: Any = module._get_fsdp_state()
        if state._is_root:
            module.reset_iter_state()
    return True


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
