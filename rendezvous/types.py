"""The values that cross the border of `rendezvous`: members, views, verdicts, and what an application must answer.

Flows in: nothing. Flows out: frozen values used by every other module, and their plain (msgpack-able) forms.
Invariants: a value never changes after construction; `from_plain` accepts untrusted input and raises `ValueError` for
anything that is not exactly the plain form of its value.
Limits: addresses are IP literals with a port; names are resolved before a member is made (see discovery.py).
"""

from __future__ import annotations

import enum
import functools
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rendezvous.plain import MAX_NAME_CHARS, count_from, counter_from, list_from, table_from, text_from

MAX_LABELS = 64


class RendezvousError(RuntimeError):
    """The world is not as it must be; the text says what happened, what it means and what to do."""


class MemberKey(NamedTuple):
    """One life of one named agent: a restarted agent has the same name and another incarnation."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


EXIT_STOPPED = 143  # of a run that an operator ended, as after SIGTERM


class Role(enum.StrEnum):
    NODE = "node"
    WITNESS = "witness"


@functools.lru_cache(4096)  # every message brings its sender's
def split_address(address: str) -> tuple[str, int]:
    """'127.0.0.1:4711' or '[::1]:4711' -> (host, port); ValueError unless the host is an IP literal and 0 < port <
    65536.
    """
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    else:
        host = str(ipaddress.IPv4Address(host))
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{address!r} has no port between 1 and 65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_from(value: object) -> str:
    address = text_from(value, "an address", 64)
    split_address(address)
    return address


def key_from(value: object) -> MemberKey:
    name, incarnation = list_from(value, "a member key", 2)
    return MemberKey(text_from(name, "a member's name", MAX_NAME_CHARS), count_from(incarnation, "an incarnation"))


@dataclass(frozen=True, slots=True)
class Member:
    """One agent: who it is, where it listens, what it brings.

    `host_owned` declares that `address` belongs to the member's own host (no NAT, no proxy, no firewall that answers
    for it), so that a refused connection there proves that the agent is dead.
    """

    name: str
    incarnation: int
    address: str
    role: Role = Role.NODE
    num_workers: int = 1
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    host_owned: bool = True
    key: MemberKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", MemberKey(self.name, self.incarnation))

    def to_plain(self) -> list[Any]:
        """As a list of plain values, for the wire."""
        return [
            self.name,
            self.incarnation,
            self.address,
            self.role.value,
            self.num_workers,
            dict(self.labels),
            self.host_owned,
        ]

    @staticmethod
    def from_plain(value: object) -> Member:
        """The inverse of :meth:`to_plain`, of untrusted input. Raises ValueError for anything else."""
        name, incarnation, address, role, num_workers, labels, host_owned = list_from(value, "a member", 7)
        table = table_from(labels, "labels")
        if len(table) > MAX_LABELS or not isinstance(host_owned, bool):
            raise ValueError("a member has too many labels, or host_owned is no bool")
        return Member(
            name=text_from(name, "a member's name", MAX_NAME_CHARS),
            incarnation=count_from(incarnation, "an incarnation"),
            address=address_from(address),
            role=Role(role),
            num_workers=count_from(num_workers, "num_workers", 65536),
            labels={text_from(k, "a label"): text_from(v, "a label") for k, v in table.items()},
            host_owned=host_owned,
        )


@dataclass(frozen=True, slots=True)
class View:
    """One decided membership of the run.

    `epoch` grows by one with each decision; `round` is the epoch at which the training membership last changed, so
    views of one round have equal `places`. Ranks are place-major: rank = place_index * num_workers + local_rank.
    `nonce` is made by the first view and tells a full restart under the same run id from its predecessor.
    """

    nonce: str
    epoch: int
    round: int
    places: tuple[Member, ...]
    spares: tuple[Member, ...]
    witnesses: tuple[Member, ...]
    reason: str
    data: Mapping[str, Any] = field(default_factory=dict, hash=False)
    keys: frozenset[MemberKey] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", frozenset(member.key for member in self.members))

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody in the view, in the order in which members step in as proposers."""
        return self.places + self.spares + self.witnesses

    def place_of(self, key: MemberKey) -> int | None:
        """The index of `key` among the places, or None."""
        return next((index for index, member in enumerate(self.places) if member.key == key), None)

    def to_plain(self) -> list[Any]:
        """As a list of plain values, for the wire."""
        groups = [[member.to_plain() for member in group] for group in (self.places, self.spares, self.witnesses)]
        return [self.nonce, self.epoch, self.round, *groups, self.reason, dict(self.data)]

    @staticmethod
    def from_plain(value: object) -> View:
        """The inverse of :meth:`to_plain`, of untrusted input. Raises ValueError for anything else."""
        nonce, epoch, round_, places, spares, witnesses, reason, data = list_from(value, "a view", 8)
        groups = [
            tuple(Member.from_plain(item) for item in list_from(group, "members"))
            for group in (places, spares, witnesses)
        ]
        view = View(
            nonce=text_from(nonce, "a nonce", 64),
            epoch=counter_from(epoch, "an epoch"),
            round=counter_from(round_, "a round"),
            places=groups[0],
            spares=groups[1],
            witnesses=groups[2],
            reason=text_from(reason, "a reason"),
            data=table_from(data, "view data"),
        )
        if not view.nonce or not 1 <= view.round <= view.epoch or len(view.keys) != len(view.members):
            raise ValueError("a view needs a nonce, 1 <= round <= epoch, and every member once")
        return view


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the job ended: an exit code (DESIGN's table), a sentence, and who said so."""

    code: int
    text: str
    origin: MemberKey

    def to_plain(self) -> list[Any]:
        """As a list of plain values, for the wire."""
        return [self.code, self.text, list(self.origin)]

    @staticmethod
    def from_plain(value: object) -> Verdict:
        """The inverse of :meth:`to_plain`, of untrusted input. Raises ValueError for anything else."""
        code, text, origin = list_from(value, "a verdict", 3)
        return Verdict(count_from(code, "an exit code", 255), text_from(text, "a verdict's text"), key_from(origin))


class Change(enum.StrEnum):
    JOINED = "joined"
    SUSPECT = "suspect"
    ALIVE = "alive"
    DEAD = "dead"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class MemberChange:
    """Something that became known about a member. `proof` is true where a death is certain and not only likely."""

    kind: Change
    member: Member
    reason: str = ""
    proof: bool = False


# A store operation's deadline says how long keys are waited for; its answer may take this much longer on its way, so
# that a short deadline does not cut off what needs no waiting.
STORE_ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class StoreReply:
    """The answer to one store operation. `ended`: the round is over; `timed_out`: the deadline passed; else `error`
    says.
    """

    ok: bool
    value: Any = None
    error: str = ""
    ended: bool = False
    timed_out: bool = False


class Application(Protocol):
    """What a node asks of, and tells, the program that uses it. Every call comes from the node's own thread.

    Optional methods: `progress() -> dict[str, Any]` (msgpack-able, at most 1 KiB) is sent along with heartbeats;
    `num_places(previous, ballots) -> (fewest, most)` says how many training nodes the view after `previous` may have,
    where that is not what the settings say (pure, like `decide`); `answer(kind, body) -> plain value or None` answers
    whoever has the run's key and asks from outside (operator.py).
    """

    def ballot(self) -> dict[str, Any]:
        """What this member tells a proposer about itself; msgpack-able, at most 64 KiB; asked at each promise."""
        ...

    def decide(
        self, previous: View | None, places: Sequence[Member], ballots: Mapping[MemberKey, dict[str, Any]]
    ) -> tuple[bool, dict[str, Any]]:
        """Pure; runs on the proposer. -> (a new round even if the places are unchanged?, data for the view)."""
        ...

    def on_view(self, view: View) -> None:
        """A decided view that contains this member. Epochs grow; one that nobody delivered in time may be skipped."""
        ...

    def on_waiting(self, reason: str) -> None:
        """No view can be decided now, and why; not repeated while the reason stays the same."""
        ...

    def on_member(self, change: MemberChange) -> None:
        """A member was heard for the first time, suspected, heard again, lost, or has left."""

    def on_message(self, sender: MemberKey, kind: str, body: Any) -> None:
        """`sender`, a member, sent something with Node.send or Node.broadcast. Its content is not to be trusted."""

    def on_verdict(self, verdict: Verdict) -> None:
        """The job's end; called once. The node goes on telling others until it is stopped."""
        ...

    def on_evicted(self, reason: str) -> None:
        """The run has no more place for this member, which must stop its workers; why, as a sentence. Called once."""
        ...


class PassiveApplication:
    """An `Application` that says nothing of itself, decides nothing and hears nothing: override what matters."""

    def ballot(self) -> dict[str, Any]:
        return {}

    def decide(
        self, previous: View | None, places: Sequence[Member], ballots: Mapping[MemberKey, dict[str, Any]]
    ) -> tuple[bool, dict[str, Any]]:
        return False, {}

    def num_places(self, previous: View, ballots: Mapping[MemberKey, dict[str, Any]]) -> tuple[int, int] | None:
        return None

    def progress(self) -> Mapping[str, Any]:
        return {}

    def on_view(self, view: View) -> None: ...
    def on_waiting(self, reason: str) -> None: ...
    def on_member(self, change: MemberChange) -> None: ...
    def on_message(self, sender: MemberKey, kind: str, body: Any) -> None: ...
    def on_verdict(self, verdict: Verdict) -> None: ...
    def on_evicted(self, reason: str) -> None: ...
