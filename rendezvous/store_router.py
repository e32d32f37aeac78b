"""Which member's shard an operation goes to, and getting it there. Pure: the node hands in time and sends messages.

Flows in: operations of this member's own processes, calls and results of other members, decided views. Flows out:
calls, results, and one reply for each operation.
Invariants: all members compute the same owner of a key (rendezvous hashing over the places of the round); a repeated
call is done once; when the round ends, everybody who waits is told so. It ends when a view begins the next one, and
before that when a member with a place is certainly dead.
Limits: operations over several owners are not atomic between them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rendezvous.messages import StoreCall, StoreResult
from rendezvous.store_shard import ENDED, Replies, StoreShard
from rendezvous.types import Member, MemberKey, StoreReply, View

MAX_REMEMBERED = 16384
MAX_AHEAD = 4096

Token: TypeAlias = tuple[MemberKey, int]
_Part: TypeAlias = tuple[Member, list[Any], list[int]]  # owner, arguments, positions of the results
_OF_ALL_OWNERS = ("num_keys", "list_keys")


def owner_of(key: str, places: tuple[Member, ...]) -> Member:
    """The place with the highest hash of (place, key): all agree, and keys spread evenly."""

    def weight(member: Member) -> bytes:
        text = f"{member.name}\0{member.incarnation}\0{key}"
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()

    return max(places, key=weight)


@dataclass(slots=True)
class _Request:
    """One operation of this member, split into one call for each owner. `positions`: where its results belong."""

    op: str
    reply: Callable[[StoreReply], None]
    results: list[Any]
    calls: dict[int, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Call:
    request: _Request
    owner: Member
    op: str
    args: list[Any]
    deadline_s: float
    resend_s: float


@dataclass(slots=True)
class _Early:
    """An operation for an epoch whose view has not come in yet."""

    epoch: int
    op: str
    args: list[Any]
    deadline_s: float
    reply: Callable[[StoreReply], None]


class StoreRouter:
    """Both ends of the store on one member: client of all shards, server of its own."""

    def __init__(self, me: MemberKey, send: Callable[[Member, StoreCall | StoreResult], None], resend_s: float) -> None:
        self._me = me
        self._send = send
        self._resend_s = resend_s
        self._view: View | None = None
        self._members: dict[MemberKey, Member] = {}
        self._shard = StoreShard()
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._due_s = float("inf")  # nothing of this member's own is due earlier
        self._early: list[_Early] = []
        self._ahead: list[tuple[MemberKey, StoreCall]] = []
        self._done: OrderedDict[Token, StoreReply] = OrderedDict()
        self._ended = False
        self._round_is_over = False
        self._owners: Callable[[str], Member]  # from the first view on

    def end(self) -> None:
        """The run is over: free everybody who waits, now and from now on."""
        self._ended = True
        self._answer(self._shard.end())
        early, self._early = self._early, []
        for item in early:
            item.reply(ENDED)
        self._end_calls()

    def lose(self, member: MemberKey) -> None:
        """A member is certainly dead. If it has a place, the round is over, whenever the next one can begin."""
        if self._view is not None and any(place.key == member for place in self._view.places):
            self._round_is_over = True
            self._answer(self._shard.end())
            self._end_calls()

    def enter(self, view: View, now: float = 0.0) -> None:
        """A view was decided. A new round ends the old store; the same round goes on."""
        old_round = self._view.round if self._view else None
        self._view = view
        if view.round != old_round:
            self._round_is_over = False
            self._answer(self._shard.end())
            self._done.clear()
            self._end_calls()
            self._shard = StoreShard()
            self._owners = functools.lru_cache(MAX_REMEMBERED)(lambda key: owner_of(key, view.places))
        self._members = {member.key: member for member in view.members}
        early, self._early = self._early, []
        for item in early:
            self.request(item.epoch, item.op, item.args, now, item.deadline_s - now, item.reply)
        ahead, self._ahead = self._ahead, []
        for sender, call in ahead:
            self._on_call(sender, call, now)

    def request(
        self, epoch: int, op: str, args: list[Any], now: float, deadline_s: float, reply: Callable[[StoreReply], None]
    ) -> None:
        """`deadline_s` from now. `epoch` is any epoch of the round that is meant."""
        view = self._view
        if self._ended:
            reply(ENDED)
            return
        if view is None or epoch > view.epoch:
            self._early.append(_Early(epoch, op, args, now + deadline_s, reply))
            self._due_s = min(self._due_s, now + deadline_s)
            return
        if epoch < view.round or self._round_is_over:
            reply(ENDED)
            return
        try:
            parts = _split(op, args, view.places, self._owners)
        except ValueError as error:
            reply(StoreReply(False, error=f"store {op}: {error}"))
            return
        if not parts:
            reply(StoreReply(True, _combine(op, [])))
            return
        if len(parts) == 1 and parts[0][0].key == self._me and op not in _OF_ALL_OWNERS:
            self._request_here(op, parts[0], now + deadline_s, now, reply)
            return
        request = _Request(op, reply, [None] * sum(len(positions) for _, _, positions in parts))
        calls = [(next(self._numbers), part) for part in parts]
        for number, part in calls:
            self._register(number, request, part, now + deadline_s, now)
        for number, _ in calls:
            if number in self._calls:
                self._issue(number, self._calls[number], now)

    def _request_here(
        self, op: str, part: _Part, deadline_s: float, now: float, reply: Callable[[StoreReply], None]
    ) -> None:
        """All keys are this member's own: most operations are answered at once."""
        number = next(self._numbers)
        replies = self._shard.call((self._me, number), op, part[1], deadline_s, now)
        if replies and replies[0][0] == (self._me, number):
            reply(replies.pop(0)[1])
        else:
            self._register(number, _Request(op, reply, [None] * len(part[2])), part, deadline_s, now)
        self._answer(replies)

    def _register(self, number: int, request: _Request, part: _Part, deadline_s: float, now: float) -> None:
        owner, args, positions = part
        request.calls[number] = positions
        call = self._calls[number] = _Call(request, owner, request.op, args, deadline_s, now + self._resend_s)
        self._due_s = min(self._due_s, call.deadline_s, call.resend_s)

    def receive(self, sender: MemberKey, message: StoreCall | StoreResult, now: float) -> None:
        if isinstance(message, StoreCall):
            self._on_call(sender, message, now)
        elif (call := self._calls.get(message.call)) is not None and call.owner.key == sender:
            reply = StoreReply(message.ok, message.value, message.error, message.ended, message.timed_out)
            self._finish(message.call, reply)

    def next_deadline_s(self) -> float:
        return min(self._due_s, self._shard.next_deadline_s())

    def tick(self, now: float) -> None:
        """Answer what is too late, repeat what may have been lost."""
        self._answer(self._shard.expire(now))
        if now < self._due_s:
            return
        late = [item for item in self._early if item.deadline_s <= now]
        self._early = [item for item in self._early if item.deadline_s > now]
        for item in late:
            reply = StoreReply(False, error=f"epoch {item.epoch} did not begin in time", timed_out=True)
            item.reply(reply)
        for number, call in list(self._calls.items()):
            if number not in self._calls:
                continue
            if call.deadline_s <= now:
                text = f"{call.owner.name} gave no answer about {_names(call.args)} in time"
                self._finish(number, StoreReply(False, error=text, timed_out=True))
            elif call.resend_s <= now:
                call.resend_s = now + self._resend_s
                if call.owner.key != self._me:
                    self._issue(number, call, now)
        times = [min(call.deadline_s, call.resend_s) for call in self._calls.values()]
        self._due_s = min(times + [item.deadline_s for item in self._early], default=float("inf"))

    def _end_calls(self) -> None:
        requests = {id(call.request): call.request for call in self._calls.values()}
        self._calls.clear()
        for request in requests.values():
            request.reply(ENDED)

    def _issue(self, number: int, call: _Call, now: float) -> None:
        if call.owner.key == self._me:
            self._answer(self._shard.call((self._me, number), call.op, call.args, call.deadline_s, now))
        else:
            assert self._view is not None
            left_s = max(0.0, call.deadline_s - now)
            self._send(call.owner, StoreCall(number, self._view.round, call.op, call.args, left_s))

    def _on_call(self, sender: MemberKey, call: StoreCall, now: float) -> None:
        token = (sender, call.call)
        round_ = self._view.round if self._view else 0
        if call.round > round_:
            if len(self._ahead) < MAX_AHEAD:
                self._ahead.append((sender, call))
        elif call.round < round_:
            self._answer([(token, ENDED)], keep=False)
        elif token in self._done:
            self._answer([(token, self._done[token])])
        elif not self._shard.is_waiting(token):
            self._answer(self._shard.call(token, call.op, call.args, now + call.deadline_s, now))

    def _answer(self, replies: Replies, *, keep: bool = True) -> None:
        for token, reply in replies:
            assert isinstance(token, tuple)
            caller, number = token
            if caller == self._me:
                self._finish(number, reply)
                continue
            if keep:
                self._done[token] = reply
                while len(self._done) > MAX_REMEMBERED:
                    self._done.popitem(last=False)
            member = self._members.get(caller)
            if member is not None:
                result = StoreResult(number, reply.ok, reply.value, reply.error, reply.ended, reply.timed_out)
                self._send(member, result)

    def _finish(self, number: int, reply: StoreReply) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        request = call.request
        positions = request.calls.pop(number)
        if reply.ok and not _fits(request.op, reply.value, len(positions)):
            reply = StoreReply(False, error=f"{call.owner.name} gave no proper answer to {request.op}")
        if not reply.ok:
            for other in request.calls:
                self._calls.pop(other, None)
                self._shard.cancel((self._me, other))
            request.calls.clear()
            request.reply(reply)
            return
        values = reply.value if request.op == "multi_get" else [reply.value] * len(positions)
        for position, value in zip(positions, values, strict=True):
            request.results[position] = value
        if not request.calls:
            request.reply(StoreReply(True, _combine(request.op, request.results)))


