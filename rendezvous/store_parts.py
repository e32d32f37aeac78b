"""One store operation as parts, one for each owner of keys, and its answer put together again. Pure functions.

Flows in: an operation and the places of a round. Flows out: parts; one answer from those of the parts.
Invariants: all members compute the same owner of a key (rendezvous hashing over the places).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

from rendezvous.types import Member, MemberKey, StoreReply

Part: TypeAlias = tuple[Member, list[Any], list[int]]  # owner, arguments, positions of the results
MAX_ANSWER_BYTES = 15 << 20  # of several values together
OF_ALL_OWNERS = ("num_keys", "list_keys")
WAITING = ("get", "wait", "multi_get", "queue_pop")  # until somebody sets the keys
PUSH, TAKE_BACK = "push", "take_back"  # between members only; see store_copies.py


def owner_of(key: str, places: tuple[Member, ...]) -> Member:
    """The place with the highest hash of (place, key): all agree, and keys spread evenly."""

    def weight(member: Member) -> bytes:
        text = f"{member.name}\0{member.incarnation}\0{key}"
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()

    return places[0] if len(places) == 1 else max(places, key=weight)


def names(args: list[Any]) -> str:
    """The first keys that an operation is about."""
    keys = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
    return ", ".join(map(repr, keys[:3])) + (" and others" if len(keys) > 3 else "") or "its keys"


def split(op: str, args: list[Any], places: tuple[Member, ...], find_owner: Callable[[str], Member]) -> list[Part]:
    """One part for each owner concerned. ValueError for wrong arguments."""
    if op in (PUSH, TAKE_BACK):
        raise ValueError("no such operation")
    if op in OF_ALL_OWNERS:
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


def fits(op: str, value: Any, num_keys: int) -> bool:
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


def combine(op: str, results: list[Any]) -> Any:
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


def bounded(reply: StoreReply) -> StoreReply:
    """The same, or an error in place of more than one message may carry."""
    num_bytes = sum(map(len, reply.value)) if isinstance(reply.value, list) else 0
    if num_bytes <= MAX_ANSWER_BYTES:
        return reply
    text = f"the answer has {num_bytes} bytes, and at most {MAX_ANSWER_BYTES} are given at once: ask for fewer keys"
    return StoreReply(False, error=text)
