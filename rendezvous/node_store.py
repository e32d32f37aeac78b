"""The store for threads of the process that runs the node itself.

Flows in: operations of an `EpochStore`. Flows out: requests on the node's thread. Apart from store.py, because workers
import that one and need nothing of a node.
"""

from __future__ import annotations

import queue
import time
from typing import Any

from rendezvous.node import Node
from rendezvous.store import StoreEnded, StoreTimeout, raise_or_return
from rendezvous.types import STORE_ANSWER_S, StoreReply

_CHECK_INTERVAL_S = 0.05


class NodeChannel:
    """A channel for threads of the process that runs the node itself. `close` frees everybody who waits."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._closed = False

    def request(self, epoch: int, op: str, args: list[Any], deadline_s: float) -> Any:
        answers: queue.SimpleQueue[StoreReply] = queue.SimpleQueue()
        self._node.call_soon_threadsafe(
            lambda: self._node.store_request(epoch, op, args, deadline_s, answers.put),
        )
        until_s = time.monotonic() + deadline_s + 2 * STORE_ANSWER_S  # the node itself answers before
        while not self._closed:
            try:
                return raise_or_return(answers.get(timeout=_CHECK_INTERVAL_S))
            except queue.Empty:
                if time.monotonic() >= until_s:
                    raise StoreTimeout(f"store {op}: the node did not answer in {deadline_s:g} s") from None
        raise StoreEnded("this process gave up the store")

    def close(self) -> None:
        self._closed = True
