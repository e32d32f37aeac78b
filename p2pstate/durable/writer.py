"""The process that touches storage, so that nothing else has to wait for it.

In: over a channel from the node's agent, descriptors of slots and orders: ``begin`` (name a new save), ``write`` (this
node's shares), ``publish`` (make it a checkpoint), ``retain`` (delete older ones), each with ``where``: what
remote.open_storage is given. Out: one reply each. Storage that is full, slow, read-only or gone costs a reply or this
process, never training.

Fate: it ends with its agent. Orders are done one after the other; an agent that does not want to wait any longer kills
this process and starts another.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from p2pstate.durable.catalog import delete, list_checkpoints, next_name, to_delete, written_by_others
from p2pstate.durable.dcp_write import SaveFailed, write_shares
from p2pstate.durable.division import Share
from p2pstate.durable.manifest import METADATA
from p2pstate.durable.publish import publish_checkpoint
from p2pstate.durable.remote import open_storage
from p2pstate.durable.storage import Storage
from p2pstate.slots import Slot
from p2pstate.types import Version
from rendezvous.channel import Channel, ChannelClosed
from rendezvous.processes import die_with_parent

__all__ = ["writer_main"]

NICE = 5  # training has the processor first


def writer_main(sock: socket.socket) -> int:
    """Serve until the agent's end of the channel closes."""
    os.nice(NICE)
    torch.set_num_threads(1)
    torch.serialization.set_crc32_options(False)  # every file has a better digest of its own
    channel = Channel(sock, blocking=True)
    channel.send({"t": "writer_ready", "pid": os.getpid()})
    writer = _Writer()
    try:
        while True:
            for message, fds in channel.receive():
                kind = message.pop("t")
                if kind == "slot":
                    writer.slots[message["slot"]] = fds[0]
                    continue
                try:
                    reply = getattr(writer, kind)(**message)
                except OSError as error:
                    what = f"{error.strerror or error} ({error.filename})" if error.filename else str(error)
                    reply = {"error": f"storage: {what}"}
                except (SaveFailed, RuntimeError, ValueError, ImportError) as error:
                    reply = {"error": str(error)}
                channel.send({"t": f"{kind}_done", "serial": message["serial"], "error": "", **reply})
    except ChannelClosed:
        return 0


class _Writer:
    """``slots``: descriptors that came for the next ``write``; closed when it is done."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self._opened: tuple[list[str], Storage] | None = None

    def _storage(self, where: list[str]) -> Storage:
        if self._opened is None or self._opened[0] != where:
            place, stage = where
            self._opened = where, open_storage(place, stage)
        return self._opened[1]

    def begin(self, *, serial: int, where: list[str], step: int, failed: list[str], newest: str) -> dict[str, Any]:
        """``failed``: saves of this run that did not come to their end; the room that they take may be all there is.
        ``newest``: the name of this run's newest save."""
        storage = self._storage(where)
        for each in failed:
            with contextlib.suppress(OSError):
                if storage.size(each, METADATA) is None:
                    storage.delete(each, METADATA)
        name = next_name(storage, step, newest)
        storage.begin(name)
        return {"name": name}

    def write(
        self,
        *,
        serial: int,
        where: list[str],
        name: str,
        place: int,
        node: str,
        version: list[int],
        num_ranks: int,
        shares: list[Any],
    ) -> dict[str, Any]:
        began = time.monotonic()
        try:
            given = [Share.unpack(raw) for raw in shares]
            mapped = {slot: Slot(fd) for slot, fd in self.slots.items()}
            pairs = [(share, mapped[share.slot]) for share in given]
            storage = self._storage(where)
            digest, num_bytes = write_shares(storage, name, place, node, Version(*version), num_ranks, pairs)
        finally:
            for fd in self.slots.values():
                os.close(fd)
            self.slots.clear()
        return {"digest": digest, "num_bytes": num_bytes, "seconds": time.monotonic() - began}

    def publish(
        self,
        *,
        serial: int,
        where: list[str],
        name: str,
        digests: list[Any],
        run: list[str],
        version: list[int],
        world_size: int,
        reason: str,
    ) -> dict[str, Any]:
        storage = self._storage(where)
        run_id, nonce = run
        manifest = publish_checkpoint(
            storage, name, dict(digests), (run_id, nonce), Version(*version), world_size, time.time(), reason
        )
        return {"num_bytes": manifest.num_bytes}

    def retain(
        self, *, serial: int, where: list[str], run: list[str], keep: int, first: str, damaged: list[str]
    ) -> dict[str, Any]:
        """Delete older saves than the newest ``keep``. ``first``: the name of the first save that this node has led in
        this run. ``damaged``: names of saves whose bytes were found to be wrong."""
        storage = self._storage(where)
        run_id, nonce = run
        us = run_id, nonce
        existing = [
            replace(found, problem=found.problem or "is damaged") if found.name in damaged else found
            for found in list_checkpoints(storage)
        ]
        problem = ""
        for other in written_by_others(existing, us, first)[:1]:
            assert other.manifest is not None
            problem = (
                f"another run ({other.manifest.run[0]}) writes to {storage.where} as well: only saves of this "
                "run are deleted, and the newest of all is what either resumes. Give each run a place of its own"
            )
        for found in to_delete(existing, keep, us, first):
            delete(found)
        return {"problem": problem}


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    sys.exit(writer_main(socket.socket(fileno=int(sys.argv[1]))))
