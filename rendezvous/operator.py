"""An operator outside the run: asks its members something, or tells them to count a node as gone.

Flows in: the run's id, contacts and key, a question or a node's name. Flows out: what members said, and whether a word
was taken.
Invariants: no word is given while any member that was reached still hears from the node; the operator is no member and
has no vote; every wait ends at the deadline.
Limits: members answer to the address of the operator's own socket, so they must be able to reach it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rendezvous.config import Config
from rendezvous.discovery import read_contacts
from rendezvous.messages import Answer, Fence, FenceAnswer, Message, Question, Standing
from rendezvous.transport import Transport
from rendezvous.types import MemberKey
from rendezvous.wire import Envelope, WireError, decode, encode

_AGAIN_S = 0.5
_OTHERS_S = 1.5  # once somebody has answered, the others get this long to object


class Line:
    """To the members of a run, from outside. `transport` belongs to the caller."""

    def __init__(self, config: Config, transport: Transport) -> None:
        self._config = config
        self._transport = transport
        self._me = MemberKey(config.name, time.time_ns() // 1000)

    def exchange(self, addresses: Iterable[str], message: Message, until_s: float) -> Iterator[Envelope]:
        """Send to each address; what comes back by `until_s`, or until all of them have answered."""
        frame = encode(Envelope(self._config.run_id, "", self._me, self._transport.address, None, message))
        waiting = {address for address in addresses if address != self._transport.address}
        for address in waiting:
            self._transport.send(address, frame)
        while waiting and (left_s := until_s - time.monotonic()) > 0:
            for incoming in self._transport.poll(left_s).frames:
                try:
                    envelope = decode(incoming)
                except WireError:
                    continue
                if envelope.to == self._me:
                    waiting.discard(envelope.address)
                    yield envelope

    def ask(
        self, kind: str, body: Any, timeout_s: float, members: Callable[[Any], Mapping[str, str]] = lambda answer: {}
    ) -> dict[str, Any]:
        """What each member's application answers, by the member's name; empty when time is over.

        The contacts are asked until one answers, then, once more, the members that `members` finds in the answers (name
        -> address).
        """
        question, answers = Question(kind, body), dict[str, Any]()

        def hear(addresses: Iterable[str], until_s: float) -> None:
            for envelope in self.exchange(addresses, question, until_s):
                answer = envelope.message
                if isinstance(answer, Answer) and answer.kind == kind:
                    answers[envelope.sender.name] = answer.body

        until_s = time.monotonic() + timeout_s
        while not answers and (now := time.monotonic()) < until_s:
            hear(read_contacts(self._config.contacts)[0], min(until_s, now + _AGAIN_S))
        known = {name: address for answer in list(answers.values()) for name, address in members(answer).items()}
        hear([known[name] for name in known.keys() - answers.keys()], min(until_s, time.monotonic() + _OTHERS_S))
        return answers

    def ask_one(self, address: str, kind: str, body: Any, timeout_s: float) -> Any:
        """What the member at `address` answers to one question; None if nothing comes in time. It is asked once."""
        for envelope in self.exchange([address], Question(kind, body), time.monotonic() + timeout_s):
            answer = envelope.message
            if isinstance(answer, Answer) and answer.kind == kind and envelope.address == address:
                return answer.body
        return None


@dataclass(slots=True)
class Outcome:
    """`answers`: the newest of each member that was reached, by its name."""

    done: bool = False
    answers: dict[str, FenceAnswer] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def standings(self) -> Mapping[str, Standing]:
        return {name: answer.standing for name, answer in self.answers.items()}


class Operator:
    """One word about one node. `transport` belongs to the caller."""

    def __init__(self, config: Config, transport: Transport, name: str, reason: str) -> None:
        self._config = config
        self._line = Line(config, transport)
        self._name = name
        self._reason = reason
        self._addresses: dict[str, str] = {}  # of members that answered

    def assume_dead(self, timeout_s: float) -> Outcome:
        """Ask, and if nobody objects, tell. Blocks until it is clear what came of it, or `timeout_s` is over."""
        until_s = time.monotonic() + timeout_s
        outcome = Outcome()
        first_s = None
        while (now := time.monotonic()) < until_s:
            again_s = min(until_s, now + _AGAIN_S)
            addresses, outcome.problems = read_contacts(self._config.contacts)
            self._ask(addresses, outcome, again_s, sure=False)
            standings = set(outcome.standings().values())
            if Standing.ANSWERS in standings:
                return outcome
            if standings and first_s is None:
                first_s = now
            more_may_come = len(outcome.answers) < len(addresses) and now < (first_s or now) + _OTHERS_S
            if not standings or Standing.UNCLEAR in standings or more_may_come:
                time.sleep(max(0.0, again_s - time.monotonic()))
                continue
            if Standing.SILENT not in standings:
                outcome.done = Standing.ASSUMED_DEAD in standings
                return outcome
            silent = [self._addresses[name] for name, s in outcome.standings().items() if s is Standing.SILENT]
            self._ask(silent, outcome, min(until_s, time.monotonic() + _AGAIN_S), sure=True)
            outcome.done = Standing.ASSUMED_DEAD in outcome.standings().values()
            if outcome.done:
                return outcome
        return outcome

    def _ask(self, addresses: list[str], outcome: Outcome, until_s: float, *, sure: bool) -> None:
        """One question to each address; what is heard by `until_s`, or until all of them have answered."""
        for envelope in self._line.exchange(addresses, Fence(self._name, self._reason, sure), until_s):
            answer = envelope.message
            if isinstance(answer, FenceAnswer) and answer.name == self._name:
                outcome.answers[envelope.sender.name] = answer
                self._addresses[envelope.sender.name] = envelope.address
