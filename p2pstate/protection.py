"""Which version is captured when, and which one is kept: one rank's side of the version rules.

In: the numbers of the gate's votes, the live state between two steps. Out: captured versions on their way to the
buddy, and the newest version that all ranks are known to hold in both places.

Invariants: what is captured, skipped and kept is decided by versions.Course; this file carries it out, and measures.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch._C._distributed_c10d import PrefixStore

from p2pstate.capture import Capturer
from p2pstate.cards.card import Card
from p2pstate.cards.copies import CardCopies
from p2pstate.errors import Corrupted, P2PStateError
from p2pstate.groups.gate import Ballot
from p2pstate.groups.registry import GATE, REGISTRY
from p2pstate.groups.status import STATUS
from p2pstate.groups.waiting import ABANDON_AFTER_S
from p2pstate.interval import NUM_MEASURED, Interval, need
from p2pstate.observe.meter import METER
from p2pstate.repairing import Repair, carry_out, repairs
from p2pstate.replicas import Replicas
from p2pstate.replicate import Shipper
from p2pstate.saving import NOT_DUE, Saving
from p2pstate.settings import Settings
from p2pstate.slots import Slot
from p2pstate.state import Collected, TrainingState
from p2pstate.stats import ProtectionStats
from p2pstate.types import Part, Version
from p2pstate.versions import Course
from p2pstate.worker.context import WorkerContext

__all__ = ["Protection"]

FIRST_VERSION_WAIT_S = 30.0
MAX_NAMES = 20  # of leaves, in an event
LEAN_PATIENCE_S = 5.0  # how long a step waits for its state to be sent; then memory is taken for a copy
_DONE = {"ship": "shipped", "report": "nothing", "stop": "stopped", "repair": "repaired"}
DRAIN_S = 0.5  # how long copies that are under way may still arrive after a fault


class Protection:
    """Used from the training thread only."""

    def __init__(
        self,
        context: WorkerContext,
        state: TrainingState,
        settings: Settings,
        compare_timeout_s: float,
        card: Card | None = None,
    ) -> None:
        """``card``: where the state is, when it is on one."""
        self.settings = settings
        self.replicas = Replicas(context.rank, settings.verify_replicas)
        self._compare_timeout_s = compare_timeout_s
        self._compared: Version | None = None  # the state whose replicas were compared last
        self._context = context
        self._state = state
        self.stats = ProtectionStats()
        policy = settings.checkpoint
        self._saving = Saving(context.link, policy, self.stats) if policy is not None else None
        self._on_card = None if card is None else CardCopies(card, state.is_steady)
        self._on_map = _nothing if self._on_card is None else self._on_card.mapped
        self._capturer = Capturer(
            context.link,
            context.rank,
            context.places,
            reserve=policy is not None,
            expected_bytes=context.sizes,
            gatherer=None if self._on_card is None else self._on_card.gatherer,
            on_map=self._on_map,
            sampled=settings.verify_replicas == 0,
        )
        self._shipper = self._make_shipper()
        adapting = settings.every == "auto"
        self._course = Course(interval=Interval()) if adapting else Course(int(settings.every))
        self.stats.every = self._course.every
        self._captured_since_vote = False
        self._capture_began = 0.0
        self._vote_s: deque[float] = deque(maxlen=NUM_MEASURED)  # from a capture's beginning to the next vote
        self._written: set[Part] = set()  # the parts of the version captured last, the wards' among them
        self._needs: tuple[int, set[Part]] = (0, set())  # the agent was told that in this round these are needed
        self._num_skipped_before_captured = 0  # between the version that is kept and the one captured last

    @property
    def protected(self) -> Version | None:
        """What the job can fall back to: its slots are kept."""
        return self._course.kept

    @property
    def num_skipped_since_kept(self) -> int:
        """Versions newer than what the job can fall back to that all ranks skipped: the one before came late."""
        return self._num_skipped_before_captured + self._course.num_skipped_in_a_row

    def begin(self) -> None:
        """A start from scratch: the initial state is the first version."""
        self._course = self._course.begun()

    def follow(self, keep: Version | None) -> None:
        """Another Replicator has trained before: its last state stays until a step of this one is protected."""
        self._course = replace(self._course, kept=keep)

    def loop_ended(self, version: Version, voted: Ballot) -> None:
        """``version`` is the last one of a training loop."""
        complete = Version(voted.protected_epoch, voted.protected_step)
        self._context.kept = version if complete >= version == self._course.captured else self._course.kept

    def resumed(self, keep: Version, *, from_disk: bool = False) -> None:
        """The round resumed a version: ship it again at once, for the partners may be new; ``keep`` stays meanwhile."""
        self._course = self._course.resumed(keep)
        self.stats.every = self._course.every
        if self._saving is not None:
            self._saving.resumed(keep.step, from_disk=from_disk)
        self._num_skipped_before_captured = 0
        if self._pairing != (self._context.buddies, self._context.wards):
            self._shipper.cancel()
            self._shipper = self._make_shipper()

    def complete(self) -> Version:
        """For the ballot: the newest version of which all that this rank writes is complete, its wards' copies too."""
        return self._shipper.complete

    @property
    def alike(self) -> bool:
        """For the ballot. With ``verify_replicas`` what differs is corruption, and others look for it."""
        return self._shipper.alike or self.settings.verify_replicas > 0

    @property
    def balance(self) -> int:
        """For the ballot: of the version captured last."""
        return 0 if self._course.captured is None else self._capturer.balance

    def save_vote(self, step: int) -> int:
        """For the ballot on ``step``: see saving.py."""
        return NOT_DUE if self._saving is None else self._saving.vote(step)

    def need_vote(self, step_s: float) -> int:
        """For the ballot, where the interval adapts: the thousandths of a step that are needed between versions."""
        if self._course.interval is None:
            return 0
        stats = self.stats
        needed = need(
            step_s, list(stats.capture_s), list(self._vote_s), list(stats.protected_s), self.settings.max_overhead
        )
        return round(1000 * needed)

    def committed(self, step: int, voted: Ballot) -> None:
        """``step`` is committed; decide, as all ranks do, whether its state becomes a version."""
        before = self._course
        self._advance(step, voted)
        if self._course.every != before.every:
            self._adapted(step, before.every)
        if self._saving is not None:
            self._saving.protected(self._course.kept)
            self._saving.voted(voted.save)
        if self._course.kept != before.kept:
            self._num_skipped_before_captured = before.num_skipped_in_a_row
            self._tell_needs()
        self.stats.num_skipped += max(0, self._course.num_skipped_in_a_row - before.num_skipped_in_a_row)

    def _advance(self, step: int, voted: Ballot) -> None:
        complete, captured = Version(voted.protected_epoch, voted.protected_step), self._course.captured
        alike = bool(voted.alike) and voted.balance == 0
        self._course = self._course.committed(step, complete, -voted.neg_need / 1000, alike=alike)
        if captured is not None and self._course.captured is None:
            self._give_up(captured)

    def look(self) -> Collected:
        """The state as it is now; leaves that should be alike and are not are this rank's own."""
        return self.replicas.applied(self._state.collect())

    def _give_up(self, version: Version) -> None:
        """Ranks have begun to train apart: of the next version they ship what differs."""
        self.replicas.reconfirm()
        self._shipper.alike = True
        if self._saving is not None:
            self._saving.gave_up(version)

    def _adapted(self, step: int, before: int) -> None:
        """The interval is another one from now on: all ranks know, one tells."""
        self.stats.every = every = self._course.every
        if self._context.rank == 0:
            text = f"from step {step} on a version every {every} steps instead of every {before}"
            self._context.link.send("event", kind="interval", step=step, every=every, before=before, text=text)

    def _tell_needs(self) -> None:
        """What is captured in this round is protected: memory of other parts serves nobody any more."""
        captured = self._course.captured
        if captured is None or self._needs == (captured.epoch, self._written):
            return
        self._needs = (captured.epoch, self._written)
        self._capturer.retain(self._written)
        parts = [list(part) for part in sorted(self._written)]
        self._context.link.send("needs", epoch=captured.epoch, num_local=self._context.num_local, parts=parts)

    def covers(self, step: int) -> bool:
        """Whether nothing of ``step``, the newest committed one, is lost by whoever drains and leaves now."""
        return self._course.covers(step)

    def capture_if_due(self, epoch: int, step: int) -> None:
        """Between two steps: copy the state into the own slots, and start shipping it."""
        transport = REGISTRY.replication
        if STATUS.echoing or transport is None:
            return
        if self.replicas.is_due(step) and self._compared != (epoch, step):
            self._compare_replicas(epoch, step)
        if not self._course.due:
            return
        version, keep = Version(epoch, step), self._course.kept
        began = self._capture_began = time.monotonic()
        with METER.inside("protection"):
            collected = self.look()
            if STATUS.error is not None:
                return  # an object's state_dict may have used a collective, and got an echo
            set_aside = self._saving is not None and self._saving.captures(version)
            num_readers = len(self._context.buddies) if self._context.lean else 0
            images = self._capturer.capture(collected, version, keep, set_aside=set_aside, num_readers=num_readers)
            self._course = self._course.captures(version)
            self._written = {image.part for image in images if image.slot is not None}
            self._written |= {Part.own(ward) for ward in self._context.wards}
            self._captured_since_vote = True
            self._shipper.ship(images, keep, transport, began, self._capturer.prepare, self._land(epoch))
            for image in images:
                if image.live is not None:
                    image.live.settle(LEAN_PATIENCE_S, _is_over)
        self.stats.capture_s.append(time.monotonic() - began)
        self.stats.num_captured += 1
        self.stats.num_own_bytes = sum(image.num_bytes for image in images if image.part.kind == "own")
        self.stats.num_shared_bytes = sum(image.num_bytes for image in images if image.part.kind != "own")

    def _land(self, epoch: int) -> Callable[[], None] | None:
        """Start what is to come from the card; the result waits for it, on another thread."""
        if self._on_card is None:
            return None
        if self._context.lean:
            self._on_card.finish()  # the own part is read from where it is
        return self._on_card.start(epoch)

    def finish_card(self) -> bool:
        """Wait until the card has done what it was given. False: an error came before."""
        return self._on_card is None or self._on_card.finish()

    def fence(self) -> None:
        """From here on the state may change."""
        if self._on_card is not None:
            self._on_card.fence()

    def _compare_replicas(self, epoch: int, step: int) -> None:
        """Do all that should hold the same bytes do so? At the beginning, what differs is shipped from now on; later it
        is corruption. Raises Corrupted when the run is to end then."""
        assert REGISTRY.make_store is not None
        store = PrefixStore(f"replicas/{step}", REGISTRY.make_store(epoch))
        confirming, self._compared = self.replicas.confirming, Version(epoch, step)
        asked = "ship" if confirming else self.settings.on_corruption
        try:
            with METER.inside("protection"), STATUS.trace.row(GATE).inside("replicas"):
                collected = self._state.collect()
                found = self.replicas.compare(collected, store, self._compare_timeout_s)
                if asked == "repair":
                    self._repair(repairs(found), collected)
        except Exception as error:  # the round is over, or a rank did not come
            STATUS.fail(error)
            return
        for each in found:
            done = _DONE["stop" if asked == "repair" and not each.majority else asked]
            if each.members[0] == self._context.rank:
                self._context.link.send(
                    "event",
                    kind="replicas_compared",
                    step=step,
                    members=each.members,
                    ranks=each.ranks,
                    leaves=each.leaves[:MAX_NAMES],
                    num_leaves=len(each.leaves),
                    majority=each.majority,
                    done=done,
                    text=str(each),
                )
            if not confirming:
                text = f"silent corruption? step {step}: {each}; done: {done}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                if done == "stopped":
                    raise Corrupted(f"{text}. Look at that rank's host; on_corruption= says what becomes of this")

    def _repair(self, wanted: Sequence[Repair], collected: Collected) -> None:
        """Nothing else may use the bulk connections meanwhile: what is under way has to arrive before."""
        if not wanted:
            return
        transport = REGISTRY.replication
        if transport is None or not self._shipper.wait(self._compare_timeout_s):
            raise P2PStateError("what differs could not be put right: the version before has not arrived")
        carry_out(wanted, self._context.rank, collected.leaves, transport)

    def wait_a_little(self, step_s: float) -> None:
        """Give the version of the step before a little time to arrive, so that the next one need not be skipped."""
        if self._on_card is not None:
            self._on_card.wait_while_busy(self._shipper.wait)  # this step goes on there meanwhile
        arrived = self._shipper.wait(0)
        if self._captured_since_vote:
            self._vote_s.append(time.monotonic() - self._capture_began)
        self._captured_since_vote = False
        if arrived:
            return
        began = time.monotonic()
        # Before the first version has arrived there is nothing to fall back to: training begins protected.
        with METER.inside("protection"):
            protected = self.protected is not None
            self._shipper.wait(self.settings.max_overhead * step_s if protected else FIRST_VERSION_WAIT_S)
        self.stats.wait_s.append(time.monotonic() - began)

    def drain(self, timeout_s: float) -> None:
        """At the end of the loop: wait until the newest version has arrived, an error comes, or time is up."""
        deadline = time.monotonic() + timeout_s
        with METER.inside("protection"):
            while not self._shipper.wait(ABANDON_AFTER_S) and time.monotonic() < deadline and STATUS.error is None:
                pass

    def save_last(self, epoch: int, step: int, voted: Ballot, timeout_s: float) -> str | None:
        """At the end of the loop, after its vote: have the last version on disk. Returns what went wrong ("" if nothing
        did); None: the state of ``step`` is no protected version yet, capture it and vote again."""
        version = Version(epoch, step)
        if self._saving is None:
            return ""
        before = self._course.captured
        self._advance(step, voted)
        if before != version or self._course.captured is None:
            self._course = self._course.begun()
            return None
        if Version(voted.protected_epoch, voted.protected_step) < version:
            return f"step {step} did not become complete on all nodes in time"
        with METER.inside("saving"):
            return self._saving.save_last(version, timeout_s, lambda: STATUS.error is not None)

    def quiesce(self, epoch: int) -> None:
        """Stop everything that belongs to round ``epoch``: no slot changes until the next capture."""
        self._shipper.wait(DRAIN_S)
        REGISTRY.cut(epoch)
        if not self._shipper.wait(ABANDON_AFTER_S):
            self._shipper.cancel()
            self._shipper = self._make_shipper()

    def _make_shipper(self) -> Shipper:
        context = self._context
        self._pairing = context.buddies, context.wards
        expected = {rank: unique for rank, (unique, _) in enumerate(context.sizes_of_all)}
        return Shipper(context.link, *self._pairing, self._shipping_failed, self.stats, self._on_map, expected)

    def _shipping_failed(self, epoch: int, error: Exception) -> None:
        if STATUS.error is None and epoch == STATUS.epoch and self._context.in_loop:
            self._context.link.send("error", epoch=epoch, text=f"replication: {error}")


def _nothing(slot: Slot) -> None:
    """Slots need nothing more."""


def _is_over() -> bool:
    STATUS.trace.poll()
    return STATUS.error is not None
