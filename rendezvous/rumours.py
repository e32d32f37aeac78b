"""How news gets to everybody in a large group: each member hands it on to a few others, some times. Pure.

Flows in: the membership table's news, ticks. Flows out: gossip. Invariants: one member sends the same news O(log n)
times, however many there are; in groups of up to BROADCAST_LIMIT nothing is sent here, because who has news there
tells all others itself.
Limits: news arrives with high probability only; tables are compared from time to time, whatever got lost.
"""

from __future__ import annotations

import random

from rendezvous.config import Timing
from rendezvous.effects import Outbox
from rendezvous.membership import BROADCAST_LIMIT, Membership
from rendezvous.messages import Gossip

FANOUT = 3
MAX_UPDATES = 64


class Rumours:
    """Rounds of gossip, as long as there is news. Owned by the core."""

    def __init__(self, membership: Membership, timing: Timing, rng: random.Random, out: Outbox, now: float) -> None:
        self._membership = membership
        self._interval_s = timing.rumour_s
        self._rng = rng
        self._out = out
        self._next_s = now

    def next_deadline_s(self) -> float:
        return self._next_s if self._is_needed() else float("inf")

    def tick(self, now: float) -> None:
        if now < self._next_s or not self._is_needed():
            return
        self._next_s = now + self._interval_s
        live = self._membership.live()
        targets = self._rng.sample(live, min(FANOUT, len(live)))
        for record in targets:
            self._out.send(record.member, Gossip(self._membership.take_news(MAX_UPDATES)))

    def _is_needed(self) -> bool:
        return self._membership.num_live() > BROADCAST_LIMIT and self._membership.has_news
