"""Values that one member sets and all others read: pushed to them, so that reading costs no message. Pure.

Flows in: what the owner of a key pushes and takes back; on the owner's side, operations that are about to change keys.
Flows out: answers from copies; which keys to push, to take back, and which operations may go on.
Invariants: a key is pushed only when it is set for the first time in a round, and never again once it was changed; it
changes only after every other member has given its copy up, so no read that begins after a change was answered sees
what was there before.
Limits: a member that is frozen holds up a change of a key that was pushed, until the next round. Values of more than
MAX_PUSHED_BYTES are not pushed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rendezvous.types import StoreReply

MAX_PUSHED_BYTES = 4096
MAX_COPIED_BYTES = 64 << 20
_READS = ("get", "multi_get", "wait", "check")
_CHANGES = ("set", "multi_set", "append", "add", "compare_set", "delete_key")


def _keys_of(args: Sequence[Any]) -> list[str]:
    """What an operation is about, as far as these are keys: arguments may come from other processes."""
    keys = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
    return [key for key in keys if isinstance(key, str)]


class Copies:
    """What the owners of other keys have pushed to this member."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._given_up: set[str] = set()
        self._num_bytes = 0

    def take(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """A push, which may come late or again. It comes from another process: what is no key or value is left out."""
        for key, value in zip(keys, values, strict=False):
            if not isinstance(key, str) or not isinstance(value, bytes):
                continue
            size = len(key) + len(value)
            if key not in self._given_up and key not in self._values and self._num_bytes + size <= MAX_COPIED_BYTES:
                self._values[key] = value
                self._num_bytes += size

    def give_up(self, args: Sequence[Any]) -> None:
        """The owner is about to change these keys."""
        keys = _keys_of(args)
        self._given_up.update(keys)
        for key in keys:
            value = self._values.pop(key, None)
            if value is not None:
                self._num_bytes -= len(key) + len(value)

    def answer(self, op: str, args: Sequence[Any], own: Mapping[str, bytes]) -> StoreReply | None:
        """The answer to an operation that reads copies and `own` keys only, else None."""
        if op not in _READS or not self._values:
            return None
        values = [own.get(key) if key in own else self._values.get(key) for key in _keys_of(args)]
        if not values or None in values:
            return None
        match op:
            case "get":
                return StoreReply(True, values[0])
            case "multi_get":
                return StoreReply(True, values)
            case _:
                return StoreReply(True, True if op == "check" else None)


@dataclass(slots=True)
class _Held:
    """An operation that waits until copies are given up."""

    token: Any
    keys: frozenset[str]
    deadline_s: float
    go_on: Callable[[], None]


class Pushed:
    """The owner's side: which of its keys others may have copies of."""

    def __init__(self) -> None:
        self._out: set[str] = set()
        self._taken_back: set[str] = set()
        self._held: list[_Held] = []

    def to_push(self, op: str, args: Sequence[Any], held: Mapping[str, bytes]) -> dict[str, bytes]:
        """Of an operation that comes next: what it sets that is not `held`, was never changed and is short enough."""
        match op, args:
            case "set", [key, value]:
                pairs = [(key, value)]
            case "multi_set", [list() as keys, list() as values]:
                pairs = list(zip(keys, values, strict=False))
            case _:
                return {}
        return {
            key: value
            for key, value in pairs
            if isinstance(key, str) and isinstance(value, bytes) and len(value) <= MAX_PUSHED_BYTES
            if key not in self._taken_back and key not in held
        }

    def push(self, keys: Iterable[str]) -> None:
        self._out.update(keys)

    def to_take_back(self, op: str, args: Sequence[Any]) -> frozenset[str]:
        """The keys that must be taken back before this operation may be done."""
        if not self._out or op not in _CHANGES:
            return frozenset()
        return frozenset(self._out.intersection(_keys_of(args)))

    def hold(self, token: Any, keys: frozenset[str], deadline_s: float, go_on: Callable[[], None]) -> frozenset[str]:
        """Put an operation off until `taken_back` was called for `keys`. -> those that nobody takes back yet."""
        fresh = keys - self._taken_back
        self._taken_back |= keys
        self._held.append(_Held(token, keys, deadline_s, go_on))
        return fresh

    def is_held(self, token: Any) -> bool:
        return any(held.token == token for held in self._held)

    def taken_back(self, keys: frozenset[str]) -> None:
        """Nobody has a copy of them any more: what waited for that goes on, in order."""
        self._out -= keys
        ready = [held for held in self._held if not held.keys & self._out]
        self._held = [held for held in self._held if held.keys & self._out]
        for held in ready:
            held.go_on()

    def late(self, now: float) -> list[Any]:
        """The tokens of operations whose deadline passed while they were held; they are forgotten."""
        tokens = [held.token for held in self._held if held.deadline_s <= now]
        self._held = [held for held in self._held if held.deadline_s > now]
        return tokens

    def end(self) -> list[Any]:
        """The tokens of all operations that are held."""
        tokens = [held.token for held in self._held]
        self._held = []
        return tokens

    def next_deadline_s(self) -> float:
        return min((held.deadline_s for held in self._held), default=float("inf"))
