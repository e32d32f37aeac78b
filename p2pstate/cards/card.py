"""One card, as far as copying from it goes: a stream beside the training's, marks on it, and pinned host memory.

In: tensors on the card, memory of the host. Out: the same bytes there, once a mark has been reached. Nothing here waits
on the host. :class:`Card` is the seam: what decides about order (gather.py) is tested with one that records.

Invariant: whichever thread calls, the work goes to this card.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from p2pstate.errors import P2PStateError

__all__ = ["Card", "CudaCard", "Mark", "NotPinned", "copy_all"]

_ALIKE = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
    }
)
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: for every context of this process


class NotPinned(P2PStateError):
    """CUDA refused to pin memory: copies to it take about four times as long, and the host waits for them."""


class Mark(Protocol):
    """A place in the order of a stream."""

    def query(self) -> bool:
        """Whether everything before it has run."""
        ...


class Card(Protocol):
    """``copies``: the stream of our own; ``training``: the calling thread's current stream."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is on this card."""
        ...

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Memory on the card for the stream of copies."""
        ...

    def follow_training(self) -> None:
        """What is queued on the stream of copies from now on runs after all that training has queued so far."""
        ...

    def pack(self, chunk: torch.Tensor, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queue: zero ``chunk``, then copy each source to its place in it, with few kernels."""
        ...

    def fetch(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Queue: copy to host memory. The host waits only where that is not pinned."""
        ...

    def mark(self) -> Mark:
        """After all copies queued so far."""
        ...

    def hold_training(self, mark: Mark) -> None:
        """What training queues from now on runs after ``mark``."""
        ...

    def mark_training(self) -> Mark:
        """After all that training has queued so far."""
        ...

    def pin(self, memory: torch.Tensor) -> None:
        """Raises NotPinned."""
        ...

    def unpin(self, address: int) -> None:
        """Of memory that was pinned, before it is unmapped."""
        ...


def copy_all(into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its contiguous place, with one call for all of one dtype: torch makes one kernel of many
    copies only if they are alike."""
    alike: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for place, source in zip(into, sources, strict=True):
        if source.dtype in _ALIKE and source.is_contiguous() and not source.is_conj() and not source.is_neg():
            places, its = alike.setdefault(source.dtype, ([], []))
            places.append(place)
            its.append(source)
        else:
            place.copy_(source)
    for places, its in alike.values():
        torch._foreach_copy_(places, its)


class CudaCard:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = torch.cuda.Stream(device)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def empty(self, num_bytes: int) -> torch.Tensor:
        with torch.cuda.stream(self._copies):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def follow_training(self) -> None:
        self._copies.wait_stream(torch.cuda.current_stream(self.device))

    def pack(self, chunk: torch.Tensor, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with torch.cuda.stream(self._copies):
            chunk.zero_()
            copy_all(into, sources)

    def fetch(self, into: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._copies):
            into.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event: Mark = self._copies.record_event()
        return event

    def hold_training(self, mark: Mark) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)  # type: ignore[arg-type]

    def mark_training(self) -> Mark:
        event: Mark = torch.cuda.current_stream(self.device).record_event()
        return event

    def pin(self, memory: torch.Tensor) -> None:
        with torch.cuda.device(self.device):
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _REGISTER_PORTABLE))
        if code:
            raise NotPinned(f"cudaHostRegister refused {memory.nbytes} bytes (error {code})")

    def unpin(self, address: int) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(address)
