"""Slots pinned for a card, in the background.

In: slots as they are mapped. Out: the same memory registered with CUDA, so that copies to it run beside training, and
given back before it is unmapped.

Invariants: nothing is pinned before :meth:`Pinner.start`, which is called once training goes on: a recovery does not
wait for it; no memory of zero bytes is pinned; a slot that could not be is used as it is, and said once.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from queue import SimpleQueue

import torch

from p2pstate.cards.card import Card, NotPinned
from p2pstate.slots import Slot

__all__ = ["Pinner"]


class Pinner:
    def __init__(self, card: Card) -> None:
        self._card = card
        self._waiting: SimpleQueue[weakref.ref[Slot]] = SimpleQueue()
        self._started = False

    def add(self, slot: Slot) -> None:
        """From any thread; once for each mapping."""
        if slot.capacity:
            self._waiting.put(weakref.ref(slot))

    def start(self) -> None:
        """From now on what was added, and what will be, is pinned."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="p2pstate-pin", daemon=True).start()

    def _run(self) -> None:
        while True:
            slot = self._waiting.get()()
            if slot is None:
                continue  # it is gone already
            try:
                self._pin(slot)
            except NotPinned as error:
                warnings.warn(f"slots stay unpinned: {error}", RuntimeWarning, stacklevel=1)
                return
            del slot

    def _pin(self, slot: Slot) -> None:
        memory = torch.frombuffer(slot.body(), dtype=torch.uint8)
        self._card.pin(memory)
        # Called before the slot lets go of its mapping.
        weakref.finalize(slot, self._card.unpin, memory.data_ptr()).atexit = False
