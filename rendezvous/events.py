"""What can happen to the protocol core.

Flows in: what the node hears, sees and is told. Flows out: values for `Core.step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rendezvous.messages import Status
from rendezvous.types import MemberKey, Verdict
from rendezvous.wire import Envelope


@dataclass(frozen=True, slots=True)
class Received:
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Must come at least as often as `next_deadline_s` says; being late is noticed as a stall."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    address: str


@dataclass(frozen=True, slots=True)
class Dialed:
    address: str
    refused: bool


@dataclass(frozen=True, slots=True)
class Unauthorised:
    """Somebody connected who has another key or none, or has one where none is used. Nobody knows who."""


@dataclass(frozen=True, slots=True)
class Contacts:
    """The contact list as it reads now, and what is wrong with it."""

    addresses: tuple[str, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Propose:
    reason: str


@dataclass(frozen=True, slots=True)
class Declare:
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Leave:
    reason: str


@dataclass(frozen=True, slots=True)
class AssumeDead:
    """An operator or a scheduler guarantees that every incarnation of `name` is gone."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class FenceAnswered:
    """What the fencing command says about a member: GONE, FENCED, or None where it cannot say that it is gone."""

    member: MemberKey
    status: Status | None
    text: str


Event: TypeAlias = (
    Received
    | Tick
    | ConnectionLost
    | Dialed
    | Unauthorised
    | Contacts
    | Propose
    | Declare
    | Leave
    | AssumeDead
    | FenceAnswered
)
