"""A node that is asked to leave lets its workers finish their step first, for a bounded time.

In: the wish to leave, what its workers say. Out: one call when they stand between two steps and their newest version
has arrived at their buddies, or when time is up: whoever goes on without this node then loses no step.
"""

from __future__ import annotations

from collections.abc import Callable

from p2pstate.agent.held import Phase
from p2pstate.agent.supervisor import Supervisor, WorkerProcess
from p2pstate.worker.farewell import GRACE_S
from rendezvous.node import Node

__all__ = ["Pausing"]


class Pausing:
    def __init__(self, node: Node, supervisor: Supervisor) -> None:
        self._node = node
        self._supervisor = supervisor
        self._waiting_for: set[int] = set()  # process ids
        self._done: Callable[[], None] | None = None
        self.begun = False

    def begin(self, reason: str, done: Callable[[], None]) -> None:
        self.begun = True
        self._done = done
        workers = [worker for worker in self._supervisor.assigned() if worker.phase is Phase.LOOP and not worker.ended]
        self._waiting_for = {worker.pid for worker in workers}
        for worker in workers:
            self._supervisor.tell(worker, {"t": "pause", "reason": reason})
        self._node.call_later(GRACE_S, self._finish)
        self.over(None)

    def over(self, worker: WorkerProcess | None) -> None:
        """This worker need not be waited for any more."""
        if worker is not None:
            self._waiting_for.discard(worker.pid)
        if not self._waiting_for:
            self._finish()

    def _finish(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done()
