"""An epoch's store as torch wants it: `EpochStore` is a torch Store over any channel to the shards.

Flows in: calls of torch and of user code, from any thread. Flows out: requests on a `StoreChannel`.
Invariants: nothing but DistStoreError (or a subclass) is raised, because torch's own barriers do not survive other
errors; the timeout is read at every operation, because a prefix store changes it behind Python's back; below zero it
means no limit, as in torch's own stores, and so does what is too long for C++, which torch turns into such a number.
Limits: TCPStore reads an empty value for a key that has only a queue, or that was deleted while `multi_get` waited for
another one; here reads wait until somebody sets it. torch's PrefixStore passes neither queues nor `list_keys` on to a
store written in Python. A value that is popped for a caller whose time is just over is lost. Stores are never freed:
groups keep only the C++ half alive, so every Python half made here stays in a list (one for each epoch and clone, a few
hundred bytes each).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError, QueueEmptyError

from rendezvous.store_line import StoreLines
from rendezvous.store_shard import MAX_VALUE_BYTES
from rendezvous.types import StoreReply

_LONGEST_S = 1e8  # three years: rounds end before

_kept: list[EpochStore] = []


class StoreError(DistStoreError):
    """A store operation failed; the text says why."""


class StoreEnded(StoreError):
    """The epoch is over: whoever waits must stop and take part in the next one."""


class StoreTimeout(StoreError):
    """The deadline passed before the keys were set."""


class StoreChannel(Protocol):
    """The way from this process to the members' shards."""

    def request(self, epoch: int, op: str, args: list[Any], deadline_s: float) -> Any:
        """One operation (store_shard.py), `deadline_s` from now. Blocks; called from any thread.

        Raises StoreEnded when the epoch is over, StoreTimeout at the deadline, StoreError otherwise.
        """
        ...


class EpochStore(Store):
    """The store of the round that `epoch` belongs to. It lives and dies with that round."""

    def __init__(self, channel: StoreChannel, epoch: int, timeout: timedelta | None = None) -> None:
        super().__init__()
        self._channel = channel
        self._epoch = epoch
        if timeout is not None:
            self.set_timeout(timeout)
        _kept.append(self)

    @property
    def epoch(self) -> int:
        return self._epoch

    def set(self, key: str, value: bytes | str) -> None:
        self._request("set", [_text(key), _bytes(value)])

    def get(self, key: str) -> bytes:
        """The value, once somebody set it."""
        return bytes(self._request("get", [_text(key)]))

    def add(self, key: str, amount: int) -> int:
        return int(self._request("add", [_text(key), _number(amount)]))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return bytes(self._request("compare_set", [_text(key), _bytes(expected), _bytes(desired)]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._request("wait", [_texts(keys)], timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request("check", [_texts(keys)]))

    def delete_key(self, key: str) -> bool:
        return bool(self._request("delete_key", [_text(key)]))

    def num_keys(self) -> int:
        return int(self._request("num_keys", []))

    # torch's C++ half calls these two by their C++ names.
    def deleteKey(self, key: str) -> bool:
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        return self.num_keys()

    def append(self, key: str, value: bytes | str) -> None:
        self._request("append", [_text(key), _bytes(value)])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [bytes(value) for value in self._request("multi_get", [_texts(keys)])]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        self._request("multi_set", [_texts(keys), [_bytes(value) for value in values]])

    def list_keys(self) -> list[str]:
        """Keys that were set; not queues."""
        return [str(key) for key in self._request("list_keys", [])]

    def queue_push(self, key: str, value: bytes | str) -> None:
        self._request("queue_push", [_text(key), _bytes(value)])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """The oldest value, which nobody else gets. QueueEmptyError if there is none and `block` is false."""
        value = self._request("queue_pop", [_text(key), bool(block)])
        if value is None:
            raise QueueEmptyError(f"queue {key!r} is empty")
        return bytes(value)

    def queue_len(self, key: str) -> int:
        return int(self._request("queue_len", [_text(key)]))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> EpochStore:
        return EpochStore(self._channel, self._epoch, self._timeout())

    def _timeout(self) -> timedelta:
        timeout: timedelta = getattr(self, "timeout")  # noqa: B009  (torch's type stubs leave the property out)
        return timeout

    def _request(self, op: str, args: list[Any], timeout: timedelta | None = None) -> Any:
        # The timeout must be read here and now: PrefixStore.set_timeout changes it without calling Python.
        timeout_s = (self._timeout() if timeout is None else timeout).total_seconds()
        deadline_s = timeout_s if 0 <= timeout_s < _LONGEST_S else _LONGEST_S
        try:
            return self._channel.request(self._epoch, op, args, deadline_s)
        except StoreError:
            raise
        except (LookupError, TimeoutError, OSError, ValueError, RuntimeError) as error:
            raise StoreError(f"store {op}: {error}") from error


def raise_or_return(reply: StoreReply) -> Any:
    """The value of a reply, or the exception it stands for."""
    if reply.ok:
        return reply.value
    if reply.ended:
        raise StoreEnded(reply.error)
    if reply.timed_out:
        raise StoreTimeout(reply.error)
    raise StoreError(reply.error)


class AgentChannel:
    """A channel for processes of the node that are not its agent. OSError if none listens at the address."""

    def __init__(self, agent: str) -> None:
        self._lines = StoreLines(agent)

    def request(self, epoch: int, op: str, args: list[Any], deadline_s: float) -> Any:
        return raise_or_return(self._lines.request(epoch, op, args, deadline_s))


_channels: dict[str, AgentChannel] = {}


def channel_to(agent: str) -> AgentChannel:
    """This process's channel to its node's agent. StoreError if that is gone."""
    if agent not in _channels:
        try:
            _channels[agent] = AgentChannel(agent)
        except OSError as error:
            raise StoreEnded(f"this node's agent is gone ({error}): torchrun starts the workers anew") from error
    return _channels[agent]


def worker_store(agent: str, epoch: int, prefix: str, timeout: timedelta | None) -> Store:
    """The store of a round, from a process that is not the node's agent. StoreError if that is gone."""
    return PrefixStore(prefix, EpochStore(channel_to(agent), epoch, timeout))


def _bytes(value: bytes | str) -> bytes:
    """What is too long is refused here, so that no agent spends time on it."""
    if isinstance(value, str):
        value = _text(value).encode()
    if not isinstance(value, bytes | bytearray | memoryview):
        raise StoreError(f"a store's value is a {type(value).__name__}: give bytes or a string")
    plain = bytes(value)
    if len(plain) > MAX_VALUE_BYTES:
        raise StoreError(f"a store's value has {len(plain)} bytes, and at most {MAX_VALUE_BYTES} are allowed")
    return plain


def _text(value: bytes | str) -> str:
    """A key, or a value that is text. StoreError for what no message can carry."""
    try:
        if isinstance(value, bytes):
            return value.decode()
        value.encode()
        return value
    except (AttributeError, UnicodeError) as error:
        raise StoreError(f"{value!r:.100} in a store's call: give text that UTF-8 can say ({error})") from error


def _texts(keys: Sequence[bytes | str]) -> list[str]:
    if isinstance(keys, str | bytes):
        raise StoreError(f"{keys!r:.100} in a store's call: give a list of keys")
    return [_text(key) for key in keys]


def _number(amount: int) -> int:
    try:
        number: int = operator.index(amount)
    except TypeError:
        number = 1 << 64
    if not -(2**63) <= number < 2**63:
        raise StoreError(f"a counter of a store goes by whole numbers of 64 bits, not by {amount!r:.100}")
    return number
