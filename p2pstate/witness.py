"""A member that only votes: ``p2prun witness``, on any host, without a worker or an accelerator.

In: the run's sizes and contacts. Out: one more vote, so that a run on two nodes survives the silent loss of one; the
run's verdict as exit code. Invariants: a witness that has to propose a view decides as the run's own agents do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from p2pstate.agent.rounds import decide_restart, decide_start, num_places
from p2pstate.errors import EXIT_REPLACE
from rendezvous.agent import has_left
from rendezvous.config import Config
from rendezvous.node import Node
from rendezvous.standing import standing_of
from rendezvous.types import Change, Member, MemberChange, MemberKey, Verdict, View

__all__ = ["Witness"]

LINGER_S = 0.7  # for others to hear the verdict, or the good-bye


class Witness:
    """rendezvous.types.Application. Raises ValueError or RendezvousError if its address cannot be used."""

    def __init__(self, config: Config) -> None:
        self._name = config.name
        self.node = Node(config, self)
        self._code = EXIT_REPLACE
        self._say(f"listens at {self.node.member.address}; contacts: {', '.join(config.contacts)}")

    def run(self) -> int:
        """Until the run's verdict, the others' going on without this witness, or `end`; returns the exit code."""
        try:
            self.node.run()
        finally:
            self.node.close()
        return self._code

    def end(self, code: int, text: str) -> None:
        """Leave the run, which goes on."""
        self._code = code
        self._say(text)
        self.node.leave(text)
        self._stop_soon()

    def interrupt(self, code: int, text: str) -> None:
        """A signal: there is nothing here to save."""
        self.end(code, text)

    def ballot(self) -> dict[str, Any]:
        return {}

    def decide(
        self, previous: View | None, places: Sequence[Member], ballots: Mapping[MemberKey, dict[str, Any]]
    ) -> tuple[bool, dict[str, Any]]:
        given = list(ballots.values())
        if not _under_torchrun(ballots):
            return decide_start(previous, given)
        wanted, data = decide_restart(previous, given)
        return wanted or has_left(previous, given), data

    def num_places(self, previous: View, ballots: Mapping[MemberKey, dict[str, Any]]) -> tuple[int, int] | None:
        return None if _under_torchrun(ballots) else num_places(previous, ballots.values())

    def on_view(self, view: View) -> None:
        self._say(f"view {view.epoch}: training on {', '.join(m.name for m in view.places)} ({view.reason})")

    def on_waiting(self, reason: str) -> None:
        self._say(f"waiting: {reason}")

    def on_member(self, change: MemberChange) -> None:
        if change.kind in (Change.DEAD, Change.LEFT):
            self._say(f"node {change.member.name} is gone: {change.reason}")

    def on_message(self, sender: MemberKey, kind: str, body: Any) -> None: ...

    def answer(self, kind: str, body: Any) -> Any:
        return standing_of(self.node) if kind == "status" else None

    def on_verdict(self, verdict: Verdict) -> None:
        self._code = verdict.code
        self._say(f"the run has ended: {verdict.text}")
        self._stop_soon()

    def on_evicted(self, reason: str) -> None:
        self._say(f"{reason}; start this witness anew")
        self._stop_soon()

    def _stop_soon(self) -> None:
        self.node.call_later(LINGER_S, self.node.stop)

    def _say(self, sentence: str) -> None:
        print(f"[{self._name}] witness: {sentence}", file=sys.stderr, flush=True)


def _under_torchrun(ballots: Mapping[MemberKey, Mapping[str, Any]]) -> bool:
    """Only agents of torchrun say which round they have left."""
    return any("left_round" in ballot for ballot in ballots.values())
