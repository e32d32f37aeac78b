"""Whether tensors are still over the memory they were over before, so that what is known of them can be used again.

In: live tensors. Out: yes or no, at a fraction of the cost of looking at them anew.
Invariant: yes only if every local tensor is the same object with the same storage, offset, shape, strides and type as
then, and every DTensor has the same mesh and placements; whether the tensors are the same objects, the caller knows.
Known limit: of tensor subclasses, and of conjugate and negative views, nothing can be known.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from p2pstate.state.leaves import is_plain

__all__ = ["SameMemory"]

_LOCAL = attrgetter("_local_tensor")
_SPEC = attrgetter("_spec")
_DTYPE = attrgetter("dtype")


class SameMemory:
    """Keeps aliases of ``tensors``, and by that their memory."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        tensors = list(tensors)
        self._distributed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        self._specs = list(map(_SPEC, self._distributed))
        self._parts: list[Any] = list(map(_LOCAL, self._distributed))
        self._locals = [tensor for tensor in tensors if not isinstance(tensor, DTensor)] + self._parts
        self.known = all(map(_is_simple, self._locals))
        self._aliases = [local.detach() for local in self._locals] if self.known else []
        self._dtypes = list(map(_DTYPE, self._locals))

    def holds(self) -> bool:
        """False as well where nothing can be known."""
        return (
            self.known
            and all(map(is_, map(_SPEC, self._distributed), self._specs))
            and all(map(is_, map(_LOCAL, self._distributed), self._parts))
            and all(map(torch.Tensor.is_set_to, self._aliases, self._locals))
            and all(map(is_, map(_DTYPE, self._locals), self._dtypes))
        )


def _is_simple(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
