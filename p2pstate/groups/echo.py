"""What a collective returns when there is nobody to talk to: defined values of the right shape. Pure.

In: the arguments of a ``ProcessGroup`` method. Out: its outputs filled (gathers repeat the own input, reductions and
broadcasts keep theirs, receives are zeros), so that sizes and indices stay valid and forward and backward run to their
end. The results are never used: the gate discards the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = [
    "all_to_all",
    "gather",
    "gather_coalesced",
    "gather_flat",
    "gather_lists",
    "keep",
    "reduce_scatter",
    "scatter",
    "zeros",
]

Tensor = torch.Tensor


def keep(rank: int, args: Sequence[Any]) -> Any:
    """allreduce, broadcast, reduce, send, barrier: the (first) argument stays as it is."""
    return args[0] if args and not _is_options(args[0]) else None


def zeros(rank: int, args: Sequence[Any]) -> Any:
    """recv, and the sizes and bytes of objects that are broadcast: zeros."""
    for tensor in _as_list(args[0]):
        tensor.zero_()
    return args[0]


def gather(rank: int, args: Sequence[Any]) -> Any:
    """allgather, gather: lists of output tensors, each becomes the own input."""
    outputs, inputs = args[0], args[1]
    lists = outputs if outputs and not isinstance(outputs[0], Tensor) else [outputs]
    for outs, own in zip(lists, _as_list(inputs), strict=False):
        for out in outs:
            _copy(out, own)
    return outputs


def gather_lists(rank: int, args: Sequence[Any]) -> Any:
    """allgather_coalesced: one list of outputs per rank, each as long as the list of inputs."""
    for outs in args[0]:
        for out, own in zip(outs, args[1], strict=True):
            _copy(out, own)
    return args[0]


def gather_flat(rank: int, args: Sequence[Any]) -> Any:
    """_allgather_base, all_gather_single, gather_single: one output tensor, a whole number of inputs (or none) long."""
    out, own = args[0], args[1]
    if own.numel():
        flat, source = out.view(-1), own.reshape(-1)
        for start in range(0, flat.numel(), source.numel()):
            piece = flat[start : start + source.numel()]
            piece.copy_(source[: piece.numel()])
    return out


def gather_coalesced(rank: int, args: Sequence[Any]) -> Any:
    """allgather_into_tensor_coalesced and its new name: a list of the above."""
    for out, own in zip(args[0], args[1], strict=True):
        gather_flat(rank, (out, own))
    return args[0]


def reduce_scatter(rank: int, args: Sequence[Any]) -> Any:
    """All reduce_scatter forms: the own piece of the own input."""
    outputs, inputs = args[0], args[1]
    for out, source in zip(_as_list(outputs), [inputs] if isinstance(outputs, Tensor) else inputs, strict=False):
        if isinstance(source, Tensor):
            start = rank * out.numel()
            _copy(out, source.reshape(-1)[start : start + out.numel()])
        else:
            _copy(out, source[rank])
    return outputs


def all_to_all(rank: int, args: Sequence[Any]) -> Any:
    """alltoall, alltoall_base, all_to_all_single: the own input where it fits, zeros elsewhere."""
    for out, source in zip(_as_list(args[0]), _as_list(args[1]), strict=False):
        _copy(out, source)
    return args[0]


def scatter(rank: int, args: Sequence[Any]) -> Any:
    """scatter: what the root would give itself; zeros elsewhere."""
    outputs, inputs = args[0], args[1]
    source = inputs[0] if inputs and not isinstance(inputs[0], Tensor) else inputs
    for out in _as_list(outputs):
        if source:
            _copy(out, source[rank])
        else:
            out.zero_()
    return outputs


def _copy(out: Tensor, source: Tensor) -> None:
    if out.numel() == source.numel():
        out.copy_(source.reshape(out.shape))
    else:
        out.zero_()


def _as_list(value: Any) -> Sequence[Tensor]:
    return [value] if isinstance(value, Tensor) else value


def _is_options(value: Any) -> bool:
    return not isinstance(value, Tensor | list | tuple)
