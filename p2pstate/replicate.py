"""Shipping: from the own node's slots to the buddies', in the background, one version at a time.

In: the images of one version (from capture.py). Out: complete own slots, complete copies of the wards' shards in this
node's vault, and the newest version of which everything that this rank writes is complete.

One message per version goes to every buddy: a head (version and sizes; the digests of what this rank holds together
with others and does not ship), the bytes straight from the slot, their digest. It is answered by nothing: whoever
received it says so with its vote, so that the smallest of all votes is complete in both places everywhere (see
:attr:`Shipper.complete`). What a ward holds alike and has another digest of is silent corruption, and is reported.

Invariants: one thread, the only one that uses the transport between recoveries; an error here never reaches a training
group; a slot that holds the version to keep is not written; a header is published only for bytes that were hashed, and
a ward's only if its sender computed the same digest.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from p2pstate.capture import Image, SlotPair
from p2pstate.errors import Retryable
from p2pstate.groups.transport import DIGEST_BYTES, Incoming, Outgoing, Payload, Transport, whole
from p2pstate.groups.waiting import Abandoned
from p2pstate.slots import Header, Slot, digest_of, part_name
from p2pstate.stats import ProtectionStats
from p2pstate.types import OLDEST, Part, Version
from p2pstate.worker.link import Link

__all__ = ["Shipper"]

# epoch, step, data bytes, tail bytes, balance, number of shared sets; then a row for each
_HEAD = struct.Struct("<qqqqqI")
_NAME_BYTES = 16
_ROW_BYTES = _NAME_BYTES + DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class _Job:
    images: Sequence[Image]
    keep: Version | None
    transport: Transport
    began: float  # monotonic seconds
    afterwards: Callable[[Sequence[Image]], None] | None
    land: Callable[[], None] | None


class Shipper:
    """One background thread. ``buddies`` keep copies of this rank's shard, ``wards`` have theirs kept here."""

    def __init__(
        self,
        link: Link,
        buddies: Sequence[int],
        wards: Sequence[int],
        on_error: Callable[[int, Exception], None],
        stats: ProtectionStats,
        on_map: Callable[[Slot], None] = lambda slot: None,
        expected_bytes: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """``on_map``: called with every slot for a ward that is mapped here. ``expected_bytes``: of wards' shards once
        all state exists, as far as it is known."""
        self._stats = stats
        self._link = link
        self._buddies = tuple(buddies)
        self._on_error = on_error
        self._ward_slots = {
            ward: SlotPair(link, Part.own(ward), expected_bytes=expected_bytes.get(ward, 0), on_map=on_map)
            for ward in wards
        }
        self._changed = threading.Condition()
        self._job: _Job | None = None
        self._complete = OLDEST
        self._cancelled = False
        self.alike = True  # no copy of a ward has shown yet that what it shares with this rank differs
        self._thread = threading.Thread(target=self._run, name="p2pstate-shipper", daemon=True)
        self._thread.start()

    @property
    def complete(self) -> Version:
        """Newest version of which this rank has completed its own slots and the copy of every ward."""
        return self._complete

    def ship(
        self,
        images: Sequence[Image],
        keep: Version | None,
        transport: Transport,
        began: float,
        afterwards: Callable[[Sequence[Image]], None] | None = None,
        land: Callable[[], None] | None = None,
    ) -> None:
        """Start on a version, whose capture began at ``began``. The one before must be done (see :meth:`wait`).

        ``land`` returns once all its bytes are in their slots, and raises if they must not be used. ``afterwards`` is
        called with the images once they have arrived, on the shipper's thread, before the version counts as complete.
        """
        with self._changed:
            assert self._job is None, "a version was captured while the one before it was still being shipped"
            self._job = _Job(images, keep, transport, began, afterwards, land)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being shipped; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._job is None, timeout_s)

    def cancel(self) -> None:
        """Leave the thread behind: it may be blocked for a while, but completes no slot from now on."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def begin(self, slot: Slot) -> None:
        with self._changed:
            if self._cancelled:
                raise Abandoned("shipping was given up: the round is over")
            slot.begin()

    def publish(self, slot: Slot, header: Header) -> None:
        with self._changed:
            if self._cancelled:
                raise Abandoned("shipping was given up: the round is over")
            slot.complete(header)

    def _publish_own(self, image: Image, digest: bytes) -> None:
        """What has no slot is complete at the buddies only."""
        if image.slot is not None:
            self.publish(image.slot, image.header(digest))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._cancelled)
                job = self._job
            if self._cancelled or job is None:
                return
            told = _Told(self._on_error, job.transport.epoch)
            try:
                version = self._do(job, told)
                if job.afterwards is not None:
                    job.afterwards(job.images)
            except Exception as error:
                _let_go(job.images)
                self._finish(None)
                told(error)
            else:
                _let_go(job.images)
                self._stats.protected_s.append(time.monotonic() - job.began)
                self._finish(version)
            del job

    def _finish(self, version: Version | None) -> None:
        with self._changed:
            if version is not None:
                self._complete = version
            self._job = None
            self._changed.notify_all()

    def _do(self, job: _Job, told: _Told) -> Version:
        if job.land is not None:
            job.land()
        own = next(image for image in job.images if image.part.kind == "own")
        shared: dict[Part, bytes] = {}
        for image in job.images:
            if image is not own:
                shared[image.part] = image.digest or digest_of(whole(image.body))
                self._publish_own(image, shared[image.part])
        payload = Payload(own.body, own.digest, on_digest=lambda digest: self._publish_own(own, digest))
        if own.digest is not None:
            self._publish_own(own, own.digest)
        elif not self._buddies:
            payload.hashed(digest_of(whole(own.body)))
        head = _head(own, shared)
        arrivals = [_Arrival(self, ward, own.version, job.keep, shared) for ward in self._ward_slots]
        job.transport.exchange(
            [Outgoing(buddy, head, payload) for buddy in self._buddies],
            [Incoming(arrival.ward, arrival.accept, arrival.arrived) for arrival in arrivals],
            told,  # of one lost transfer at once: the others may still take long
        )
        self._stats.num_shipped_bytes += own.num_bytes * len(self._buddies)
        for arrival in arrivals:
            self._ward_slots[arrival.ward].prepare(arrival.num_bytes)
        return own.version

    def slot_for(self, ward: int, num_bytes: int, keep: Version | None) -> Slot:
        return self._ward_slots[ward].target(num_bytes, keep)

    def differ(self, part: Part, other: int, version: Version) -> None:
        self.alike = False
        self._link.send("event", kind="replicas_differ", part=str(part), other=other, version=list(version))


class _Told:
    """Passes the first error of one version on, no other."""

    def __init__(self, on_error: Callable[[int, Exception], None], epoch: int) -> None:
        self._on_error = on_error
        self._epoch = epoch
        self._first: Exception | None = None

    def __call__(self, error: Exception) -> None:
        if self._first is None:
            self._first = error.with_traceback(None)
            self._on_error(self._epoch, error)


class _Arrival:
    """One ward's message on its way into a slot."""

    def __init__(
        self, shipper: Shipper, ward: int, version: Version, keep: Version | None, shared: Mapping[Part, bytes]
    ) -> None:
        self.ward = ward
        self._shipper = shipper
        self._version = version
        self._keep = keep
        self._shared = shared
        self._image: Image | None = None
        self._rows: dict[bytes, bytes] = {}

    @property
    def num_bytes(self) -> int:
        return 0 if self._image is None else self._image.num_bytes

    def accept(self, head: bytes, num_bytes: int) -> memoryview:
        """Raises Retryable for anything but the ward's shard of the version that is being shipped."""
        if len(head) < _HEAD.size or (len(head) - _HEAD.size) % _ROW_BYTES:
            raise Retryable(f"rank {self.ward} sent a head of {len(head)} bytes, which is none of a version")
        epoch, step, data_bytes, tail_bytes, balance, num_shared_sets = _HEAD.unpack_from(head)
        if Version(epoch, step) != self._version:
            raise Retryable(f"rank {self.ward} ships step {step} of round {epoch}, expected {self._version}")
        if min(data_bytes, tail_bytes) < 0 or data_bytes + tail_bytes != num_bytes:
            raise Retryable(f"rank {self.ward} announces {data_bytes} and {tail_bytes} bytes, and sends {num_bytes}")
        rows = head[_HEAD.size :]
        self._rows = {
            rows[start : start + _NAME_BYTES]: rows[start + _NAME_BYTES : start + _ROW_BYTES]
            for start in range(0, len(rows), _ROW_BYTES)
        }
        slot = self._shipper.slot_for(self.ward, num_bytes, self._keep)
        self._shipper.begin(slot)
        sizes = data_bytes, tail_bytes
        self._image = Image(Part.own(self.ward), slot, self._version, *sizes, num_shared_sets, balance=balance)
        return slot.body(num_bytes)

    def arrived(self, computed: bytes, announced: bytes) -> None:
        assert self._image is not None
        assert self._image.slot is not None
        # What this rank and its ward hold alike was captured on both nodes: the digests tell whether it still is.
        for part, digest in self._shared.items():
            if self._rows.get(part_name(part), digest) != digest:
                self._shipper.differ(part, self.ward, self._version)
        if computed != announced:
            raise Retryable(f"the copy of shard {self.ward} arrived with another digest than it was sent with")
        self._shipper.publish(self._image.slot, self._image.header(computed))


def _let_go(images: Sequence[Image]) -> None:
    """Whoever waits for the live state to be read need not any more."""
    for image in images:
        if image.live is not None:
            image.live.give_up()


def _head(own: Image, shared: Mapping[Part, bytes]) -> bytes:
    fixed = _HEAD.pack(*own.version, own.data_bytes, own.tail_bytes, own.balance, own.num_shared_sets)
    return fixed + b"".join(part_name(part) + digest for part, digest in sorted(shared.items()))
