"""The server half of an epoch's store: one member's keys of one round. Pure: no socket, clock or thread.

Flows in: operations with a caller's token and a deadline. Flows out: replies, at once or when a key appears.
Invariants: every call is answered exactly once: done, failed, timed out or ended; operations take effect in the order
in which they come in; a blocked call holds no place in that order; `wait` ends when each key was there once, as with
TCPStore, a read when all are there; what a write costs does not grow with the number of calls that wait for other keys.
Limits: nothing is replicated or kept: a shard lives as long as its round. Sizes are bounded by the constants below.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rendezvous.types import StoreReply

MAX_KEY_CHARS = 8192  # this and the next as TCPStore
MAX_VALUE_BYTES = 8 * 2**20
MAX_SHARD_BYTES = 2**30
MAX_WAITING = 65536

Token: TypeAlias = Hashable
Replies: TypeAlias = list[tuple[Token, StoreReply]]
ENDED = StoreReply(False, error="the round of this store is over", ended=True)


class _Refused(ValueError):
    """A call that can never succeed; the text becomes the reply's error."""


@dataclass(slots=True)
class _Waiting:
    """A blocked call: what it waits for and is answered with then."""

    keys: tuple[str, ...]
    deadline_s: float
    is_there: Callable[[str], bool]
    result: Callable[[], Any]
    reads: bool = True  # all keys at once: what was there once and is deleted is waited for again
    missing: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Which keys are not there now."""
        self.missing = {key for key in self.keys if not self.is_there(key)}

    def look_again(self, written: str) -> Collection[str]:
        """`written` may be there now. -> Which keys must be waited for anew."""
        if not self.is_there(written):
            return (written,)
        self.missing.discard(written)
        if self.reads and not self.missing:
            self.look()
            return self.missing
        return ()


class StoreShard:
    """Keys and blocked calls. `call`, `expire` and `end` return the replies that became due."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}  # none is empty
        self._num_bytes = 0
        self._waiting: dict[Token, _Waiting] = {}
        self._waiting_for: dict[str, dict[Token, None]] = {}  # by each missing key, oldest first; none is empty
        self._due_s = float("inf")  # no call's deadline is earlier
        self._ended = False

    @property
    def values(self) -> Mapping[str, bytes]:
        """What is set. Read only."""
        return self._values

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def is_waiting(self, token: Token) -> bool:
        return token in self._waiting

    def next_deadline_s(self) -> float:
        """Not later than the earliest deadline of a blocked call."""
        return self._due_s

    def call(self, token: Token, op: str, args: list[Any], deadline_s: float, now: float) -> Replies:
        """Do one operation for `token`, which is unique. Blocking ones wait until `deadline_s` on `now`'s clock."""
        if self._ended:
            return [(token, ENDED)]
        try:
            return self._do(token, op, args, deadline_s, now)
        except _Refused as error:
            return [(token, StoreReply(False, error=f"store {op}: {error}"))]

    def cancel(self, token: Token) -> None:
        """Nobody waits for this call any more."""
        if token in self._waiting:
            self._stop_waiting(token)

    def expire(self, now: float) -> Replies:
        """Answer the calls whose deadline passed."""
        if now < self._due_s:
            return []
        late = [(token, waiting) for token, waiting in self._waiting.items() if waiting.deadline_s <= now]
        replies: Replies = []
        for token, waiting in late:
            self._stop_waiting(token)
            missing = [key for key in waiting.keys if key in waiting.missing]
            text = f"nobody set {', '.join(map(repr, missing[:3]))}{' and others' if len(missing) > 3 else ''} in time"
            replies.append((token, StoreReply(False, error=text, timed_out=True)))
        self._due_s = min((waiting.deadline_s for waiting in self._waiting.values()), default=float("inf"))
        return replies

    def end(self) -> Replies:
        """The round is over: free everybody who waits. Later calls are answered with `ended`."""
        self._ended = True
        replies: Replies = [(token, ENDED) for token in self._waiting]
        self._waiting.clear()
        self._waiting_for.clear()
        self._values.clear()
        self._queues.clear()
        return replies

    def _do(self, token: Token, op: str, args: list[Any], deadline_s: float, now: float) -> Replies:
        waiting = self._waiting_call(op, args, deadline_s)
        if waiting is not None:
            return self._block(token, waiting, now)
        result, changed = self._at_once(op, args)
        return [(token, StoreReply(True, result)), *self._wake(changed)]

    def _waiting_call(self, op: str, args: list[Any], deadline_s: float) -> _Waiting | None:
        """What a blocking operation waits for, and its result then; None for one that never blocks."""
        match op, args:
            case "get", [key]:
                wanted = _key(key)
                return _Waiting((wanted,), deadline_s, self._values.__contains__, lambda: self._values[wanted])
            case "multi_get", [list() as keys]:
                several = tuple(map(_key, keys))
                return _Waiting(
                    several, deadline_s, self._values.__contains__, lambda: [self._values[each] for each in several]
                )
            case "queue_pop", [key, True]:
                wanted = _key(key)
                return _Waiting((wanted,), deadline_s, self._queues.__contains__, lambda: self._pop(wanted))
            case "wait", [list() as keys]:
                return _Waiting(tuple(map(_key, keys)), deadline_s, self._holds, lambda: None, reads=False)
        return None

    def _at_once(self, op: str, args: list[Any]) -> tuple[Any, list[str]]:
        """Do an operation that never blocks; -> (its result, the keys that were written)."""
        match op, args:
            case "set", [key, value]:
                self._put(_key(key), _value(value))
                return None, [key]
            case "multi_set", [list() as keys, list() as values] if len(keys) == len(values):
                pairs = {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
                self._grow(sum(self._growth(key, value) for key, value in pairs.items()))
                self._values |= pairs
                return None, keys
            case "append", [key, value]:
                self._put(_key(key), _value(self._values.get(key, b"") + _value(value)))
                return None, [key]
            case "add", [key, int() as amount]:
                return self._add(_key(key), amount), [key]
            case "compare_set", [key, expected, desired]:
                return self._compare_set(_key(key), _value(expected), _value(desired)), [key]
            case "check", [list() as keys]:
                return all(self._holds(_key(key)) for key in keys), []
            case "delete_key", [key]:
                return self._delete(_key(key)), []
            case "num_keys", []:
                return len(self._values) + len(self._queues), []
            case "list_keys", []:
                return list(self._values), []
            case "queue_push", [key, value]:
                self._push(_key(key), _value(value))
                return None, [key]
            case "queue_len", [key]:
                return len(self._queues.get(_key(key), ())), []
            case "queue_pop", [key, False]:
                return self._pop(key) if _key(key) in self._queues else None, []
        raise _Refused("no such operation, or wrong arguments for it")

    def _put(self, key: str, value: bytes) -> None:
        self._grow(self._growth(key, value))
        self._values[key] = value

    def _delete(self, key: str) -> bool:
        old = self._values.pop(key, None)
        if old is not None:
            self._num_bytes -= len(old) + len(key)
        return old is not None

    def _growth(self, key: str, value: bytes) -> int:
        old = self._values.get(key)
        return len(value) + (len(key) if old is None else -len(old))

    def _grow(self, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > MAX_SHARD_BYTES:
            raise _Refused(f"the shard is full ({MAX_SHARD_BYTES} bytes)")
        self._num_bytes += num_bytes

    def _add(self, key: str, amount: int) -> int:
        """Counters are decimal texts, as in torch's own stores, so that get and add can be mixed."""
        try:
            total = int(self._values.get(key, b"0")) + amount
        except ValueError:
            raise _Refused(f"the value of {key!r} is no number") from None
        if not -(2**63) <= total < 2**63:
            raise _Refused(f"the counter {key!r} leaves 64 bits")
        self._put(key, str(total).encode())
        return total

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As TCPStore: an absent key is set if nothing was expected; the answer is what then counts as the value."""
        current = self._values.get(key)
        if current is None:
            if expected:
                return expected
        elif current != expected:
            return current
        self._put(key, desired)
        return desired

    def _push(self, key: str, value: bytes) -> None:
        self._grow(len(value) + (0 if key in self._queues else len(key)))
        self._queues.setdefault(key, deque()).append(value)

    def _pop(self, key: str) -> bytes:
        queue = self._queues[key]
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        self._num_bytes -= len(value) + (0 if queue else len(key))
        return value

    def _holds(self, key: str) -> bool:
        return key in self._values or key in self._queues

    def _block(self, token: Token, waiting: _Waiting, now: float) -> Replies:
        """Answer now if it can be, else when it can."""
        waiting.look()
        if not waiting.missing:
            return [(token, StoreReply(True, waiting.result()))]
        if len(self._waiting) >= MAX_WAITING:
            raise _Refused("too many calls wait already")
        self._waiting[token] = waiting
        self._wait_for(waiting.missing, token)
        self._due_s = min(self._due_s, waiting.deadline_s)
        return self.expire(now) if waiting.deadline_s <= now else []

    def _wake(self, keys: list[str]) -> Replies:
        """One after the other, oldest first: a value that is popped for one caller is not there for the next."""
        replies: Replies = []
        for key in keys:
            for token in self._waiting_for.pop(key, ()):
                waiting = self._waiting[token]
                self._wait_for(waiting.look_again(key), token)
                if not waiting.missing:
                    del self._waiting[token]
                    replies.append((token, StoreReply(True, waiting.result())))
        return replies

    def _wait_for(self, keys: Iterable[str], token: Token) -> None:
        for key in keys:
            self._waiting_for.setdefault(key, {})[token] = None

    def _stop_waiting(self, token: Token) -> None:
        for key in self._waiting.pop(token).missing:
            tokens = self._waiting_for[key]
            del tokens[token]
            if not tokens:
                del self._waiting_for[key]


def _key(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_KEY_CHARS:
        raise _Refused(f"a key must be a string of at most {MAX_KEY_CHARS} characters")
    return value


def _value(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) > MAX_VALUE_BYTES:
        raise _Refused(f"a value must be bytes, at most {MAX_VALUE_BYTES}")
    return value
