"""How a ``for`` loop over a generator ends: by ``break`` or ``return``, on purpose, or by an exception of its body.

In: the frames above a generator that is being closed. Out: the answer, while there is still time to act on it. It
decides whether this rank agrees with all others on the end (they will leave, too), or lets the exception go its way
(they are in their next step, and no vote would ever come).
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Generator, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

__all__ = ["LoopIterator", "leaves_by_exception", "looping_code"]

T = TypeVar("T")

# How the instructions begin that drop an iterator at the end of a loop, or the variable that holds it
_DROPS = ("POP_TOP", "POP_ITER", "END_FOR", "STORE_", "DELETE_")
_BETWEEN = (__name__, "p2pstate.steps")  # modules whose frames are between a loop and its generator


class LoopIterator(Iterator[T]):
    """What a loop runs on. ``on_close``: the user calls :meth:`close`, which is like ``break``."""

    def __init__(self, generator: Generator[T, Any, Any], on_close: Callable[[], None]) -> None:
        self._generator = generator
        self._on_close = on_close

    def __next__(self) -> T:
        return next(self._generator)

    def close(self) -> None:
        self._on_close()
        self._generator.close()


def looping_code() -> CodeType:
    """The code whose loop runs on the generator that asks, past generators in between (progress bars)."""
    return _looping_frame().f_code


def leaves_by_exception(code: CodeType) -> bool:
    """To be asked by a generator that is being closed: whether ``code``, whose loop ran on it, ends by an exception.

    ``break`` and ``return`` drop a loop's iterator in an instruction of their own, an exception does so wherever it was
    raised. Nothing else tells them apart in time: the exception is nobody's yet. False if somebody else drops it.
    """
    frame = _looping_frame()
    return frame.f_code is code and not dis.opname[code.co_code[frame.f_lasti]].startswith(_DROPS)


def _looping_frame() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and (_is_between(frame) or frame.f_code.co_flags & inspect.CO_GENERATOR):
        frame = frame.f_back
    return frame


def _is_between(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in _BETWEEN
