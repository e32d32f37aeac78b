"""Shipping: from the own node's slots to the buddy's, in the background, one version at a time.

In: the images of one version (from capture.py). Out: complete own slots, a complete copy of the ward's shard in this
node's vault, and the newest version of which both copies of this rank's own shard are known to be complete.

The exchange, between every rank and its buddy and ward at once, over the replication group: a fixed-size header (so
that sizes are agreed before bytes move), the bytes in chunks straight from and into slots, the digest, and an
acknowledgement once the receiver has computed the same digest. Last come the digests of what both ranks hold alike and
therefore do not ship: a difference is silent corruption, and is reported.

Invariants: one thread, the only one that uses the replication group between recoveries; an error here never reaches a
training group; nothing is allocated per step beyond chunk handles; a slot that holds the version to keep is not
written.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from p2pstate.capture import Image, SlotPair
from p2pstate.errors import Retryable
from p2pstate.groups.inner import Inner
from p2pstate.groups.waiting import Abandoned
from p2pstate.slots import Header, Slot, digest_of
from p2pstate.stats import ProtectionStats
from p2pstate.types import Part, Version
from p2pstate.worker.link import Link

__all__ = ["CHUNK_BYTES", "Shipper", "bytes_of", "receive_chunks", "send_chunks"]

CHUNK_BYTES = 4 << 20
CHUNKS_IN_FLIGHT = 4
_HEADER, _DATA, _DIGEST, _ACK, _ALIKE = 1, 2, 3, 4, 5  # gloo tags
_ROW_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Job:
    images: Sequence[Image]
    keep: Version | None
    inner: Inner
    began: float  # monotonic seconds


class Shipper:
    """One background thread. ``buddy`` and ``ward`` are ranks, or None where the job has one node only."""

    def __init__(
        self,
        link: Link,
        buddy: int | None,
        ward: int | None,
        on_error: Callable[[int, BaseException], None],
        stats: ProtectionStats,
    ) -> None:
        self._stats = stats
        self._link = link
        self._buddy, self._ward = buddy, ward
        self._on_error = on_error
        self._ward_slots = SlotPair(link, Part.own(ward)) if ward is not None else None
        self._changed = threading.Condition()
        self._job: _Job | None = None
        self._complete = Version(0, -1)
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="p2pstate-shipper", daemon=True)
        self._thread.start()

    @property
    def complete(self) -> Version:
        """Newest version of this rank's shard that is complete on its own node and at its buddy."""
        return self._complete

    def ship(self, images: Sequence[Image], keep: Version | None, inner: Inner, began: float) -> None:
        """Start on a version, whose capture began at ``began``. The one before must be done (see :meth:`wait`)."""
        with self._changed:
            assert self._job is None, "a version was captured while the one before it was still being shipped"
            self._job = _Job(images, keep, inner, began)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being shipped; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._job is None, timeout_s)

    def cancel(self) -> None:
        """Leave the thread behind: it may be blocked in gloo for a while, but writes no slot from now on."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def _begin(self, slot: Slot) -> None:
        with self._changed:
            if self._cancelled:
                raise Abandoned("shipping was given up: the round is over")
            slot.begin()

    def _publish(self, slot: Slot, header: Header) -> None:
        with self._changed:
            if self._cancelled:
                raise Abandoned("shipping was given up: the round is over")
            slot.complete(header)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._cancelled)
                job = self._job
            if self._cancelled or job is None:
                return
            try:
                version = self._do(job)
            except Exception as error:
                self._finish(None)
                self._on_error(job.inner.epoch, error.with_traceback(None))
            else:
                self._stats.protected_s.append(time.monotonic() - job.began)
                self._finish(version)
            del job

    def _finish(self, version: Version | None) -> None:
        with self._changed:
            if version is not None:
                self._complete = version
            self._job = None
            self._changed.notify_all()

    def _do(self, job: _Job) -> Version | None:
        own = next(image for image in job.images if image.part.kind == "own")
        shared: dict[Part, bytes] = {}
        for image in job.images:
            if image is not own:
                shared[image.part] = digest_of(image.slot.body(image.num_bytes))
                self._publish(image.slot, image.header(shared[image.part]))
        if self._buddy is None or self._ward is None:
            self._publish(own.slot, own.header(digest_of(own.slot.body(own.num_bytes))))
            return own.version
        return own.version if self._exchange(job, own, shared, self._buddy, self._ward) else None

    def _exchange(self, job: _Job, own: Image, shared: dict[Part, bytes], buddy: int, ward: int) -> bool:
        group = job.inner.group
        head = torch.tensor([*own.version, own.data_bytes, own.tail_bytes, own.num_shared_sets], dtype=torch.int64)
        theirs = torch.zeros_like(head)
        _swap(group, head, buddy, theirs, ward, _HEADER)
        epoch, step, data_bytes, tail_bytes, num_shared_sets = theirs.tolist()
        if Version(epoch, step) != own.version or data_bytes < 0 or tail_bytes < 0:
            raise Retryable(f"rank {ward} ships step {step} of round {epoch}, expected {own.version}")
        assert self._ward_slots is not None
        slot = self._ward_slots.target(data_bytes + tail_bytes, job.keep)
        self._begin(slot)
        received = Image(Part.own(ward), slot, own.version, data_bytes, tail_bytes, num_shared_sets)
        mine, computed = self._move(group, own, buddy, received, ward)
        self._publish(own.slot, own.header(mine))
        announced = torch.zeros(16, dtype=torch.uint8)
        _swap(group, torch.frombuffer(bytearray(mine), dtype=torch.uint8), buddy, announced, ward, _DIGEST)
        good = bytes(announced.numpy()) == computed
        if good:
            self._publish(slot, received.header(computed))
        self._stats.num_shipped_bytes += own.num_bytes
        verdict, answer = torch.tensor([int(good)]), torch.zeros(1, dtype=torch.int64)
        _swap(group, verdict, ward, answer, buddy, _ACK)
        self._compare(group, own.version, shared, num_shared_sets, buddy, ward)
        if not good:
            raise Retryable(f"the copy of shard {ward} arrived with another digest than it was sent with")
        return bool(answer.item())

    def _compare(
        self, group: Any, version: Version, shared: dict[Part, bytes], num_theirs: int, buddy: int, ward: int
    ) -> None:
        """What this rank and its ward hold alike was captured on both nodes: the digests tell whether it still is."""
        works = []
        theirs = torch.zeros(num_theirs * _ROW_BYTES, dtype=torch.uint8)
        if num_theirs:
            works.append(group.recv([theirs], ward, _ALIKE))
        if shared:
            rows = bytearray().join(_row(part) + digest for part, digest in sorted(shared.items()))
            works.append(group.send([torch.frombuffer(rows, dtype=torch.uint8)], buddy, _ALIKE))
        for work in works:
            work.wait()
        told = bytes(theirs.numpy())
        digests = {told[i : i + 16]: told[i + 16 : i + _ROW_BYTES] for i in range(0, len(told), _ROW_BYTES)}
        for part, digest in shared.items():
            if digests.get(_row(part), digest) != digest:
                self._link.send("event", kind="replicas_differ", part=str(part), other=ward, version=list(version))

    def _move(self, group: Any, own: Image, buddy: int, ward_image: Image, ward: int) -> tuple[bytes, bytes]:
        """Send the own image and receive the ward's, both hashed chunk by chunk on the way."""
        outgoing = _chunks(own.slot, own.num_bytes)
        incoming = _chunks(ward_image.slot, ward_image.num_bytes)
        hash_out, hash_in = xxhash.xxh3_128(), xxhash.xxh3_128()
        in_flight: deque[tuple[Any, torch.Tensor]] = deque()
        sent: deque[tuple[Any, torch.Tensor]] = deque()
        next_in = next_out = 0
        while next_in < len(incoming) or next_out < len(outgoing) or in_flight:
            while next_in < len(incoming) and len(in_flight) < CHUNKS_IN_FLIGHT:
                chunk = incoming[next_in]
                in_flight.append((group.recv([chunk], ward, _DATA), chunk))
                next_in += 1
            if next_out < len(outgoing):
                chunk = outgoing[next_out]
                sent.append((group.send([chunk], buddy, _DATA), chunk))
                hash_out.update(bytes_of(chunk))
                next_out += 1
            if len(sent) > CHUNKS_IN_FLIGHT:
                sent.popleft()[0].wait()
            if in_flight and (len(in_flight) == CHUNKS_IN_FLIGHT or next_out == len(outgoing)):
                work, chunk = in_flight.popleft()
                work.wait()
                hash_in.update(bytes_of(chunk))
        for work, _ in sent:
            work.wait()
        return hash_out.digest(), hash_in.digest()


