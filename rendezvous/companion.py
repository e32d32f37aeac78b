"""What another distribution adds to the agent process of a torchrun node (entry point group `rendezvous.agents`).

Flows in: the installed entry points. Flows out: objects that vote, hear and speak along with the agent, so that memory
they hold outlives torchrun's workers.
Invariants: `rendezvous` imports no companion by name; one that cannot be loaded is named, and the agent does without.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from rendezvous.channel import Channel, Message
from rendezvous.config import Config
from rendezvous.node import Node
from rendezvous.types import MemberChange, MemberKey, View

GROUP = "rendezvous.agents"
DRAIN_WITHIN_S = 22.0  # schedulers kill half a minute after their first signal


class Host(Protocol):
    """What a companion may use of its agent, on the node's thread."""

    node: Node
    config: Config
    address: str  # where processes of this host reach it (LocalServer)

    def tell(self, channel: Channel, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send to a process of this host that has spoken before."""

    def say(self, sentence: str) -> None:
        """One line for a person, on standard error."""


class Companion(Protocol):
    """One entry point: called with the `Host`, it gives this. Everything runs on the node's thread."""

    def ballot(self) -> dict[str, Any]:
        """Joins the agent's own ballot; see rendezvous.types.Application."""

    def decide(self, previous: View | None, ballots: Iterable[Mapping[str, Any]]) -> tuple[bool, dict[str, Any]]:
        """Whether a new round has to begin, and what joins the view's data. Pure."""

    def on_view(self, view: View) -> None: ...

    def on_waiting(self, reason: str) -> None: ...

    def on_member(self, change: MemberChange) -> None: ...

    def on_peer(self, sender: MemberKey, kind: str, body: Any) -> None:
        """A message of another member that is not the agent's own business; perhaps nonsense."""

    def on_message(self, channel: Channel, message: Message) -> None:
        """From a process of this host that is not the launcher; `t` says what. TypeError, ValueError or KeyError for
        nonsense: its line is closed."""

    def on_closed(self, channel: Channel) -> None: ...

    def status(self) -> dict[str, Any]:
        """Joins what the agent answers to an operator who asks how the node is."""

    def drain(self, reason: str, then: Callable[[], None]) -> None:
        """This node leaves, or the run ends badly: save what must not be lost with this process, then call `then`,
        once. At once if there is nothing to do, always within DRAIN_WITHIN_S."""

    def close(self) -> None: ...


def load_companions(host: Host) -> list[Companion]:
    companions: list[Companion] = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            companions.append(entry.load()(host))
        except Exception as error:  # whatever somebody else's code raises: membership does not depend on it
            host.say(f"{entry.name} ({entry.value}) cannot be used: {type(error).__name__}: {error}")
    return companions
