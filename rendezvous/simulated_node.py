"""One life of one agent in a simulated network: the real core, a clock that is not everybody's, a made-up application.

Flows in: seeded random sources. Flows out: values that testing.py drives. Limits: the application only draws lots.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rendezvous import events
from rendezvous.core import Core
from rendezvous.types import Member, MemberKey, PassiveApplication, View


class SimulatedApplication(PassiveApplication):
    """Answers for a simulated member; wants a new round now and then, as a real one does."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def ballot(self) -> dict[str, Any]:
        return {"draw": self._rng.randrange(10)}

    def decide(
        self, previous: View | None, places: Sequence[Member], ballots: Mapping[MemberKey, dict[str, Any]]
    ) -> tuple[bool, dict[str, Any]]:
        del previous
        wanted = any(ballot["draw"] == 0 for ballot in ballots.values())
        return wanted, {"places": len(places), "ballots": len(ballots)}


def twin_of(name: str) -> str:
    """The host of a second node that was given the name of the one on host `name`."""
    return name + "'"


def name_on(host: str) -> str:
    return host.removesuffix("'")


@dataclass(frozen=True, slots=True)
class Clock:
    """What one host takes for the time."""

    zero_s: float
    rate: float

    def local_s(self, now: float) -> float:
        return self.zero_s + now * self.rate

    def global_s(self, local_s: float) -> float:
        return (local_s - self.zero_s) / self.rate


@dataclass(slots=True)
class SimulatedNode:
    """One life of one agent. `rejoins`: it says that it is none of the first."""

    host: str
    member: Member
    core: Core
    clock: Clock
    rejoins: bool
    running: bool = True
    paused: bool = False
    evicted: bool = False
    left: bool = False
    views: list[View] = field(default_factory=list)
    backlog: list[events.Event] = field(default_factory=list)
    next_tick_s: float = 0.0
    tick_waits: bool = False
    busy_until_s: float = 0.0
