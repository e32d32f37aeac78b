"""What collectives returned at the start, so that a newcomer, which is alone there, gets the same answers.

In: the outputs of this process's collectives, one after the other in each group, until it has done its first steps.
Out: bytes for the agent to keep; and from them, in a process that takes the rank later, the same outputs for the same
calls. A script may thus broadcast objects, gather them or call ``dcp.load`` before its loop, and stages of a pipeline
may tell each other in their first step what they will send, and still be joined in place.

Invariants: answers are opaque bytes, copied into tensors of exactly the same size; a call that differs from the
recorded one ends the replay, for the script has taken another way; both are bounded.
Known limits: outputs of more than ``MAX_OUTPUT_BYTES`` are not kept, and a newcomer gets an echo (see echo.py) in their
place: parameters, which are restored afterwards; so do calls after the first ``MAX_BYTES`` in all. Of what a step
receives, less is kept (``MAX_STEP_OUTPUT_BYTES``), and nothing from a card, which is not to be waited for there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import torch

__all__ = ["MAX_BYTES", "Recording", "Replay"]

MAX_OUTPUT_BYTES = 1 << 20  # of one call
MAX_STEP_OUTPUT_BYTES = 1 << 16  # of one call in a step: rather what is said about tensors than what is in them
MAX_BYTES = 4 << 20  # in all
CALL_BYTES = 64  # what an entry takes besides its outputs


class Recording:
    """Safe from any thread. Calls are told by the key of their group, their number in it, and their name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, int], tuple[str, list[bytes]]] = {}
        self._left_bytes = MAX_BYTES
        self.in_steps = False  # what comes now comes in the first steps

    def ended(self, key: str, number: int, name: str, outputs: Any) -> None:
        """The call has ended well. Told again, it changes nothing: the outputs may belong to somebody else by now."""
        tensors = list(_tensors(outputs))
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        most = MAX_STEP_OUTPUT_BYTES if self.in_steps else MAX_OUTPUT_BYTES
        if self.in_steps and any(tensor.device.type != "cpu" for tensor in tensors):
            return
        with self._lock:
            if (key, number) in self._calls or num_bytes > most:
                return
            self._left_bytes -= num_bytes + CALL_BYTES
            if self._left_bytes >= 0:
                self._calls[key, number] = name, [_bytes_of(tensor) for tensor in tensors]

    def pack(self) -> bytes:
        """Empty when nothing was answered that a newcomer could miss."""
        with self._lock:
            if not any(outputs for _, outputs in self._calls.values()):
                return b""
            rows = [[key, number, name, outputs] for (key, number), (name, outputs) in self._calls.items()]
            packed: bytes = msgpack.packb(rows)
        return packed


class Replay:
    """Used from the threads that call collectives. Raises ValueError for bytes that no recording packs."""

    def __init__(self, packed: bytes) -> None:
        rows = msgpack.unpackb(packed) if packed else []
        self._calls = {(key, number): (name, outputs) for key, number, name, outputs in rows}

    def answer(self, key: str, number: int, name: str, outputs: Any) -> bool:
        """Fill the outputs as they were filled then. False: it is not known how."""
        recorded = self._calls.pop((key, number), None)
        if recorded is None:
            return False
        tensors = list(_tensors(outputs))
        if recorded[0] != name or [len(each) for each in recorded[1]] != [tensor.nbytes for tensor in tensors]:
            self._calls.clear()
            return False
        for tensor, answer in zip(tensors, recorded[1], strict=True):
            if answer:
                tensor.copy_(torch.frombuffer(bytearray(answer), dtype=tensor.dtype).reshape(tensor.shape))
        return True


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Of an argument that a collective fills: a tensor, a list of them, or lists of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    # a clone, because memory that NumPy has seen cannot be freed under its tensor any more, as FSDP does
    whole = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return whole.view(torch.uint8).numpy().tobytes()
