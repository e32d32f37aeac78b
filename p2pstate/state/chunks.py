"""Which part of which bigger tensor a leaf is, and which ranks hold the same part.

In: leaves with the distributed tensors they belong to. Out: plain rows that travel with a captured image, so that
whoever has only its bytes can put the parts together again, for the same number of ranks or another.
Invariant: a leaf without a row is a whole tensor that belongs to this rank alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, cast

from p2pstate.state.leaves import Leaf

__all__ = ["chunks_of"]


class _Chunk(Protocol):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Divided(Protocol):
    """What torch.distributed.checkpoint asks of a DTensor."""

    def __create_chunk_list__(self) -> list[_Chunk]: ...


def chunks_of(leaves: Iterable[Leaf]) -> dict[str, list[Any]]:
    """name -> [global shape, offsets of this part, ranks that hold it, ranks that have parts of the same tensor].

    Of all leaves that are more than this rank's.
    """
    rows: dict[str, list[Any]] = {}
    for leaf in leaves:
        if leaf.whole is not None:
            (chunk,) = cast(_Divided, leaf.whole).__create_chunk_list__()
            ranks = sorted(leaf.whole.device_mesh.mesh.flatten().tolist())
            rows[leaf.name] = [list(leaf.whole.shape), list(chunk.offsets), list(leaf.holders), ranks]
        elif len(leaf.holders) > 1:
            holders = list(leaf.holders)
            rows[leaf.name] = [list(leaf.tensor.shape), [0] * leaf.tensor.dim(), holders, holders]
    return rows
