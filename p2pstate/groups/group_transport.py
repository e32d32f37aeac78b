"""Bulk transfers over a process group of their own: NCCL on cards, so that RDMA or EFA carries them.

In: the :class:`Inner` of the replication group, messages. Out: messages moved in chunks of bounded size, hashed on the
host. Every exchange has four parts, each for all messages: frames, heads, bodies, digests; in each part the n-th chunk
of every pair of ranks travels in the n-th turn, so that ranks with different amounts to move never wait in a circle.

On a card a chunk goes from the host to the card, over the network and to the host again, on two streams that training
does not use; the next one is on its way to the card meanwhile. Nothing waits in CUDA: marks are polled, and a cut or
the end of patience ends the wait.

Invariants: one thread uses the group at a time; memory on the card is two chunks per rank and direction, allocated
once; a body goes straight from and into its slot where the group works on host memory.
Known limits: on host memory a turn begins when the one before has ended; a transfer that no cut can free (see
waiting.py) leaves its thread behind until the group's timeout.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import xxhash

from p2pstate.groups.inner import Inner
from p2pstate.groups.nccl import wait_on_host
from p2pstate.groups.transport import (
    DIGEST_BYTES,
    FRAME_BYTES,
    Incoming,
    OnError,
    Outgoing,
    TransferFailed,
    accepted,
    pack_frame,
    unpack_frame,
    whole,
)

__all__ = ["CHUNK_BYTES", "GroupTransport"]

CHUNK_BYTES = 4 << 20
CARD_CHUNK_BYTES = 16 << 20
_TAG = 1


class Streams:
    """Two streams of a card: ``loading`` up to the network, ``storing`` from there on."""

    def __init__(self, device: torch.device) -> None:
        self._loading, self._storing = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def loading(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._loading)

    def storing(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._storing)

    def stored(self) -> Any:
        """A mark after all that was queued for storing."""
        return self._storing.record_event()


class GroupTransport:
    """``device``: of the tensors that the group sends and receives."""

    def __init__(self, inner: Inner, device: torch.device, silence_s: float) -> None:
        self.epoch = inner.epoch
        self.name = "nccl" if device.type == "cuda" else "gloo"
        self._inner = inner
        self._device = device
        self._silence_s = silence_s
        self._staging: dict[tuple[str, int, int], torch.Tensor] = {}
        self._streams = Streams(device) if device.type == "cuda" else None
        self._chunk_bytes = CHUNK_BYTES if self._streams is None else CARD_CHUNK_BYTES
        self._cut = False

    def exchange(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], on_error: OnError = lambda error: None
    ) -> None:
        try:
            self._exchange(outgoing, incoming)
        except Exception as error:  # the first one ends the whole exchange
            if isinstance(error, RuntimeError):
                failed: Exception = TransferFailed(f"a transfer over {self.name} failed: {error}")
            else:
                failed = error.with_traceback(None)
            on_error(failed)
            raise failed from None

    def cut(self) -> None:
        self._cut = True
        self._inner.cut()

    def release(self) -> threading.Event:
        self._cut = True
        self._staging.clear()
        return self._inner.release()

    def _exchange(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> None:
        packed = [memoryview(bytearray(pack_frame(out))) for out in outgoing]
        senders = [message.sender for message in incoming]
        frames = [bytearray(FRAME_BYTES) for _ in incoming]
        self._part(
            [_Piece(out.to, raw[:FRAME_BYTES]) for out, raw in zip(outgoing, packed, strict=True)],
            _pieces(senders, frames),
        )
        sizes = [unpack_frame(bytes(raw), sender) for sender, raw in zip(senders, frames, strict=True)]
        heads = [bytearray(head_bytes) for head_bytes, _ in sizes]
        self._part(
            [_Piece(out.to, raw[FRAME_BYTES:]) for out, raw in zip(outgoing, packed, strict=True)],
            _pieces(senders, heads),
        )
        bodies, hashers = [], [out.payload.claim() for out in outgoing]
        for message, head, (_, body_bytes) in zip(incoming, heads, sizes, strict=True):
            body = accepted(message, bytes(head), body_bytes)
            bodies.append(_Piece(message.sender, body, xxhash.xxh3_128()))
        self._part(
            [_Piece(out.to, whole(out.payload.body), hasher) for out, hasher in zip(outgoing, hashers, strict=True)],
            bodies,
        )
        for out, hasher in zip(outgoing, hashers, strict=True):
            if hasher is not None:
                out.payload.hashed(hasher.digest())
        announced = [bytearray(DIGEST_BYTES) for _ in incoming]
        self._part(
            [_Piece(out.to, memoryview(bytearray(out.payload.digest(self._silence_s)))) for out in outgoing],
            _pieces(senders, announced),
        )
        if self._cut:
            raise TransferFailed("a transfer was given up: the round is over")
        errors = []
        for message, piece, digest in zip(incoming, bodies, announced, strict=True):
            assert piece.hasher is not None
            try:
                message.arrived(piece.hasher.digest(), bytes(digest))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _part(self, sends: Sequence[_Piece], receives: Sequence[_Piece]) -> None:
        """Move all of these, in turns of one chunk to and from each rank."""
        under_way: deque[_Turn] = deque()
        turns = (_turns(sends, self._chunk_bytes), _turns(receives, self._chunk_bytes))
        for number, (out, into) in enumerate(zip_longest(*turns, fillvalue=())):
            under_way.append(self._begin(out, into, number % 2))
            if self._streams is None or len(under_way) == 2:
                self._end(under_way.popleft())
        while under_way:
            self._end(under_way.popleft())

    def _begin(self, sends: Sequence[_Piece], receives: Sequence[_Piece], buffer: int) -> _Turn:
        group = self._inner.group
        if group is None:
            raise TransferFailed("a transfer was given up: the round is over")
        coalesces = group._get_backend(self._device).supports_coalescing
        with nullcontext() if self._streams is None else self._streams.loading():
            landing = [self._tensor("receive", piece, buffer) for piece in receives]
            leaving = [self._tensor("send", piece, buffer) for piece in sends]
            if self._streams is not None:
                for piece, tensor in zip(sends, leaving, strict=True):
                    tensor.copy_(_host(piece.view), non_blocking=True)
            if coalesces:  # or two ranks that send to each other wait for each other's receive
                group._start_coalescing(self._device)
            works = [group.recv([tensor], piece.rank, _TAG) for piece, tensor in zip(receives, landing, strict=True)]
            works += [group.send([tensor], piece.rank, _TAG) for piece, tensor in zip(sends, leaving, strict=True)]
            if coalesces:
                works = [group._end_coalescing(self._device)]
        stored = self._store(works, receives, landing) if self._streams is not None else None
        for piece in sends:
            if piece.hasher is not None:
                piece.hasher.update(piece.view)
        return _Turn(works, receives, stored)

    def _store(self, works: Sequence[Any], receives: Sequence[_Piece], landing: Sequence[torch.Tensor]) -> Any:
        """Queue what follows the network. Returns the mark after it."""
        assert self._streams is not None
        with self._streams.storing():
            for work in works:
                work.wait()  # the stream does, not the host
            for piece, tensor in zip(receives, landing, strict=True):
                _host(piece.view).copy_(tensor, non_blocking=True)
            return self._streams.stored()

    def _end(self, turn: _Turn) -> None:
        if turn.stored is None:
            for work in turn.works:
                work.wait()
        else:
            inner = self._inner
            wait_on_host(turn.stored.query, lambda: self._cut or inner.error() is not None, self._silence_s)
            if self._cut:
                raise TransferFailed("a transfer was given up: the round is over")
            if (what := inner.error()) is not None:
                raise TransferFailed(what)
        for piece in turn.receives:
            if piece.hasher is not None:
                piece.hasher.update(piece.view)

    def _tensor(self, direction: str, piece: _Piece, buffer: int) -> torch.Tensor:
        """What the group works on: the memory itself, or a chunk on the card."""
        if self._streams is None:
            return _host(piece.view)
        chunk = self._staging.get((direction, piece.rank, buffer))
        if chunk is None:
            chunk = torch.empty(self._chunk_bytes, dtype=torch.uint8, device=self._device)
            self._staging[direction, piece.rank, buffer] = chunk
        return chunk[: len(piece.view)]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Memory that goes to or comes from ``rank``, and what hashes it."""

    rank: int
    view: memoryview
    hasher: xxhash.xxh3_128 | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    """One chunk to and from each rank, under way. ``stored``: on a card, the mark after its last copy to the host."""

    works: Sequence[Any]
    receives: Sequence[_Piece]
    stored: Any


def _pieces(senders: Sequence[int], buffers: Sequence[bytearray]) -> list[_Piece]:
    return [_Piece(sender, memoryview(buffer)) for sender, buffer in zip(senders, buffers, strict=True)]


def _turns(pieces: Sequence[_Piece], chunk_bytes: int) -> Iterator[list[_Piece]]:
    """The next chunk of every rank, again and again; of one rank all chunks in their order."""
    chunks: dict[int, list[_Piece]] = {}
    for piece in pieces:
        for start in range(0, len(piece.view), chunk_bytes):
            chunk = _Piece(piece.rank, piece.view[start : start + chunk_bytes], piece.hasher)
            chunks.setdefault(piece.rank, []).append(chunk)
    for number in range(max(map(len, chunks.values()), default=0)):
        yield [chunks[rank][number] for rank in sorted(chunks) if number < len(chunks[rank])]


def _host(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)
