"""One save, as one node sees it. Pure: messages and time in, what to do out.

In: what members and the own writer say. Out: actions, carried out by agent/saves.py. The *lead* (the first place of the
view, or whoever ends the run) collects what every vault holds of the version, divides it, and publishes once all have
written. Messages may be lost: whoever waits for an answer says again what it has to say, every ``REPEAT_S``. A lead
that dies leaves no checkpoint; the others give up at their deadline, or when the round ends.

States: GATHERING (records go to the lead) -> WRITING (the order has come) -> WRITTEN (the lead publishes) -> ENDED.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2pstate.durable.division import Share, divide_version
from p2pstate.types import SlotRecord, Version

__all__ = ["REPEAT_S", "Action", "Begin", "End", "Publish", "Session", "State", "Tell", "Write", "limit_s"]

REPEAT_S = 0.5

# How long a save may take: so many times longer than any before it, within these bounds.
NUM_TIMES_LONGER = 20.0
MIN_LIMIT_S, MAX_LIMIT_S = 60.0, 1800.0


class State(enum.Enum):
    GATHERING = "gathering"
    WRITING = "writing"
    WRITTEN = "written"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``body`` to the member called ``to``; to all others when that is empty."""

    to: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Begin:
    """Have the own writer name the new save."""


@dataclass(frozen=True, slots=True)
class Write:
    """Have the own writer write these shares below ``name``."""

    name: str
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Have the own writer complete the checkpoint. ``digests``: place -> digest of what it wrote."""

    name: str
    digests: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class End:
    """The save is over here. ``error`` is empty when there is a checkpoint."""

    error: str
    name: str
    num_bytes: int


Action = Tell | Begin | Write | Publish | End


@dataclass(slots=True)
class Session:
    """``home``: the node of each rank. ``places``: node -> place, of all nodes that take part."""

    version: Version
    lead: str
    me: str
    home: Mapping[int, str]
    places: Mapping[str, int]
    records: Sequence[SlotRecord]  # this node's, of the version
    deadline: float
    state: State = State.GATHERING
    name: str = ""
    error: str = ""
    num_bytes: int = 0
    _digest: str = ""
    _gathered: dict[str, list[SlotRecord]] = field(default_factory=dict)  # the lead's
    _shares: dict[str, list[Share]] | None = None
    _digests: dict[int, str] = field(default_factory=dict)
    _beginning: bool = False
    _publishing: bool = False

    @property
    def leads(self) -> bool:
        return self.lead == self.me

    def start(self) -> list[Action]:
        if self.leads:
            return self._gather(self.me, self.records)
        return self.repeat(float("-inf"))

    def repeat(self, now: float) -> list[Action]:
        """Every ``REPEAT_S`` until it has ended."""
        if self.state is State.ENDED:
            return []
        if now >= self.deadline:
            waiting = {
                State.GATHERING: "for storage to take a new save"
                if self._beginning
                else "for the nodes' inventories, or the order to write",
                State.WRITING: "for storage to take what was written",
                State.WRITTEN: "for the checkpoint to be completed",
            }
            return self.failed(f"it took too long, waiting {waiting[self.state]}")
        if self.leads:
            missing = [node for node in self._shares or {} if self.places[node] not in self._digests]
            return [self._order(node) for node in missing if node != self.me and self.name]
        if self.state is State.GATHERING:
            return [Tell(self.lead, self._body("have", records=[record.pack() for record in self.records]))]
        if self.state is State.WRITTEN:
            return [Tell(self.lead, self._body("part", digest=self._digest))]
        return []

    def heard(self, sender: str, body: Mapping[str, Any]) -> list[Action]:
        """A message of this version from another node. Raises KeyError, TypeError or ValueError for nonsense."""
        kind = body["op"]
        if kind == "failed":
            return self.failed(f"{sender}: {body['error']}", told=sender == self.lead)
        if kind == "ended":
            return self._ended("", body["name"], body["num_bytes"]) if sender == self.lead else []
        if self.state is State.ENDED:
            if not self.leads:
                return []
            if self.error:
                return [Tell(sender, self._body("failed", error=self.error))]
            return [Tell(sender, self._body("ended", name=self.name, num_bytes=self.num_bytes))]
        if kind == "have" and self.leads:
            return self._gather(sender, [SlotRecord.unpack(raw) for raw in body["records"]])
        if kind == "order" and sender == self.lead and self.state is State.GATHERING:
            return self._write(body["name"], [Share.unpack(raw) for raw in body["shares"]])
        if kind == "part" and self.leads and self._shares is not None and sender in self.places:
            self._digests[self.places[sender]] = str(body["digest"])
            return self._publish_if_written()
        return []

    def begun(self, name: str) -> list[Action]:
        """The own writer has named the save."""
        if self.state is not State.GATHERING or self._shares is None:
            return []
        self.name = name
        out: list[Action] = [self._order(node) for node in self._shares if node != self.me]
        return out + self._write(name, self._shares.get(self.me, []))

    def written(self, digest: str) -> list[Action]:
        """The own writer has written this node's shares."""
        if self.state is not State.WRITING:
            return []
        self.state, self._digest = State.WRITTEN, digest
        if not self.leads:
            return self.repeat(float("-inf"))
        self._digests[self.places[self.me]] = digest
        return self._publish_if_written()

    def published(self, num_bytes: int) -> list[Action]:
        """The own writer has completed the checkpoint."""
        if self.state is State.ENDED:
            return []
        told = Tell("", self._body("ended", name=self.name, num_bytes=num_bytes))
        return [told, *self._ended("", self.name, num_bytes)]

    def failed(self, error: str, *, told: bool = False) -> list[Action]:
        """Something went wrong here (or, ``told``, everybody has been told already)."""
        if self.state is State.ENDED:
            return []
        tell = [] if told else [Tell("", self._body("failed", error=error))]
        return [*tell, *self._ended(error, self.name, 0)]

    def _gather(self, node: str, records: Sequence[SlotRecord]) -> list[Action]:
        self._gathered[node] = [record for record in records if record.version == self.version]
        if self._beginning:
            return []
        if not set(self.places) <= set(self._gathered):
            return []
        found = divide_version(self.home, [record for each in self._gathered.values() for record in each])
        if isinstance(found, str):
            return self.failed(found)
        self._shares, self._beginning = found, True
        return [Begin()]

    def _order(self, node: str) -> Tell:
        assert self._shares is not None
        return Tell(node, self._body("order", name=self.name, shares=[share.pack() for share in self._shares[node]]))

    def _write(self, name: str, shares: Sequence[Share]) -> list[Action]:
        self.name, self.state = name, State.WRITING
        return [Write(name, tuple(shares))]

    def _publish_if_written(self) -> list[Action]:
        assert self._shares is not None
        wanted = {self.places[node] for node in (*self._shares, self.me)}
        if self._publishing or not wanted <= self._digests.keys():
            return []
        self._publishing = True
        return [Publish(self.name, dict(self._digests))]

    def _ended(self, error: str, name: str, num_bytes: int) -> list[Action]:
        if self.state is State.ENDED:
            return []
        self.state, self.error, self.name, self.num_bytes = State.ENDED, error, name, num_bytes
        return [End(error, name, num_bytes)]

    def _body(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"op": kind, "version": list(self.version), **fields}


def limit_s(longest_s: float | None, num_failed_in_a_row: int) -> float:
    """How long the next save may take. ``longest_s``: of those that came to their end, None if there is none.

    Twice as long after each failure: storage that has become slow for good must see the end of a save again.
    """
    if longest_s is None:
        return MAX_LIMIT_S
    usual_s = max(MIN_LIMIT_S, NUM_TIMES_LONGER * longest_s)
    return float(min(MAX_LIMIT_S, usual_s * 2**num_failed_in_a_row))
