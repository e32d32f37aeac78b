"""The workers of a node that torchrun starts: processes that ask for a place, and are nobody's children here.

In: their lines and what they ask, the ends of their processes. Out: the same things that a supervisor of own workers
offers (held.RankProcesses).

Invariants: a signal goes to a process only while a descriptor of exactly that process is held; a process that closed
its line counts until it has ended, for it can still write into its rank's memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from p2pstate.agent.held import Phase, RankProcess
from p2pstate.agent.output import Writer
from rendezvous.channel import Channel, Message
from rendezvous.companion import Host
from rendezvous.processes import open_pidfd

__all__ = ["Attached", "AttachedWorkers"]

_STDERR = 2


@dataclass(slots=True, eq=False)
class Attached(RankProcess):
    """A process that asked for the place of ``asks`` in round ``epoch``; ``rank`` once it has it."""

    pidfd: int = -1
    asks: int = -1
    num_local: int = 1


class AttachedWorkers:
    """Everything on the node's thread. ``on_ended`` is called with each one whose process has ended."""

    def __init__(self, host: Host, writer: Writer, on_ended: Callable[[Attached], None]) -> None:
        self._host = host
        self._node = host.node
        self._writer = writer
        self._on_ended = on_ended
        self._all: dict[int, Attached] = {}  # by pidfd

    def add(self, channel: Channel, pid: int, round_: int, rank: int, num_local: int) -> None:
        """One has asked for its place. A process that has ended meanwhile is none."""
        pidfd = open_pidfd(pid)
        if pidfd is None:
            return
        worker = Attached(pid, channel, Phase.FRESH, epoch=round_, pidfd=pidfd, asks=rank, num_local=num_local)
        self._all[pidfd] = worker
        self._node.add_reader(pidfd, lambda: self._ended(worker))

    def waiting(self, round_: int) -> list[Attached]:
        """Those that have no place yet, and ask for one in this round."""
        return [w for w in self._all.values() if w.rank is None and w.epoch == round_ and not w.ended]

    def of_channel(self, channel: Channel) -> Attached:
        """KeyError for a line on which nobody has asked for a place."""
        for worker in self._all.values():
            if worker.channel is channel and not worker.ended:
                return worker
        raise KeyError("a message of a process that has not said who it is")

    def closed(self, channel: Channel) -> None:
        for worker in self._all.values():
            worker.ended = worker.ended or worker.channel is channel

    def free(self, rank: int, successor: Attached) -> bool:
        """Whether nobody else can write into this rank's memory any more. Ends who still could."""
        others = [worker for worker in self._all.values() if worker.asks == rank and worker is not successor]
        for other in others:
            self.kill(other)
        return not others

    def tell(self, worker: Attached, message: Message, fds: tuple[int, ...] = ()) -> None:
        self._host.tell(worker.channel, message, fds)

    def tell_ranks(self, message: Message) -> None:
        for worker in self.assigned():
            self.tell(worker, message)

    def close(self) -> None:
        for worker in self._all.values():
            self._node.remove_reader(worker.pidfd)
            os.close(worker.pidfd)
        self._all.clear()

    def _ended(self, worker: Attached) -> None:
        self._node.remove_reader(worker.pidfd)
        os.close(worker.pidfd)
        del self._all[worker.pidfd]
        worker.ended = True
        self._on_ended(worker)

    # -- held.RankProcesses

    def assigned(self) -> list[Attached]:
        return [worker for worker in self._all.values() if worker.rank is not None]

    def of_rank(self, rank: int) -> Attached | None:
        return next((worker for worker in self.assigned() if worker.rank == rank and not worker.ended), None)

    def note(self, worker: Attached, text: str) -> None:
        """On this process's standard error, which is torchrun's: the worker's own output is not ours."""
        prefix = f"[{worker.rank}] ".encode()
        self._writer.put(_STDERR, b"".join(prefix + line for line in text.encode().splitlines(keepends=True)))

    def signal(self, worker: Attached, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker.pidfd, number)

    def kill(self, worker: Attached) -> None:
        self.signal(worker, signal.SIGKILL)
