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
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rendezvous.messages import StoreCall, StoreResult
from rendezvous.store_copies import Copies, Pushed
from rendezvous.store_parts import (
    OF_ALL_OWNERS,
    PUSH,
    TAKE_BACK,
    WAITING,
    Part,
    bounded,
    combine,
    fits,
    names,
    owner_of,
    split,
)
from rendezvous.store_shard import ENDED, Replies, StoreShard
from rendezvous.types import STORE_ANSWER_S, Member, MemberKey, StoreReply, View

MAX_REMEMBERED = 16384
MAX_AHEAD = 4096

Token: TypeAlias = tuple[MemberKey, int]
_TAKE_BACK_S = 1e6  # the round ends before
_NOT_GIVEN_UP = StoreReply(False, error="a member has not given up its copy of the key in time", timed_out=True)


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

    @property
    def given_up_s(self) -> float:
        """When its owner must have answered: at the deadline, and the answer has come."""
        return self.deadline_s + STORE_ANSWER_S


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
        self._others: list[Member] = []  # that have a place in the round
        self._shard = StoreShard()
        self._copies = Copies()
        self._pushed = Pushed()
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
        self._end_shard()
        early, self._early = self._early, []
        for item in early:
            item.reply(ENDED)
        self._end_calls()

    def lose(self, member: MemberKey) -> None:
        """A member is certainly dead. If it has a place, the round is over, whenever the next one can begin."""
        if self._view is not None and any(place.key == member for place in self._view.places):
            self._round_is_over = True
            self._end_shard()
            self._end_calls()

    def enter(self, view: View, now: float = 0.0) -> None:
        """A view was decided. A new round ends the old store; the same round goes on."""
        old_round = self._view.round if self._view else None
        self._view = view
        self._others = [place for place in view.places if place.key != self._me]
        if view.round != old_round:
            self._round_is_over = False
            self._end_shard()
            self._done.clear()
            self._end_calls()
            self._shard, self._copies, self._pushed = StoreShard(), Copies(), Pushed()
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
        copied = self._copies.answer(op, args, self._shard.values)
        if copied is not None:
            reply(copied)
            return
        try:
            parts = split(op, args, view.places, self._owners)
        except ValueError as error:
            reply(StoreReply(False, error=f"store {op}: {error}"))
            return
        if not parts:
            reply(StoreReply(True, combine(op, [])))
            return
        here = len(parts) == 1 and parts[0][0].key == self._me and op not in OF_ALL_OWNERS
        if here and not self._pushed.to_take_back(op, args):
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
        self, op: str, part: Part, deadline_s: float, now: float, reply: Callable[[StoreReply], None]
    ) -> None:
        """All keys are this member's own: most operations are answered at once."""
        number = next(self._numbers)
        token = (self._me, number)
        replies = self._do(token, op, part[1], deadline_s, now)
        if replies and replies[0][0] == token:
            reply(bounded(replies.pop(0)[1]))
        else:
            self._register(number, _Request(op, reply, [None] * len(part[2])), part, deadline_s, now)
        self._answer(replies)

    def _register(self, number: int, request: _Request, part: Part, deadline_s: float, now: float) -> None:
        owner, args, positions = part
        request.calls[number] = positions
        call = self._calls[number] = _Call(request, owner, request.op, args, deadline_s, now + self._resend_s)
        self._due_s = min(self._due_s, call.given_up_s, call.resend_s)

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
        timed_out = StoreReply(
            False, error="another member has not given up its copy of the key in time", timed_out=True
        )
        self._answer([(token, timed_out) for token in self._pushed.late(now)])
        late = [item for item in self._early if item.deadline_s <= now]
        self._early = [item for item in self._early if item.deadline_s > now]
        for item in late:
            reply = StoreReply(False, error=f"epoch {item.epoch} did not begin in time", timed_out=True)
            item.reply(reply)
        for number, call in list(self._calls.items()):
            if number not in self._calls:
                continue
            if call.given_up_s <= now:
                text = f"{call.owner.name} gave no answer about {names(call.args)} in time"
                if call.op in WAITING:
                    text += ": nobody set it, or that node is silent"
                self._finish(number, StoreReply(False, error=text, timed_out=True))
            elif call.resend_s <= now:
                call.resend_s = now + self._resend_s
                if call.owner.key != self._me:
                    self._issue(number, call, now)
        times = [min(call.given_up_s, call.resend_s) for call in self._calls.values()]
        times += [item.deadline_s for item in self._early]
        self._due_s = min([*times, self._pushed.next_deadline_s()])

    def _end_shard(self) -> None:
        self._answer(self._shard.end())
        self._answer([(token, ENDED) for token in self._pushed.end()])

    def _end_calls(self) -> None:
        requests = {id(call.request): call.request for call in self._calls.values()}
        self._calls.clear()
        for request in requests.values():
            request.reply(ENDED)

    def _issue(self, number: int, call: _Call, now: float) -> None:
        if call.owner.key == self._me:
            self._answer(self._call_shard((self._me, number), call.op, call.args, call.deadline_s, now))
        else:
            assert self._view is not None
            left_s = max(0.0, call.deadline_s - now)
            refused = self._sent(call.owner, StoreCall(number, self._view.round, call.op, call.args, left_s))
            if refused:
                self._finish(number, StoreReply(False, error=f"store {call.op}: {refused}"))

    def _sent(self, to: Member, message: StoreCall | StoreResult) -> str:
        """Empty, or why this can be no message: what callers put into a store is not ours to choose."""
        try:
            self._send(to, message)
        except ValueError as error:
            return str(error)
        return ""

    def _call_shard(self, token: Token, op: str, args: list[Any], deadline_s: float, now: float) -> Replies:
        """One operation on keys of this member's own, once nobody has copies of what it changes."""
        keys = self._pushed.to_take_back(op, args)
        if keys:
            held_until_s = deadline_s + STORE_ANSWER_S / 2
            fresh = self._pushed.hold(
                token, keys, held_until_s, lambda: self._answer(self._call_shard(token, op, args, deadline_s, now))
            )
            self._due_s = min(self._due_s, held_until_s)
            if fresh:
                self._take_back(fresh, now)
            return []
        return self._do(token, op, args, deadline_s, now)

    def _do(self, token: Token, op: str, args: list[Any], deadline_s: float, now: float) -> Replies:
        """One operation on keys of this member's own of which nobody has a copy."""
        to_push = self._pushed.to_push(op, args, self._shard.values) if self._others else None
        replies = self._shard.call(token, op, args, deadline_s, now)
        if to_push and replies[0][1].ok:
            assert self._view is not None
            self._pushed.push(to_push)
            push = StoreCall(0, self._view.round, PUSH, [list(to_push), list(to_push.values())], 0.0)
            for place in self._others:
                self._sent(place, push)  # what is too large to be pushed is asked for
        return replies

    def _take_back(self, keys: frozenset[str], now: float) -> None:
        """Ask every other place to give its copies up; repeated until all have answered, or the round ends."""

        def given_up(reply: StoreReply) -> None:
            if reply.ok:
                self._pushed.taken_back(keys)

        request = _Request(TAKE_BACK, given_up, [None] * len(self._others))
        parts: list[Part] = [(place, [sorted(keys)], [index]) for index, place in enumerate(self._others)]
        calls = [(next(self._numbers), part) for part in parts]
        for number, part in calls:
            self._register(number, request, part, now + _TAKE_BACK_S, now)
        for number, _ in calls:
            if number in self._calls:
                self._issue(number, self._calls[number], now)

    def _on_call(self, sender: MemberKey, call: StoreCall, now: float) -> None:
        token = (sender, call.call)
        round_ = self._view.round if self._view else 0
        if call.round > round_:
            if len(self._ahead) < MAX_AHEAD:
                self._ahead.append((sender, call))
        elif call.op == PUSH:
            if call.round == round_ and len(call.args) == 2 and all(isinstance(arg, list) for arg in call.args):
                owned = [key for key in call.args[0] if isinstance(key, str) and self._owners(key).key == sender]
                if len(owned) == len(call.args[0]):
                    self._copies.take(*call.args)
        elif call.round < round_:
            self._answer([(token, ENDED)], keep=False)
        elif call.op == TAKE_BACK:
            self._copies.give_up(call.args)
            self._answer([(token, StoreReply(True))], keep=False)
        elif token in self._done:
            self._answer([(token, self._done[token])])
        elif not self._shard.is_waiting(token) and not self._pushed.is_held(token):
            self._answer(self._call_shard(token, call.op, call.args, now + call.deadline_s, now))

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
                refused = self._sent(member, result)
                if refused:
                    text = f"the answer is too large: {refused}. Ask for fewer keys at once"
                    self._send(member, StoreResult(number, False, None, text, False, False))

    def _finish(self, number: int, reply: StoreReply) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        request = call.request
        positions = request.calls.pop(number)
        if reply.ok and not fits(request.op, reply.value, len(positions)):
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
            request.reply(bounded(StoreReply(True, combine(request.op, request.results))))
