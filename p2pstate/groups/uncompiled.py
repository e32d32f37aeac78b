"""Functions that torch.compile leaves alone.

In: functions of ours that torch calls while a compiled function runs (a group's methods out of C++, hooks). Out: the
same functions, run as they are, with all that they call. What ``torch.compiler.disable`` does, without importing the
compiler, which takes half a second.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["uncompiled"]

T = TypeVar("T")


def uncompiled(thing: T) -> T:
    """A decorator of a function, or of a class: of all its own methods."""
    members: list[Any] = list(vars(thing).values()) if isinstance(thing, type) else [thing]
    skip = eval_frame._FrameAction.SKIP
    for each in members:
        function = each.fget if isinstance(each, property) else getattr(each, "__func__", each)
        if isinstance(function, FunctionType):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where it would be traced into
            eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return thing
