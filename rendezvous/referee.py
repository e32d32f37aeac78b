"""Sees everything that happens in a simulation, and objects at once. Its notes are what a failing seed prints.

Flows in: what nodes accept, learn and say. Flows out: `InvariantViolation`; the trace; how often what was seen.
Invariants checked: one view for each epoch; a ballot has one value; views only move forward; what invariants.py asks of
each decided view; in the end, that the living are together.
Limits: a vote is counted from the moment the voter accepts, whether or not anybody hears of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rendezvous.faults import Fault
from rendezvous.invariants import wrong_with
from rendezvous.messages import Accepted, Ballot
from rendezvous.simulated_node import SimulatedNode
from rendezvous.types import MemberKey, Role, View


class InvariantViolation(AssertionError):
    """Something that must never happen happened; the text has seed, schedule and the last events."""


def _kind_of(view: View, before: View | None) -> str:
    if before is None:
        return "first"
    if len(view.places) != len(before.places):
        return "grown" if len(view.places) > len(before.places) else "shrunk"
    if [member.key for member in view.places] != [member.key for member in before.places]:
        return "a spare stepped in"
    return "another round, same places" if view.round == view.epoch else "spares or witnesses changed"


class Referee:
    """Of one simulation. `vouched`: whose death an operator has vouched for; `decided`: the view of each epoch."""

    def __init__(self, seed: int, schedule: Sequence[Fault], num_names: int, num_places: tuple[int, int]) -> None:
        self._seed = seed
        self._schedule = schedule
        self._num_names = num_names
        self._num_places = num_places
        self._accepted: dict[tuple[int, Ballot], tuple[View, set[MemberKey]]] = {}
        self.decided: dict[int, View] = {}
        self.vouched: set[MemberKey] = set()
        self.coverage: Counter[str] = Counter()
        self.trace: list[str] = []

    def note(self, now: float, text: str) -> None:
        self.trace.append(f"{now:8.3f} {text}")

    def newest_decided(self) -> View | None:
        return max(self.decided.values(), key=lambda view: view.epoch, default=None)

    def accepts(self, node: SimulatedNode, held: Accepted) -> None:
        """A node accepted a value."""
        view, voters = self._accepted.setdefault((held.view.epoch, held.ballot), (held.view, set()))
        self._check(view == held.view, f"ballot {held.ballot} has two values")
        voters.add(node.member.key)

    def learns(self, node: SimulatedNode, view: View, is_member: bool, now: float) -> None:
        """A node learned a decided view."""
        key = node.member.key
        self.note(now, f"{key} learns epoch {view.epoch}: {[str(m.key) for m in view.members]} {view.reason}")
        if is_member:
            self._check(not node.views or node.views[-1].epoch < view.epoch, f"{key} went back in epochs")
            self._check(not node.evicted, f"{key} came back after its eviction")
            node.views.append(view)
        is_news = view.epoch not in self.decided
        known = self.decided.setdefault(view.epoch, view)
        self._check(known == view, f"epoch {view.epoch} was decided twice: {known} and {view}")
        if known is view:
            before = self.decided.get(view.epoch - 1)
            self.coverage[f"view: {_kind_of(view, before)}"] += is_news
            voters = [
                keys for (epoch, _), (held, keys) in self._accepted.items() if (epoch, held) == (view.epoch, view)
            ]
            wrong = wrong_with(view, before, voters, self._num_names, *self._num_places, self.vouched)
            self._check(wrong is None, f"epoch {view.epoch} {wrong}")

    def check_converged(self, live: Sequence[SimulatedNode]) -> None:
        """After a long calm nothing keeps the living apart."""
        apart = self.what_is_apart(live)
        self._check(apart is None, str(apart))

    def what_is_apart(self, live: Sequence[SimulatedNode]) -> str | None:
        """If the newest view known can still decide, it holds exactly the live members; all know it. Else why not."""
        for node in live:
            if node.member.key in self.vouched:
                return f"{node.member.key} is in, although it was assumed dead"
        newest = max((n.core.newest for n in live if n.core.newest), key=lambda view: view.epoch, default=None)
        if newest is None:
            return None
        named = {key.name: key for key in newest.keys}
        live = [n for n in live if named.get(n.member.name, n.member.key) == n.member.key or n.core.view is not None]
        num_voters = sum(node.member.key in newest.keys for node in live)
        num_nodes = sum(node.member.role is Role.NODE for node in live)
        if num_voters == 0 or 2 * num_voters < len(newest.members) or num_nodes < self._num_places[0]:
            return None
        keys = {node.member.key for node in live}
        if newest.keys != keys:
            return f"the newest view holds {sorted(newest.keys)}, but {sorted(keys)} live"
        ignorant = [node.member.key for node in live if node.core.view != newest]
        return f"{ignorant[0]} does not know epoch {newest.epoch}" if ignorant else None

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            faults = "\n".join(map(str, self._schedule))
            last = "\n".join(self.trace[-60:])
            raise InvariantViolation(f"seed {self._seed}: {what}\nschedule:\n{faults}\nlast events:\n{last}")