def send_chunks(group: Any, body: torch.Tensor, to: int, tag: int) -> None:
    """Send a 1-D uint8 tensor of a size the receiver knows."""
    works: deque[Any] = deque()
    for chunk in body.split(CHUNK_BYTES):
        works.append(group.send([chunk], to, tag))
        if len(works) > CHUNKS_IN_FLIGHT:
            works.popleft().wait()
    for work in works:
        work.wait()


def receive_chunks(group: Any, num_bytes: int, sender: int, tag: int) -> tuple[torch.Tensor, bytes]:
    """Receive what :func:`send_chunks` sends; returns it with its digest."""
    body = torch.empty(num_bytes, dtype=torch.uint8)
    digest = xxhash.xxh3_128()
    works: deque[tuple[Any, torch.Tensor]] = deque()
    for chunk in body.split(CHUNK_BYTES):
        works.append((group.recv([chunk], sender, tag), chunk))
        if len(works) > CHUNKS_IN_FLIGHT:
            work, done = works.popleft()
            work.wait()
            digest.update(bytes_of(done))
    for work, done in works:
        work.wait()
        digest.update(bytes_of(done))
    return body, digest.digest()


def _row(part: Part) -> bytes:
    """16 bytes that name a part."""
    return xxhash.xxh3_128_digest(repr(tuple(part)).encode())


def bytes_of(chunk: torch.Tensor) -> memoryview:
    """The memory of a 1-D uint8 tensor."""
    return memoryview(chunk.numpy())  # type: ignore[arg-type]


def _swap(group: Any, out: torch.Tensor, to: int, into: torch.Tensor, sender: int, tag: int) -> None:
    receiving = group.recv([into], sender, tag)
    sending = group.send([out], to, tag)
    receiving.wait()
    sending.wait()


def _chunks(slot: Slot, num_bytes: int) -> list[torch.Tensor]:
    return list(torch.frombuffer(slot.body(num_bytes), dtype=torch.uint8).split(CHUNK_BYTES))