def _names(args: list[Any]) -> str:
    """The first keys that an operation is about."""
    keys = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
    return ", ".join(map(repr, keys[:3])) + (" and others" if len(keys) > 3 else "") or "its keys"


def _split(op: str, args: list[Any], places: tuple[Member, ...], find_owner: Callable[[str], Member]) -> list[_Part]:
    """One part for each owner concerned. ValueError for wrong arguments."""
    if op in _OF_ALL_OWNERS:
        return [(member, [], [index]) for index, member in enumerate(places)]
    if op not in ("wait", "check", "multi_get", "multi_set"):
        if not args or not isinstance(args[0], str):
            raise ValueError("the first argument must be the key")
        return [(find_owner(args[0]), args, [0])]
    if not args or not all(isinstance(arg, list | tuple) and len(arg) == len(args[0]) for arg in args):
        raise ValueError("the arguments must be lists of equal length")
    if not all(isinstance(key, str) for key in args[0]):
        raise ValueError("keys must be strings")
    grouped: dict[MemberKey, tuple[Member, list[int]]] = {}
    for index, key in enumerate(args[0]):
        owner = find_owner(key)
        grouped.setdefault(owner.key, (owner, []))[1].append(index)
    return [(owner, [[arg[i] for i in positions] for arg in args], positions) for owner, positions in grouped.values()]


def _fits(op: str, value: Any, num_keys: int) -> bool:
    """Is this what the operation gives? The answer comes from another process and is not to be trusted."""
    match op:
        case "get" | "compare_set":
            return isinstance(value, bytes)
        case "add" | "num_keys" | "queue_len":
            return isinstance(value, int)
        case "queue_pop":
            return value is None or isinstance(value, bytes)
        case "list_keys":
            return isinstance(value, list) and all(isinstance(key, str) for key in value)
        case "multi_get":
            return isinstance(value, list) and len(value) == num_keys and all(isinstance(v, bytes) for v in value)
        case _:
            return True


def _combine(op: str, results: list[Any]) -> Any:
    match op:
        case "num_keys":
            return sum(results)
        case "list_keys":
            return sorted(itertools.chain.from_iterable(results))
        case "check":
            return all(results)
        case "multi_get":
            return results
        case "wait" | "multi_set":
            return None
        case _:
            return results[0]
