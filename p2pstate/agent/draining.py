"""Before this node leaves, or the run ends: the newest version that is whole goes to disk, within a bounded time.

In: why it ends, what the vaults hold, saves. Out: a checkpoint where that was possible, one event that says what was
written or why nothing was, and then, always, the end that was asked for.

While training goes on, its ranks are asked for a save (their slots change all the time, and are set aside for it). When
it does not, the slots stand still: the vaults of all nodes that are left are asked what they hold, and whoever asks
leads the save of the newest version that they have all of, copies of the dead nodes' shards included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from p2pstate.agent.events import EventLog
from p2pstate.agent.saves import Saves
from p2pstate.durable.division import divide_version
from p2pstate.types import RoundInfo, SlotRecord, Version
from p2pstate.vault import Vault
from rendezvous.node import Node
from rendezvous.types import MemberKey

__all__ = ["DRAIN_S", "Draining"]

DRAIN_S = 20.0  # schedulers kill after 30
BEGIN_S = 5.0  # for training to come to its next version
GATHER_S = 1.0  # for the other nodes to answer
REPEAT_S = 0.3
KIND = "drain"


class Draining:
    """Everything on the node's thread. ``lineage``: round -> the version it resumed."""

    def __init__(
        self, node: Node, vault: Vault, events: EventLog, saves: Saves, lineage: Mapping[int, list[int]], name: str
    ) -> None:
        self._node, self._vault, self._events, self._saves, self._lineage = node, vault, events, saves, lineage
        self._name = name
        self._info: RoundInfo | None = None
        self._reason = ""
        self._then: Callable[[], None] | None = None
        self._gathered: dict[str, tuple[list[SlotRecord], list[tuple[int, Version]]]] | None = None
        self._version: Version | None = None  # of the save that this node leads
        self.on_disk = False  # the newest drain has left its version on disk

    @property
    def active(self) -> bool:
        return self._then is not None

    def start(self, info: RoundInfo | None, reason: str, then: Callable[[], None], *, training: bool) -> None:
        """Drain, then call ``then``, at once where there is nothing to do. ``training``: the ranks go on with steps."""
        self.on_disk = False
        if info is None or not self._saves.configured:
            then()
            return
        self._gathered = self._version = None
        self._info, self._reason, self._then = info, reason, then
        self._node.call_later(DRAIN_S, lambda: self._too_late(then))
        if training:
            began = time.monotonic()
            self._saves.ask_training(lambda version, error, name: self._training_saved(began, version, error, name))
            self._node.call_later(BEGIN_S, self._check_begun)
        else:
            self._ask()

    def heard(self, sender: MemberKey, body: Any) -> None:
        """Raises KeyError, TypeError or ValueError for nonsense."""
        record = self._node.members().get(sender)
        if record is None:
            return
        name = record.member.name
        match body["op"]:
            case "ask":
                self._node.send(sender, KIND, {"op": "records", **self._own()})
            case "records" if self._gathered is not None:
                records = [SlotRecord.unpack(raw) for raw in body["records"]]
                self._gathered[name] = records, [(int(e), Version(*v)) for e, v in body["lineage"]]
                if set(self._gathered) >= self._nodes_left():
                    self._choose()
            case "save" if self._version is None or name < self._name:  # two lead: the first by name goes on
                home = {int(rank): str(node) for rank, node in body["home"]}
                places = {str(node): place for place, node in enumerate(body["places"])}
                version = Version(*body["version"])
                if self._saves.is_saving(version) and self._version is None:
                    return  # it was said before
                self._version = None
                self._saves.start(version, "the run ends", name, home, places, DRAIN_S, self._saved)

    def _own(self) -> dict[str, Any]:
        records = [record.pack() for record in self._vault.records() if record.version]
        return {"records": records, "lineage": [[epoch, version] for epoch, version in self._lineage.items()]}

    def _nodes_left(self) -> set[str]:
        members = [record.member for record in self._node.members().values() if record.live]
        return {member.name for member in members if member.num_workers}

    # -- while training goes on

    def _check_begun(self) -> None:
        """A version may be far away: then what is protected stands still, too."""
        if self.active and self._gathered is None and not self._saves.busy:
            self._ask()

    def _training_saved(self, began: float, version: Version, error: str, name: str) -> None:
        if self._gathered is None and self._saves.began_at >= began:
            self._saved(version, error, name)

    # -- when it does not

    def _ask(self) -> None:
        own = self._own()
        mine = [(int(epoch), Version(*version)) for epoch, version in own["lineage"]]
        self._gathered = {self._name: ([SlotRecord.unpack(raw) for raw in own["records"]], mine)}
        if set(self._gathered) >= self._nodes_left():
            self._choose()
            return
        self._node.broadcast(KIND, {"op": "ask"})
        self._node.call_later(GATHER_S, self._choose)

    def _choose(self) -> None:
        if not self.active or self._gathered is None or self._version is not None:
            return
        if self._saves.busy:  # with another one, whose end may be what is wanted here
            self._node.call_later(REPEAT_S, self._choose)
            return
        assert self._info is not None
        turns = [turn for _, lineage in self._gathered.values() for turn in lineage]
        records = [
            record
            for held, _ in self._gathered.values()
            for record in held
            if record.version and not any(record.version.epoch < e and record.version > v for e, v in turns)
        ]
        home = {worker.rank: worker.node for worker in self._info.workers}
        for version in sorted({record.version for record in records if record.version}, reverse=True):
            of_version = [record for record in records if record.version == version]
            if isinstance(divide_version(home, of_version), str) or version.step == 0:
                continue
            if version == self._saves.on_disk:
                self._finish("", f"step {version.step} is on disk already")
                return
            holders = sorted({record.node for record in of_version} - {self._name})
            self._lead(version, home, [self._name, *holders])
            return
        self._finish("no version is whole any more")

    def _lead(self, version: Version, home: Mapping[int, str], nodes: list[str]) -> None:
        self._version = version
        body = {"op": "save", "version": list(version), "home": [[r, n] for r, n in home.items()], "places": nodes}
        places = {node: place for place, node in enumerate(nodes)}

        def tell() -> None:
            if self._version == version and self._saves.is_gathering(version):
                self._node.broadcast(KIND, body)
                self._node.call_later(REPEAT_S, tell)

        self._saves.start(version, "the run ends", self._name, home, places, DRAIN_S, self._saved)
        tell()

    def _saved(self, version: Version, error: str, name: str) -> None:
        if self.active:
            self._finish(error, f"step {version.step} is on disk ({name})")

    def _too_late(self, then: Callable[[], None]) -> None:
        if self._then is then:
            self._finish(f"it took longer than {DRAIN_S:g} s")

    def _finish(self, error: str, text: str = "") -> None:
        """Say what was written, and end. Once."""
        then, self._then = self._then, None
        if then is None:
            return
        self.on_disk = not error
        sentence = f"before the end ({self._reason}): {text}"
        if error:
            sentence = f"before the end ({self._reason}) nothing was written to disk: {error}"
        self._events.emit("drained", sentence, error=error, text=text, reason=self._reason)
        then()
