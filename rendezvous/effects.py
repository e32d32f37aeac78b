"""What the protocol core asks the outside to do.

Flows in: calls of the core's parts while one event is handled. Flows out: effects, in order, taken once by `drain`.
Invariants: an effect is a value; nothing here touches a socket, a clock or a thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from rendezvous.messages import Message, Question
from rendezvous.types import Member, MemberChange, MemberKey, Verdict, View


@dataclass(frozen=True, slots=True)
class Send:
    """`to` is None for a message to whoever listens at `address`."""

    address: str
    to: MemberKey | None
    message: Message


@dataclass(frozen=True, slots=True)
class Dial:
    """Try a plain connection to `address` and report with a `Dialed` event whether it was refused."""

    address: str


@dataclass(frozen=True, slots=True)
class AskFence:
    """Find out, from whoever can know, whether `member` is gone, and report with a `FenceAnswered` event."""

    member: Member


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody will be spoken to at `address` any more."""

    address: str


@dataclass(frozen=True, slots=True)
class Changed:
    change: MemberChange


@dataclass(frozen=True, slots=True)
class Installed:
    """A newer view was decided; `member` is false where this node is not in it."""

    view: View
    member: bool


@dataclass(frozen=True, slots=True)
class Evicted:
    """The run has no more place for this incarnation; `reason` is a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    reason: str


@dataclass(frozen=True, slots=True)
class JobEnded:
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Deliver:
    """A message for the layers above the core, from a member that is neither dead nor gone."""

    sender: Member
    message: Message


@dataclass(frozen=True, slots=True)
class Asked:
    """The application is asked something by somebody who is no member; the answer goes to `address`."""

    sender: MemberKey
    address: str
    question: Question


Effect: TypeAlias = (
    Send | Dial | AskFence | Forget | Changed | Installed | Evicted | Waiting | JobEnded | Deliver | Asked
)


@dataclass(slots=True)
class Outbox:
    """Collects the effects of one event."""

    effects: list[Effect] = field(default_factory=list)

    def put(self, effect: Effect) -> None:
        self.effects.append(effect)

    def send(self, member: Member, message: Message) -> None:
        self.effects.append(Send(member.address, member.key, message))

    def drain(self) -> list[Effect]:
        taken, self.effects = self.effects, []
        return taken
