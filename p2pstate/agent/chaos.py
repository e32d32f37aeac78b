"""Faults on request, on this node: what `p2pstate chaos` asks of an agent that was started with ``p2prun --chaos``.

In: an action, a rank, perhaps a phase. Out: a signal, damaged bytes, silence, or this node's end, and a sentence about
it.
Invariants: only processes and memory of this node's own run are touched; an agent without ``--chaos`` refuses.
Limits: a partition cuts the agent off, which decides who trains; it needs no privileges, and leaves the connections
between workers until the round that the others end without this node.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from p2pstate.agent.supervisor import Supervisor, WorkerProcess
from p2pstate.slots import HEADER_BYTES
from p2pstate.trace import Doing, read
from p2pstate.vault import Vault
from rendezvous.cut_transport import CutTransport
from rendezvous.node import Node

__all__ = ["ACTIONS", "NODE_ACTIONS", "PARTITION_S", "PHASES", "Chaos", "change_bytes"]

ACTIONS = ("kill", "stop", "corrupt", "node", "partition")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}  # of actions that hit a process
NODE_ACTIONS = ("node", "partition")  # what a whole node suffers
PHASES = tuple(doing.name.lower() for doing in Doing)
POLL_S = 0.002
PHASE_WAIT_S = 60.0
PARTITION_S = 15.0  # longer than the others wait for a silent node
MAX_PARTITION_S = 3600.0
NODE_SUFFERS_AFTER_S = 0.1  # so that the answer is heard
NUM_FLIPPED_BYTES = 16


class Chaos:
    def __init__(
        self,
        node: Node,
        transport: CutTransport,
        supervisor: Supervisor,
        vault: Vault,
        tell: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        """``transport``: the node's. ``tell`` is called with each fault that was injected: what, in words, and in
        fields."""
        self._node = node
        self._transport = transport
        self._supervisor = supervisor
        self._vault = vault
        self._tell = tell

    def answer(self, request: Any) -> dict[str, Any]:
        """``{"action", "rank", "phase", "seconds"}`` -> ``{"done": sentence}`` or ``{"refused": reason}``."""
        try:
            action, rank, phase = request["action"], request.get("rank"), request.get("phase")
            if action not in ACTIONS or (phase is not None and phase not in PHASES):
                return {"refused": f"no such action or phase: {action!r}, {phase!r}"}
            if action == "partition":
                return {"done": self._partition(float(request.get("seconds", PARTITION_S)))}
            return {"done": self._begin(action, rank, phase)}
        except (TypeError, KeyError, AttributeError):
            return {"refused": "not a request"}
        except ValueError as error:
            return {"refused": str(error)}

    def _begin(self, action: str, rank: Any, phase: str | None) -> str:
        if action == "node":
            self._node.call_later(NODE_SUFFERS_AFTER_S, lambda: os.kill(os.getpid(), signal.SIGKILL))
            return self._told("node", None, "this node's agent is killed, and its workers with it")
        if action == "corrupt":
            return self._corrupt(rank)
        worker = self._worker(rank)
        if phase is None:
            return self._signal(worker, action)
        until_s = time.monotonic() + PHASE_WAIT_S

        def look() -> None:
            if worker.ended or worker.page is None or time.monotonic() > until_s:
                self._tell(f"chaos: rank {rank} did not come to be {phase}: nothing was done", {"action": action})
            elif read(worker.page).doing.name.lower() == phase:
                self._signal(worker, action)
            else:
                self._node.call_later(POLL_S, look)

        look()
        moment = "between steps" if phase == "between" else phase
        return f"{SIGNALS[action].name} to rank {rank} (pid {worker.pid}) as soon as it is {moment}"

    def _partition(self, seconds: float) -> str:
        if not 0 < seconds <= MAX_PARTITION_S:
            raise ValueError(f"a partition of {seconds:g} seconds: more than 0, at most {MAX_PARTITION_S:g}")
        self._node.call_later(NODE_SUFFERS_AFTER_S, lambda: self._transport.cut(seconds))
        return self._told("partition", None, f"this node neither hears nor is heard for {seconds:g} s")

    def _worker(self, rank: Any) -> WorkerProcess:
        worker = self._supervisor.of_rank(rank)
        if worker is None or worker.ended:
            raise ValueError(f"rank {rank} has no process on this node now")
        return worker

    def _signal(self, worker: WorkerProcess, action: str) -> str:
        sign = SIGNALS[action]
        try:
            os.kill(worker.pid, sign)  # a process of ours that was not reaped yet
        except ProcessLookupError:
            raise ValueError(f"rank {worker.rank} has ended") from None
        return self._told(action, worker.rank, f"{sign.name} to rank {worker.rank} (pid {worker.pid})")

    def _corrupt(self, rank: Any) -> str:
        """Change bytes of every copy of a shard in this node's vault; its digests do not match from now on."""
        damaged = 0
        for record in self._vault.records():
            fd = self._vault.open(record.slot)
            if record.part.kind != "own" or record.part.members != (rank,) or fd is None:
                continue
            change_bytes(fd)
            damaged += 1
        if not damaged:
            raise ValueError(f"this node has no copy of shard {rank}")
        return self._told("corrupt", rank, f"bytes of {damaged} slots of shard {rank} were changed")

    def _told(self, action: str, rank: int | None, sentence: str) -> str:
        self._tell(f"chaos: {sentence}", {"action": action, "rank": rank})
        return sentence


def change_bytes(slot: int) -> None:
    """Of what the slot behind this descriptor holds: its digest does not match from now on."""
    raw = os.pread(slot, NUM_FLIPPED_BYTES, HEADER_BYTES)
    os.pwrite(slot, bytes(byte ^ 0xFF for byte in raw), HEADER_BYTES)
