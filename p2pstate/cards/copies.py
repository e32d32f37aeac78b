"""One rank's versions on their way from its card: begun on the training thread, taken for good or not on another one.

In: the card, the process's error flag. Out: what :class:`~p2pstate.capture.Capturer` and the shipper need of it.

Invariant: a version is good only if no error was known after its last byte had left the card. Whoever aborts NCCL
records the error before, and whatever runs on the card after an abort runs on garbage; so what was read before is the
state, and what was read after is none.
"""

from __future__ import annotations

from collections.abc import Callable

from p2pstate.cards.card import Card
from p2pstate.cards.gather import Gatherer
from p2pstate.cards.pinning import Pinner
from p2pstate.errors import P2PStateError, Retryable
from p2pstate.groups.nccl import WATCH, ErrorWatch, wait_on_host
from p2pstate.groups.status import STATUS, Status
from p2pstate.slots import Slot

__all__ = ["CardCopies"]

PATIENCE_S = 600.0  # what is waited for waits for all that was queued before it
BUSY_POLL_S = 0.001  # the card is without work for about so long afterwards
MAX_NAMES = 20  # of leaves, in a message


class CardCopies:
    """``is_steady``: whether the leaf of this name changes in ``optimizer.step()`` only."""

    def __init__(
        self, card: Card, is_steady: Callable[[str], bool], status: Status = STATUS, watch: ErrorWatch = WATCH
    ) -> None:
        self.gatherer = Gatherer(card, is_steady)
        self._card = card
        self._pinner = Pinner(card)
        self._status = status
        self._watch = watch

    def mapped(self, slot: Slot) -> None:
        """A slot that will be written again and again."""
        self._pinner.add(slot)

    def start(self, epoch: int) -> Callable[[], None]:
        """Start what was captured in round ``epoch``. The result, called on another thread, returns once all of it is
        in its slots; raises Retryable if it must not be used, RuntimeError if it takes too long."""
        landing = self.gatherer.start()
        self._pinner.start()

        def land() -> None:
            wait_on_host(landing.is_there, lambda: self._status.error is not None, PATIENCE_S)
            landing.finish()
            self._watch.look()
            if self._status.error is not None or self._status.epoch != epoch:
                raise Retryable("the state may have been copied after an error: this version is none")

        return land

    def finish(self) -> bool:
        """Wait until the card has done all that training has given it. False: an error came before."""
        wait_on_host(self._card.mark_training().query, lambda: self._status.error is not None, PATIENCE_S)
        self._watch.look()
        return self._status.error is None

    def wait_while_busy(self, has_come: Callable[[float], bool]) -> None:
        """Have the host wait for something while the card has work of training anyway. ``has_come`` waits for it for so
        many seconds, and tells."""
        busy = self._card.mark_training()
        while not busy.query() and self._status.error is None and not has_come(BUSY_POLL_S):
            pass

    def fence(self) -> None:
        """From here on the state may change: training waits on the card until what changes has been read."""
        changed = self.gatherer.fence()
        if changed and self._status.error is None:
            names = ", ".join(changed[:MAX_NAMES])
            self._status.fail(
                P2PStateError(
                    f"{names}: changed before optimizer.step(), while being copied from the card; this step is done "
                    "again, and from now on they are copied before it begins"
                )
            )
